"""Operands are cast at the doors that docs/design.md names, and nowhere else.

The test follows references, not names of variables: a function of the rooms `kernels` and `scaling`
that makes float8 data may be referred to by a door alone, whatever the receiver or the alias is.
"""

import ast
from collections import Counter
from collections.abc import Mapping

import pytest
from call_graph import Graph, call_graph, functions, imported
from test_design import modules, quoted, rows

K, S = "fp8_dist.kernels", "fp8_dist.scaling"
TRITON = f"{K}.cuda.triton"
# Kernels that make float8 data of data in high precision, or float8 data with other scales.
CASTING_KERNELS = {
    *(f"{K}.quantization.{name}" for name in ("quantize", "cast_copies", "cast_fresh")),
    *(f"{K}.quantization.{name}" for name in ("cast_and_measure", "cast_tensors")),
    f"{K}.quantization.fusible_copies",
    *(f"{K}.blocks.{name}" for name in ("cast_blocks", "quantize_block_copies", "pack_blocks")),
    *(f"{K}.blocks.{name}" for name in ("quantize_by_scales", "cast_tensors_in_blocks", "reblock")),
    *(f"{K}.folding.{name}" for name in ("fold_gradient", "fold_weight_scale", "fold_groups")),
    f"{K}.encoding.encode_float8",
}
# What casts with a scheme: methods by their names, on any object, and functions.
CASTING_METHODS = {
    *("cast", "cast_each", "cast_packed", "cast_and_measure", "fusible_cast", "quantize"),
    "for_rows",
}
CASTING_FUNCTIONS = {
    *(f"{S}.operators.{name}" for name in ("cast", "cast_in_graph", "cast_operator")),
    f"{S}.dense.cast_in_one_pass",
}
# Kernels that make no float8 data of data in high precision.
OTHER_KERNELS = {
    *(f"{K}.scale.{name}" for name in ("amax", "amaxes", "amax_of_tensors", "scaling_from_amax")),
    *(f"{K}.blocks.{name}" for name in ("amaxes_of_groups", "block_amaxes", "block_exponents")),
    *(f"{K}.blocks.{name}" for name in ("dequantize_blocks", "fp32_block_scales")),
    *(f"{K}.encoding.{name}" for name in ("pack_rows", "sum_of_rows")),
    *(f"{K}.folding.{name}" for name in ("row_amaxes", "unit_scales")),
    *(f"{K}.gemm.{name}" for name in ("scaled_mm", "block_scaled_mm")),
    *(f"{K}.grouped.{name}" for name in ("places_of_groups", "rows_of_groups")),
    *(f"{K}.e2m1.{name}" for name in ("pack_e2m1", "unpack_e2m1")),  # of float8 data
    f"{K}.quantization.transposed_copy",
}
# How often functions outside of `kernels` and `scaling` refer to what casts. Doors are those of
# docs/design.md.
DOORS = {
    "fp8_dist.operand.prepare.cast_local": {"cast": 1, "cast_in_graph": 1},
    "fp8_dist.operand.state.look_up": {"cast_operator": 1},
    "fp8_dist.operand.cast._CastToFloat8.forward": {"to": 1},
    "fp8_dist.fsdp.weight._cast_together": {"cast_each": 1},
    "fp8_dist.linear.rowwise_folded.folded_gradients": {"fold_gradient": 1},
    "fp8_dist.linear.rowwise_folded._fold_distributed": {"quantize": 2, "fold_weight_scale": 1},
    "fp8_dist.linear.autograd._gemm": {"for_rows": 3},
    "fp8_dist.moe.operators._gradient_operands": {"fold_groups": 1},
    "fp8_dist.moe.operators._sums": {"for_rows": 1},
    "fp8_dist.moe.operators._sums_of_blocks": {"for_rows": 1},
    "fp8_dist.transport.encode": {"encode_float8": 1},
    "fp8_dist.debug.replay.comparisons._cast_delayed": {"to": 1},
    "fp8_dist.debug.replay.comparisons._fold_again": {"fold_gradient": 1},
    "fp8_dist.debug.replay.comparisons.compare_taken": {"for_rows": 1},
}
# Functions that cast nothing, and what the name is of.
OF_OTHERS = {
    "fp8_dist.linear.autograd._LinearFunction.backward": {"cast": 1},  # an Uncast
    "fp8_dist.moe.functions._gradients": {"cast": 1},  # an Uncast
    "fp8_dist.weight.stored_weight.StoredWeight.load": {"cast": 1},  # StoredWeight
    "fp8_dist.weight.stored_weight.StoredWeight.write": {"cast": 1},  # StoredWeight
    "fp8_dist.fsdp.weight.Float8AllGatherWeight.kept_inputs": {"cast": 1},  # a kept cast
    "fp8_dist.fsdp.weight._wait_for_readers": {"cast": 2},  # a kept cast
    "fp8_dist.debug.replay.printing.page": {"cast": 2},  # a record
    "fp8_dist.debug.audit._Recorder.__torch_dispatch__": {"encode_float8": 1},  # is compared
}


