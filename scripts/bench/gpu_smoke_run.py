"""The cases of each part of `scripts.bench.gpu_smoke`."""

import argparse
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._pytree import tree_leaves

from fp8_dist.device import short_name, stores_transposed
from fp8_dist.kernels import quantization, scale
from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.kernels.scale import INTEGERS
from scripts.bench import gpu_operators, gpu_results
from scripts.bench.gpu_operators import BF16, BOTH, E4M3, E5M2, FP16, FP32, Call, moved
from scripts.bench.gpu_results import Result

Case = tuple[str, Callable[[], Result]]
Named = dict[str, Tensor]


def comparable(x: Tensor) -> Tensor:
    """The bits as integers, where all NaNs become equal."""
    bits = x.view(INTEGERS[x.itemsize])
    return bits.masked_fill(x.float().isnan(), -1) if x.is_floating_point() else bits


def difference(actual: Tensor, expected: Tensor) -> str:
    """Describe how a tensor differs from the expected one; empty if the bits are equal."""
    kinds = [f"{short_name(x.dtype)} {tuple(x.shape)}" for x in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    mine, theirs = comparable(actual), comparable(expected.to(actual.device))
    if torch.equal(mine, theirs):
        return ""
    places = (mine != theirs).nonzero()
    first = tuple(places[0].tolist())
    values = " instead of ".join(str(x[first].float().item()) for x in (actual, expected))
    return f"{len(places)} of {actual.numel()} elements differ, the first at {first}: {values}"


def check_same(actual: Named, expected: Named, where: str = "") -> None:
    """Raise an error that names the tensors that differ, and says how."""
    assert actual.keys() == expected.keys(), f"{[*actual]} instead of {[*expected]}"
    differences = {name: difference(actual[name], expected[name]) for name in actual}
    problems = [f"{where}{name}: {problem}" for name, problem in differences.items() if problem]
    assert not problems, "; ".join(problems)


# kernels


def outputs(run: Callable[..., Any], call: Call) -> Named:
    """Run a function on copies of a call's arguments; return its results and these arguments."""
    _, args, kwargs = moved(call)
    trees = {"result": run(*args, **kwargs), "argument": args}
    leaves = {f"{name} {i}": x for name in trees for i, x in enumerate(tree_leaves(trees[name]))}
    return {name: x for name, x in leaves.items() if isinstance(x, Tensor)}


def portable(call: Call) -> Named:
    """The outputs of the portable code, also for operators that it calls."""

    def run(op: CustomOp[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op.portable(*args, **kwargs)

    with patch.object(CustomOp, "__call__", run):
        return outputs(call.op.portable, call)


def launched(call: Call) -> Named:
    """The outputs of the Triton kernels. Unwritten elements are NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return outputs(call.op.implementations["cuda"], call)
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def side_stream() -> Iterator[None]:
    """Queue work on a new stream, ordered with earlier and later work on the current stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def check_launches(call: Call, expected: Callable[[], Named], aside: bool) -> Result:
    """Check the call that compiles the kernels, and the next one, which launches them directly."""
    with ExitStack() as stack:
        for kernel in gpu_operators.triton_kernels():
            stack.enter_context(patch.object(kernel, "_compiled", {}))
        for n in range(2):
            with side_stream() if aside else nullcontext():
                actual = launched(call)
            check_same(actual, expected(), f"call {n}, ")
    return Result()


def check_portable(on_cpu: Call, expected: Callable[[], Named]) -> Result:
    """Check that the portable code has the same bits on the CPU."""
    check_same(expected(), portable(on_cpu))
    return Result()


def cases_of_call(name: str, on_cpu: Call, device: str) -> Iterator[Case]:
    """Cases for one operator: the kernels on each stream, the portable code."""
    call = moved(on_cpu, device)
    expected = cache(partial(portable, call))
    yield f"{name}, launched", partial(check_launches, call, expected, False)
    if device == "cuda":
        yield f"{name}, side stream", partial(check_launches, call, expected, True)
        yield f"{name}, portable", partial(check_portable, on_cpu, expected)


def kernel_cases(device: str) -> Iterator[Case]:
    """Cases for each operator, with sizes that are multiples of 16, and with odd sizes."""
    for odd, kind in enumerate(("aligned", "odd")):
        for name, call in gpu_operators.operator_calls("cpu", bool(odd)).items():
            yield from cases_of_call(f"{name}, {kind}", call, device)


# inductor

SHAPES = ((64, 48), (1024, 768), (16, 4096), (4096, 4096), (8192, 14336))


def casts(x: Tensor, y: Tensor, dtype: torch.dtype, saturates: bool, fused: bool) -> Named:
    """The float8 copies of a product, by fusible operators of graphs, or by the library's kernels.

    With ``saturates`` the amax leaves out the first row, whose values may then saturate.
    """
    high = x * y
    largest = high[1:] if saturates else high
    if fused and stores_transposed(x.device):
        known = scale.fusible_amax(largest)
        copies = quantization.fusible_copies(high, known, dtype, BOTH, saturate=saturates)
    else:
        known, of = scale.amax(largest), [0, 0]
        copies = quantization.cast_copies(high, [known], dtype, False, of, BOTH, saturate=saturates)
    return {"scale": copies[0], "rows": copies[1], "transposed": copies[2]}


@contextmanager
def launchers() -> Iterator[list[tuple[CachingAutotuner, list[Any]]]]:
    """Make Inductor's kernels use their first launch config; yield kernels with all configs."""
    kernels: list[tuple[CachingAutotuner, list[Any]]] = []

    def first(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        kernels.append((kernel, kernel.launchers))
        kernel.launchers = kernel.launchers[:1]

    with patch.object(CachingAutotuner, "autotune_to_one_config", first):
        yield kernels


def check_casts(
    shape: tuple[int, int], high: torch.dtype, dtype: torch.dtype, saturates: bool, device: str
) -> Result:
    """Check the copies that compiled code writes in each launch config."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = (torch.randn(shape, device=device).to(high) for _ in range(2))
    if saturates:
        x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 1e3, -1e3])
    expected, index = casts(x, y, dtype, saturates, fused=False), 0
    options = {"max_autotune_pointwise": True, "autotune_local_cache": False}
    compiled = torch.compile(casts, fullgraph=True, dynamic=False, options=options)
    with launchers() as kernels:
        while index < max((len(configs) for _, configs in kernels), default=1):
            for kernel, configs in kernels:
                kernel.launchers = [configs[index % len(configs)]]
            check_same(compiled(x, y, dtype, saturates, fused=True), expected, f"config {index}, ")
            index += 1
    return Result(compiled=True, note=f"launch configs: {index}")


def inductor_cases(device: str) -> Iterator[Case]:
    """Cases for each format and shape, with and without values that saturate."""
    for (m, k), saturates, high, dtype in product(SHAPES, BOTH, (BF16, FP32, FP16), (E5M2, E4M3)):
        name = f"{m} x {k}, {short_name(high)} to {short_name(dtype)}" + saturates * ", saturated"
        yield name, partial(check_casts, (m, k), high, dtype, saturates, device)


PARTS = {"kernels": kernel_cases, "inductor": inductor_cases}


def shared(cases: Iterator[Case], index: int, count: int) -> Iterator[Case]:
    """Take a share of the cases. Cases of one operator stay together, so it is compiled once."""
    calls: dict[str, int] = {}
    for name, function in cases:
        of = re.split(", (?:launched|side stream|portable)", name)[0]
        if calls.setdefault(of, len(calls)) % count == index - 1:
            yield name, function


def run(args: argparse.Namespace) -> int:
    return gpu_results.run(args, shared(PARTS[args.kind](args.device), *args.part))
