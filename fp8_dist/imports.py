"""Late imports: names of a package that need torch, and functions that run after imports.

Packages of commands are imported without torch, so that a command answers ``--help`` at once.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """A meta path finder that calls a function now, and after imports of certain modules.

    It stops when the function returns True. Of nested imports, only the outermost one counts. An
    ImportError that the function raises later than now is ignored.

    Args:
        is_meant: takes a module's name, and returns whether it is one of the modules.
        call: the function, which returns whether to stop.
    """

    def __init__(self, is_meant: Callable[[str], bool], call: Callable[[], bool]) -> None:
        self._is_meant = is_meant
        self._call = call
        self._depth = 0
        if not call():
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not self._is_meant(name):
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (other.find_spec(name, path, target) for other in others)), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            self._depth += 1
            try:
                load(module)
                if self._depth == 1 and self in sys.meta_path:
                    with suppress(ImportError):  # the import of this module has succeeded
                        if self._call():
                            sys.meta_path.remove(self)
            finally:
                self._depth -= 1

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def export(package: str, home: str, submodules: Sequence[str] = ()) -> None:
    """Give a package the names in ``__all__`` of a module that needs torch.

    Without ``__all__``, these are the version and the names that do not begin with an underscore.
    They become attributes when torch is imported, or before that when one of them is first used.

    Args:
        package: the name of the package, which is being imported.
        home: the name of the module.
        submodules: modules of the package that ``dir()`` lists, too.
    """
    names = vars(sys.modules[package])

    def fill() -> None:
        if "__all__" in names:
            return
        module = import_module(home)
        public = [n for n in dir(module) if n == "__version__" or not n.startswith("_")]
        exported = getattr(module, "__all__", public)
        for name in exported:
            names[name] = getattr(module, name)
        names["__all__"] = exported

    def get(name: str) -> Any:
        if find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        fill()
        if name in names:
            return names[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        fill()
        return sorted({*names, *submodules})

    def fill_with_torch() -> bool:
        if has_torch := sys.modules.get("torch") is not None:
            fill()
        return has_torch

    names.update(__getattr__=get, __dir__=list_names)
    AfterImport(lambda name: name == "torch" or name.startswith("fp8_dist."), fill_with_torch)