# Parts of expressions of float8 dtypes.
FLOAT8 = ("float8_e", "e4m3", "e5m2", "scheme.dtype")


def is_inside(name: str) -> bool:
    return name.startswith((f"{K}.", f"{S}."))


def conversions(node: ast.AST) -> int:
    """How often a function may convert a tensor to a float8 dtype with torch's ``to``."""
    count = 0
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(attr="to" | "type"), args=args, keywords=keywords):
                given = " ".join(map(ast.unparse, [*args, *(word.value for word in keywords)]))
                count += any(word in given for word in FLOAT8)
    return count


def casts(library: Mapping[str, ast.Module]) -> dict[str, dict[str, int]]:
    """The functions outside of `kernels` and `scaling` that cast, and how often they do it how."""
    graph: Graph = call_graph(library)
    methods = {
        name
        for name in graph
        if name.startswith(f"{S}.") and name.rpartition(".")[2] in CASTING_METHODS
    }
    casting = CASTING_KERNELS | CASTING_FUNCTIONS | methods
    assert casting <= graph.keys(), "a casting function has another name now"
    found: dict[str, dict[str, int]] = {}
    for name, node in functions(library).items():
        if is_inside(name):
            continue
        counts: Counter[str] = Counter()
        for targets in graph[name]:
            if found_here := targets & casting:
                counts[min(found_here).rpartition(".")[2]] += 1
        counts["to"] += conversions(node)
        if counts.total():
            found[name] = dict(+counts)
    for module, tree in library.items():
        if not is_inside(module) and any(f.startswith(TRITON) for f in imported(tree).values()):
            found[module] = {"an import of Triton kernels": 1}
    return found


def listed() -> set[str]:
    """The doors of docs/design.md, by their full names."""
    return {
        ".".join(["fp8_dist", *path.removesuffix(".py").split("/"), name])
        for names, owner, *_ in rows("Doors")
        for name in quoted(names)
        for path in quoted(owner)
    }


def test_operands_are_cast_at_the_doors_alone() -> None:
    assert casts(modules()) == DOORS | OF_OTHERS
    assert {*DOORS} == listed()


def test_each_kernel_is_known() -> None:
    decorated = {
        name
        for name, node in functions(modules()).items()
        if name.startswith(f"{K}.") and isinstance(node, ast.FunctionDef)
        if any("custom_op" in ast.unparse(each) for each in node.decorator_list)
    }
    assert decorated - CASTING_KERNELS == OTHER_KERNELS


PLANTED = {
    "a method of any receiver": (
        "fp8_dist.linear.module",
        "def planted(first, x):\n    return first.cast(x, None, (0, 0), (False,))",
    ),
    "an alias": (
        "fp8_dist.tensor_parallel.inputs",
        "from fp8_dist.kernels.quantization import quantize as q\n"
        "def planted(x, m):\n    return q(x, m, x.dtype)",
    ),
    "a module's attribute": (
        "fp8_dist.moe.layers",
        "from fp8_dist.kernels import blocks as b\ndef planted(x):\n    return b.cast_blocks(x)",
    ),
    "a function that is passed on": (
        "fp8_dist.fsdp.clip",
        "def planted(scheme, xs):\n    return [*map(scheme.quantize, xs)]",
    ),
    "an operator of torch": (
        "fp8_dist.transport",
        "def planted(x):\n    return torch.ops.fp8_dist.cast_fresh(x, x.dtype, False, [False])",
    ),
    "a Triton kernel": (
        "fp8_dist.fsdp.averages",
        "from fp8_dist.kernels.cuda.triton.casts import _cast as run\n"
        "def planted(x):\n    return run((1,), x)",
    ),
    "torch's conversion": (
        "fp8_dist.transport",
        "def planted(x):\n    return x.to(dtype=torch.float8_e4m3fn)",
    ),
}


def test_a_cast_within_a_listed_function_is_found() -> None:
    library = dict(modules())
    source = ast.unparse(library["fp8_dist.linear.autograd"])
    planted = source.replace("grad = mesh.reduced(grad)", "grad = w.cast(mesh.reduced(grad))")
    library["fp8_dist.linear.autograd"] = ast.parse(planted)
    assert planted != source
    assert casts(library) != DOORS | OF_OTHERS


@pytest.mark.parametrize("how", PLANTED)
def test_a_cast_at_another_place_is_found(how: str) -> None:
    module, source = PLANTED[how]
    library = dict(modules())
    library[module] = ast.Module([*library[module].body, *ast.parse(source).body], [])
    assert {f"{module}.planted", module} & casts(library).keys()
