"""The call graph of the library, from its sources: which functions refer to which.

It is an over-approximation. A name is resolved through imports and the names of its module. An
attribute of another object than a module stands for each function and method of that name in the
library, because operators are attributes of ``torch.ops``, too. A function that is passed on, decorated or bound by ``partial`` is referred to, too. What a function
defines inside itself is a part of it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

Modules = Mapping[str, ast.Module]
# The full names of functions. For each name or attribute in a function, what it may stand for.
Graph = dict[str, list[set[str]]]


def functions(modules: Modules) -> dict[str, ast.AST]:
    """Functions and methods by their full names, and what a module runs when it is imported."""
    found: dict[str, ast.AST] = {}
    for name, tree in modules.items():
        rest: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found[f"{name}.{node.name}"] = node
            elif isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        found[f"{name}.{node.name}.{part.name}"] = part
                    else:
                        rest.append(part)
            else:
                rest.append(node)
        found[name] = ast.Module(rest, [])
    return found


def imported(tree: ast.AST) -> dict[str, str]:
    """The full names of what a tree imports, by the names that it uses."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name
    return names


def exported(modules: Modules) -> dict[str, str]:
    """Where names that a package only passes on are defined: full name -> full name."""
    return {
        f"{name}.{alias}": full
        for name, tree in modules.items()
        for alias, full in imported(tree).items()
    }


def call_graph(modules: Modules) -> Graph:
    """The functions of modules, and what each refers to, also outside of the modules."""
    known = functions(modules)
    passed_on = exported(modules)
    named: dict[str, set[str]] = defaultdict(set)
    for full in known:
        named[full.rpartition(".")[2]].add(full)

    def defined(full: str) -> str:
        while full in passed_on and full not in known:
            full = passed_on[full]
        return full

    graph: Graph = {}
    for full, node in known.items():
        module = max((m for m in modules if f"{full}.".startswith(f"{m}.")), key=len)
        names = imported(modules[module]) | imported(node)
        graph[full] = [
            {defined(target) for target in _targets(part, module, names, named)}
            for part in ast.walk(node)
            if isinstance(part, ast.Name | ast.Attribute)
        ]
    return graph


def _targets(
    node: ast.AST, module: str, names: Mapping[str, str], named: Mapping[str, set[str]]
) -> Iterator[str]:
    """The full names that a node may stand for."""
    match node:
        case ast.Name(id=name):
            yield names.get(name, f"{module}.{name}")
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in names:
            yield f"{names[name]}.{attr}"
            yield from named.get(attr, ())
        case ast.Attribute(attr=attr):
            yield from named.get(attr, ())
