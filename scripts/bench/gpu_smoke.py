"""What works on this machine's GPU: each kernel, GEMM and step, in seconds.

    python -m scripts.bench.gpu_smoke PART

- kernels: each Triton kernel with each of its block sizes, on the default and on a side stream: the
  bits of the portable code. In Triton's interpreter (TRITON_INTERPRET=1) it runs on CPUs.
- gemms: each GEMM that layers and experts call for, against its emulation. At the end come some
  that the library does not call for: would torch take them?
- steps: training steps of each recipe, eager, as a CUDA graph and compiled; experts.
- inductor: the copies that compiled code writes, in each of Inductor's launch configs: the bits of
  the library's kernels.

A line is printed for each case, see scripts/bench/gpu_results.py.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.nn.functional import ScalingType
from torch.utils._pytree import tree_leaves

from fp8_dist import Float8Linear, Float8LinearConfig, kernels, update_float8_scales
from fp8_dist.cast import quantize
from fp8_dist.device import short_name
from fp8_dist.kernels import CustomOp, Groups
from fp8_dist.kernels.cuda.gemm import block_mm
from fp8_dist.kernels.cuda.triton.launch import Tuned
from fp8_dist.kernels.gemm import gemm_scales
from fp8_dist.kernels.scale import INTEGERS
from fp8_dist.moe import Float8ExpertsConfig, Routing, dispatch_linear, linear_combine, route
from fp8_dist.moe.config import ExpertsRecipe
from fp8_dist.moe.functions import cast_weight
from fp8_dist.moe.operators import Operands, grouped_gradients, grouped_mm
from scripts.bench import gpu_operators, gpu_results
from scripts.bench.gpu_operators import BF16, BOTH, E4M3, E5M2, FP16, FP32, Call, moved
from scripts.bench.gpu_results import Result
from scripts.bench.layers import Shape, shape_text
from scripts.common import report
from scripts.common.candidates import OURS
from scripts.common.metrics import sqnr

Case = tuple[str, Callable[[], Result]]
Named = dict[str, Tensor]

# Decibels. Rounding to bf16 alone leaves 55 or so; fast accumulation keeps 14 bits of a sum.
OF_GEMM = 45
# Of a first step, of those after it, whose weights differ, and of a graph, with the same kernels.
OF_STEP, OF_LATER_STEPS, OF_GRAPH = 40, 30, 60


def comparable(x: Tensor) -> Tensor:
    """The bits as integers, the same ones for every NaN."""
    bits = x.view(INTEGERS[x.itemsize])
    return bits.masked_fill(x.float().isnan(), -1) if x.is_floating_point() else bits


def difference(found: Tensor, expected: Tensor) -> str:
    """How a tensor differs from the expected one; empty if it has the same bits."""
    kinds = [f"{short_name(x.dtype)} {tuple(x.shape)}" for x in (found, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    mine, theirs = comparable(found), comparable(expected.to(found.device))
    if torch.equal(mine, theirs):
        return ""
    places = (mine != theirs).nonzero()
    first = tuple(places[0].tolist())
    values = " instead of ".join(str(x[first].float().item()) for x in (found, expected))
    return f"{len(places)} of {found.numel()} elements differ, the first at {first}: {values}"


def check_same(found: Named, expected: Named, where: str = "") -> None:
    """Raise an error that says which tensors differ in which bits."""
    assert found.keys() == expected.keys(), f"{[*found]} instead of {[*expected]}"
    each = {name: difference(found[name], expected[name]) for name in found}
    problems = [f"{where}{name}: {problem}" for name, problem in each.items() if problem]
    assert not problems, "; ".join(problems)


def decibels(found: Tensor, expected: Tensor) -> float:
    """The ratio of signal to noise; inf where the two are equal."""
    return math.inf if torch.equal(found, expected) else sqnr(expected, found)


def least_decibels(found: Sequence[Tensor], expected: Sequence[Tensor], least: float) -> str:
    """The text of the smallest ratio of signal to noise.

    Raises:
        AssertionError: it is below ``least``, or dtypes or shapes differ.
    """
    ratios = [math.inf]
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        kinds = [(x.dtype, x.shape) for x in (mine, theirs)]
        assert kinds[0] == kinds[1], f"tensor {i} is {kinds[0]} instead of {kinds[1]}"
        ratios.append(decibels(mine, theirs.to(mine.device)))
        assert ratios[-1] >= least, f"tensor {i}: {ratios[-1]:.1f} dB, at least {least}"
    return f"{min(ratios):.1f} dB"


class HighPrecision(Exception):
    """The library has no float8 GEMM for these operands."""


def or_refused(kind: type[Exception], run: Callable[[], Result]) -> Result:
    """What a function returns, or the words of an error of this kind."""
    try:
        return run()
    except kind as error:
        return Result(note=f"refused: {gpu_results.shown(error)}")


# kernels


def outputs(run: Callable[..., Any], call: Call) -> Named:
    """What a function returns for copies of a call's arguments, and what it leaves of these."""
    _, args, kwargs = moved(call)
    trees = {"result": run(*args, **kwargs), "argument": args}
    leaves = {f"{name} {i}": x for name in trees for i, x in enumerate(tree_leaves(trees[name]))}
    return {name: x for name, x in leaves.items() if isinstance(x, Tensor)}


def portable(call: Call) -> Named:
    """The outputs of the portable code, of all operators in it."""

    def run(op: CustomOp[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op.portable(*args, **kwargs)

    with patch.object(CustomOp, "__call__", run):
        return outputs(call.op.portable, call)


def launched(call: Call) -> Named:
    """The outputs of the Triton kernels. What they do not write is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return outputs(call.op.implementations["cuda"], call)
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def choice(index: int) -> Iterator[list[str]]:
    """Launch kernels with this choice of block sizes, or their last one; yields what was chosen."""
    chosen: list[str] = []

    def launch(tuned: Tuned, grid: Any, *args: Any, **rest: Any) -> None:
        config = tuned.configs[min(index, len(tuned.configs) - 1)]
        sizes = " ".join(f"{name}={size}" for name, size in config.kwargs.items())
        chosen.append(f"{tuned.kernel.__name__} {sizes} warps={config.num_warps}")
        options = config.all_kwargs() | {"enable_fp_fusion": False}
        tuned.kernel.run(*args, grid=grid, warmup=False, **rest, **options)

    with patch.object(Tuned, "__call__", launch):
        yield chosen


def choices(call: Call) -> int:
    """The number of choices of the kernels that a call launches; launches none of them."""
    counts = [1]
    with patch.object(Tuned, "__call__", lambda tuned, *_, **__: counts.append(len(tuned.configs))):
        call.op.implementations["cuda"](*call.args, **call.kwargs)
    return max(counts)


@contextmanager
def side_stream() -> Iterator[None]:
    """Queue work on a new stream, after and before what is queued on the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def check_choice(call: Call, expected: Callable[[], Named], index: int, aside: bool) -> Result:
    """Check one choice of block sizes."""
    with choice(index) as chosen, side_stream() if aside else nullcontext():
        found = launched(call)
    check_same(found, expected())
    return Result(note=", ".join(chosen))


def check_tuned(call: Call, expected: Callable[[], Named]) -> Result:
    """Check the call that measures the choices, and ten calls after it."""
    with ExitStack() as stack:
        for tuned in gpu_operators.tuned_kernels():
            stack.enter_context(patch.object(tuned, "_fastest", {}))
        for n in range(11):
            check_same(launched(call), expected(), f"call {n}, ")
    return Result()


def check_portable(on_cpu: Call, expected: Callable[[], Named]) -> Result:
    """Check that the portable code has the same bits on the CPU."""
    check_same(expected(), portable(on_cpu))
    return Result()


def cases_of_call(name: str, on_cpu: Call, device: str) -> Iterator[Case]:
    """One operator with each choice, on each stream; tuned; and its portable code."""
    call = moved(on_cpu, device)
    expected = cache(partial(portable, call))
    for index, aside in product(range(choices(call)), BOTH if device == "cuda" else [False]):
        where = f"choice {index}, side stream" if aside else f"choice {index}"
        yield f"{name}, {where}", partial(check_choice, call, expected, index, aside)
    yield f"{name}, tuned", partial(check_tuned, call, expected)
    if device == "cuda":
        yield f"{name}, portable", partial(check_portable, on_cpu, expected)


def kernel_cases(device: str) -> Iterator[Case]:
    """Each operator, with sizes that are multiples of 16, and with others."""
    for odd, kind in enumerate(("aligned", "odd")):
        for name, call in gpu_operators.operator_calls("cpu", bool(odd)).items():
            yield from cases_of_call(f"{name}, {kind}", call, device)


# gemms

GEMMS = ("output", "grad_input", "grad_weight")
OF_BLOCKS = ("blockwise", "mxfp8")
LAYOUTS = ("rows", "columns", "gaps")
SIZES = ((64, 128, 96), (33, 128, 96), (7, 20, 33), (512, 4096, 1024), (512, 14336, 256))
Product = tuple[CustomOp[..., Any], tuple[Any, ...]]  # the operator, and its arguments


@cache
def products(recipe: str, sizes: Shape, device: str) -> list[Product]:
    """The float8 GEMMs that a layer calls for in a step. They are not computed."""
    (m, k, n), found = sizes, []
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    layer = Float8Linear(k, n, bias=False, device=device, dtype=BF16, config=config)
    call = CustomOp.__call__

    def note(op: CustomOp[..., Any], *args: Any, **kwargs: Any) -> Any:
        if op not in (kernels.scaled_mm, kernels.block_scaled_mm):
            return call(op, *args, **kwargs)
        found.append((op, args))
        return torch.ones(len(args[0]), args[1].shape[1], dtype=BF16, device=device)

    x, grad = (torch.randn(m, features, device=device).bfloat16() for features in (k, n))
    with patch.object(CustomOp, "__call__", note):
        layer(x.requires_grad_()).backward(grad)
    return found


def multiplied(of: Product, dtype: torch.dtype, fast: bool, emulate: bool) -> Tensor:
    """A product, as the library computes it."""
    op, args = of
    if op is kernels.scaled_mm:
        return kernels.scaled_mm(*args[:4], dtype, (fast, True, emulate))
    if emulate or not args[0].is_cuda:
        return kernels.block_scaled_mm(*args[:6], dtype, True)
    found = block_mm(*args[:6], dtype)
    if found is None:
        raise HighPrecision("the library multiplies these blocks in high precision")
    return found


def check_product(
    recipe: str, sizes: Shape, i: int, dtype: torch.dtype, fast: bool, device: str
) -> Result:
    """Compare a GEMM with its emulation."""
    of = products(recipe, sizes, device)[i]
    found, expected = ([multiplied(of, dtype, fast, emulate)] for emulate in BOTH)
    return Result(recipe=recipe, note=f"accepted, {least_decibels(found, expected, OF_GEMM)}")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same matrix row-major, column-major, or with gaps between its rows."""
    data = x.view(torch.uint8)
    if layout == "columns":
        data = data.t().contiguous().t()
    elif layout == "gaps":
        data = data.new_zeros(len(data), data.shape[1] + 16)[:, : data.shape[1]].copy_(data)
    return (data.contiguous() if layout == "rows" else data).view(x.dtype)


def check_layouts(recipe: str, layouts: Sequence[str], device: str) -> Result:
    """Check that a GEMM takes operands of any layout. (The device may choose another kernel.)"""
    op, args = products(recipe, SIZES[1], device)[0]
    turned = [laid_out(x, layout) for x, layout in zip(args[:2], layouts, strict=True)]
    both = (op, (*turned, *args[2:])), (op, args)
    found, expected = ([multiplied(of, BF16, False, False)] for of in both)
    return Result(recipe=recipe, note=f"accepted, {least_decibels(found, expected, OF_GEMM)}")


COUNTS = ((0, 1, 15, 17, 512), (0, 16, 32, 512))
EXPERT = (256, 384)  # in_features, out_features


def grouped(gemm: str, counts: Sequence[int], dtype: torch.dtype, config: Any, device: str) -> Any:
    """A product of experts."""
    torch.manual_seed(0)
    (k, n), on_host = EXPERT, torch.tensor(counts)
    groups = Groups.of(on_host.to(device), on_host, sum(counts))
    rows = [torch.randn(sum(counts), features).to(device, BF16) for features in (k, n)]
    x, grad = (quantize(each, config.rows) for each in rows)
    weights = cast_weight(torch.randn(len(counts), n, k).to(device, BF16), config).casts.output
    assert weights is not None
    if gemm == "output":
        return grouped_mm(x, weights, True, groups, dtype, config)
    needs = gemm == "grad_input", gemm == "grad_weight"
    found = grouped_gradients(Operands(grad, x, weights), groups, needs, (dtype, dtype), config)
    return found[needs.index(True)]


def check_grouped(
    recipe: str, gemm: str, counts: Sequence[int], dtype: torch.dtype, device: str
) -> Result:
    """Compare a grouped GEMM with its emulation."""
    config = Float8ExpertsConfig.from_recipe_name(recipe)
    each = [replace(config, emulate=emulate) for emulate in BOTH]
    found, expected = ([grouped(gemm, counts, dtype, of, device)] for of in each)
    return Result(recipe=recipe, note=f"accepted, {least_decibels(found, expected, OF_GEMM)}")


# The dtypes of a and b, what their scales cover, the output's dtype, whether there is a bias.
UNCALLED = [
    *((E5M2, E5M2, per, BF16, False) for per in ("tensor", "row")),
    *((E4M3, E5M2, per, BF16, False) for per in ("row", "1x128")),
    *((E5M2, E4M3, per, BF16, False) for per in ("row", "1x128", "128x128", "group")),
    *((E4M3, E4M3, per, BF16, True) for per in ("tensor", "row", "1x128", "128x128")),
    *product([E4M3], [E4M3], ("row", "1x128", "128x128", "group"), (FP32, FP16), [False]),
]


def uncalled(a: Tensor, b: Tensor, per: str, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """torch's ``a @ b.t() + bias`` for float8 data, with scales of 1."""
    if per.endswith("x128"):
        sizes = [(len(a), a.shape[1] // 128), (len(b), b.shape[1] // 128)]
        of, kinds = 1, [ScalingType.BlockWise1x128] * 2
        if per == "128x128":
            of, kinds[1], sizes[1] = 4, ScalingType.BlockWise128x128, sizes[1][::-1]
            sizes[1] = sizes[1][0], sizes[1][1] // 128
        bytes_ = (torch.full(size, 127, dtype=torch.uint8, device=a.device) for size in sizes)
        of_a, of_b = gemm_scales(*bytes_, of)
        return F.scaled_mm(a, b.t(), of_a, kinds[0], of_b, kinds[1], bias=bias, output_dtype=dtype)
    shapes = {"tensor": ((), ()), "row": ((len(a), 1), (1, len(b))), "group": (len(a), (1, len(b)))}
    scales = [torch.ones(shape, device=a.device) for shape in shapes[per]]
    if per == "group":
        ends = torch.tensor([len(a)], dtype=torch.int32).to(a.device)
        return torch._scaled_grouped_mm(a, b.t()[None], *scales, ends, out_dtype=dtype)
    return torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=dtype)


def try_uncalled(of: tuple[Any, ...], device: str) -> Result:
    """Find out whether torch takes a GEMM that the library does not call for."""
    *dtypes, per, out_dtype, has_bias = of
    a, b = (torch.randn(256, 512, device=device).to(dtype) for dtype in dtypes)
    bias = torch.ones(256, dtype=out_dtype, device=device) if has_bias else None
    found = uncalled(a, b, per, out_dtype, bias).float()
    return Result(note=f"accepted, {decibels(found, a.float() @ b.float().t() + has_bias):.1f} dB")


def product_cases(device: str) -> Iterator[Case]:
    """Each GEMM of a step, in each output dtype and accumulation."""
    for recipe, sizes in product(OURS, SIZES):
        count = 2 if recipe == "rowwise_with_gw_hp" else 3
        fasts = [False] if recipe in OF_BLOCKS else BOTH
        for i, dtype, fast in product(range(count), (BF16, FP32, FP16), fasts):
            name = f"{recipe}, {shape_text(sizes)}, {GEMMS[i]}, {short_name(dtype)}"
            run = partial(check_product, recipe, sizes, i, dtype, fast, device)
            yield f"{name}, fast" if fast else name, partial(or_refused, HighPrecision, run)


def gemm_cases(device: str) -> Iterator[Case]:
    """GEMMs of steps; with other layouts; of groups; and others than the library's."""
    yield from product_cases(device)
    for recipe, *of in product(("tensorwise", "rowwise", "blockwise"), LAYOUTS, LAYOUTS):
        run = partial(check_layouts, recipe, of, device)
        yield f"{recipe}, layouts {' by '.join(of)}", partial(or_refused, HighPrecision, run)
    for recipe, counts, *rest in product(get_args(ExpertsRecipe), COUNTS, GEMMS, (BF16, FP32)):
        name = f"experts {recipe}, groups of {counts}, {rest[0]}, {short_name(rest[1])}"
        yield name, partial(check_grouped, recipe, rest[0], counts, rest[1], device)
    for of in UNCALLED:
        a, b, out = (short_name(of[i]) for i in (0, 1, 3))
        name = f"uncalled {a} by {b} to {out}, scales of {of[2]}{', bias' if of[4] else ''}"
        yield name, partial(or_refused, Exception, partial(try_uncalled, of, device))


# steps

Step = Callable[[Tensor, Tensor], list[Tensor]]  # of an input and the gradient of the output
MODES = ("eager", "graph", "default", "reduce-overhead")
STEPS, ROWS, IN, OUT = 3, 32, 64, 96


def batch(n: int, device: str) -> list[Tensor]:
    """An input, and the gradient of an output."""
    generator = torch.Generator().manual_seed(n)
    both = torch.randn(2, ROWS, IN, generator=generator)
    return [each.to(device, BF16) for each in both]


def model_of(recipe: str) -> nn.Sequential:
    """Two layers on the CPU, and between them a function that is exact."""
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    sizes = (IN, OUT), (OUT, IN)
    first, second = (Float8Linear(*size, dtype=BF16, config=config) for size in sizes)
    return nn.Sequential(first, nn.ReLU(), second)


def plain(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> Step:
    """Make steps that return the output and the gradients."""

    def step(x: Tensor, grad: Tensor) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        output = forward(x.requires_grad_())
        output.backward(grad)
        return [output, x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    return step


def captured(model: nn.Module, device: str) -> Step:
    """Make the same steps as a CUDA graph."""
    x, grad = given = batch(0, device)
    step, graph = plain(model, model), torch.cuda.CUDAGraph()
    with side_stream():
        for _ in range(3):
            step(x, grad)
            model.zero_grad()
            x.grad = None
    with torch.cuda.graph(graph):
        made = step(x, grad)

    def replay(*now: Tensor) -> list[Tensor]:
        with torch.no_grad():
            for to, each in zip(given, now, strict=True):
                to.copy_(each)
        graph.replay()
        return made

    return replay


def trained(model: nn.Module, step: Step, device: str) -> list[list[Tensor]]:
    """The output and the gradients of each step, then the weights."""
    parameters, seen = [*model.parameters()], []
    optimizer = torch.optim.SGD(parameters, lr=0.01)  # larger ones amplify what is rounded
    for n in range(STEPS):
        found = step(*batch(n, device))
        seen.append([each.detach().clone() for each in found])
        for p, grad in zip(parameters, found[2:], strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(model)
    return [*seen, [p.detach() for p in parameters]]


def check_steps(recipe: str, mode: str, device: str) -> Result:
    """Compare steps: eager ones with the CPU's, others with eager ones."""
    torch._dynamo.reset()
    of_twin = "cpu" if mode == "eager" else device
    model, twin = (model_of(recipe).to(each) for each in (device, of_twin))
    forward: Any = model
    if mode not in ("eager", "graph"):
        forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
    step = captured(model, device) if mode == "graph" else plain(model, forward)
    found, expected = trained(model, step, device), trained(twin, plain(twin, twin), of_twin)
    least = [OF_GRAPH] * 4 if mode == "graph" else [OF_STEP, *[OF_LATER_STEPS] * 3]
    ratios = [least_decibels(*each) for each in zip(found, expected, least, strict=True)]
    return Result(recipe=recipe, compiled=forward is not model, note=", ".join(ratios))


def routed(counts: Sequence[int], device: str) -> Routing:
    """Tokens in any order, so many for each expert."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    routing = route(ids[torch.randperm(len(ids))].unsqueeze(1), len(counts))
    of = routing.groups
    groups = Groups(of.on_host, *(x.to(device) for x in (of.sizes, of.of_row, of.ends)))
    return routing._replace(slots=routing.slots.to(device), groups=groups)


def step_of_experts(recipe: str, counts: Sequence[int], device: str) -> list[Tensor]:
    """The output and the gradients of a layer of experts."""
    torch.manual_seed(0)
    config, (k, n), rows = Float8ExpertsConfig.from_recipe_name(recipe), EXPERT, sum(counts)
    routing, e = routed(counts, device), len(counts)
    shapes = (rows, 1, k), (rows, k), (e, n, k), (e, n, k), (e, k, n)
    grad, *given = (torch.randn(shape).to(device, BF16) for shape in shapes)
    x, gate, up, down = (each.requires_grad_() for each in given)
    both = dispatch_linear(x, [gate, up], routing, config)
    output = linear_combine(both[0] * both[1], down, routing, config)
    output.backward(grad)
    return [output, *(each.grad for each in given)]  # type: ignore[list-item]


def check_experts(recipe: str, counts: Sequence[int], device: str) -> Result:
    """Compare a step of experts with the CPU's."""
    found, expected = (step_of_experts(recipe, counts, each) for each in (device, "cpu"))
    return Result(recipe=recipe, note=least_decibels(found, expected, OF_STEP))


def step_cases(device: str) -> Iterator[Case]:
    """Each recipe in each mode, and experts."""
    eager, *others = (mode for mode in MODES if device == "cuda" or mode != "graph")
    for recipe in OURS:
        yield f"{recipe}, {eager}", partial(check_steps, recipe, eager, device)
    for recipe, counts in product(get_args(ExpertsRecipe), COUNTS):
        name = f"experts {recipe}, groups of {counts}"
        yield name, partial(check_experts, recipe, counts, device)
    for mode, recipe in product(others, OURS):
        run = partial(check_steps, recipe, mode, device)
        refuses = recipe == "delayed" and mode == "graph"  # as its docs say
        yield f"{recipe}, {mode}", partial(or_refused, NotImplementedError, run) if refuses else run


# inductor

HEIGHTS = ((64, 64), (1024, 768), (16, 4096), (128, 256), (4096, 4096), (8192, 14336))


def casts(x: Tensor, dtype: torch.dtype, saturates: bool, fused: bool) -> Named:
    """The copies of an activation: by the operators of graphs, which fuse, or by the library's.

    It is exact. If values saturate, the largest value is not that of the first row.
    """
    high = x * 2 if saturates else torch.relu(x)
    largest = high[1:] if saturates else high
    if fused:
        known = kernels.fusible_amax(largest)
        made = kernels.fusible_copies(high, known, dtype, BOTH, saturate=saturates)
    else:
        known, of = kernels.amax(largest), [0, 0]
        made = kernels.cast_copies(high, [known], dtype, False, of, BOTH, saturate=saturates)
    return {"scale": made[0], "rows": made[1], "transposed": made[2]}


@contextmanager
def launchers() -> Iterator[list[tuple[CachingAutotuner, list[Any]]]]:
    """Inductor's kernels take their first launch config; yields them, each with all of its own."""
    found: list[tuple[CachingAutotuner, list[Any]]] = []

    def first(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        found.append((kernel, kernel.launchers))
        kernel.launchers = kernel.launchers[:1]

    with patch.object(CachingAutotuner, "autotune_to_one_config", first):
        yield found


def check_casts(shape: tuple[int, int], dtype: torch.dtype, saturates: bool, device: str) -> Result:
    """Compare the copies that compiled code writes in each launch config."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(shape).to(device, BF16)
    if saturates:
        x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 1e3, -1e3])
    expected, index = casts(x, dtype, saturates, fused=False), 0
    options = {"max_autotune_pointwise": True, "autotune_local_cache": False}
    compiled = torch.compile(casts, fullgraph=True, dynamic=False, options=options)
    with launchers() as found:
        while index < max((len(each) for _, each in found), default=1):
            for kernel, each in found:
                kernel.launchers = [each[index % len(each)]]
            check_same(compiled(x, dtype, saturates, fused=True), expected, f"config {index}, ")
            index += 1
    return Result(compiled=True, note=f"launch configs: {index}")


def inductor_cases(device: str) -> Iterator[Case]:
    """Each format and shape, with kernels that keep a NaN as they clamp."""
    for (m, k), saturates, dtype in product(HEIGHTS, BOTH, (E5M2, E4M3)):
        name = f"{m} x {k}, {'saturated' if saturates else 'relu'}, {short_name(dtype)}"
        yield name, partial(check_casts, (m, k), dtype, saturates, device)


PARTS: dict[str, Callable[[str], Iterator[Case]]] = {
    "kernels": kernel_cases,
    "gemms": gemm_cases,
    "steps": step_cases,
    "inductor": inductor_cases,
}


def share_type(text: str) -> tuple[int, int]:
    """The type of ``--part``: which of how many processes."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(text)
    return index, count


def shared(cases: Iterator[Case], index: int, count: int) -> Iterator[Case]:
    """Take every ``count``-th case; of an operator all, for which kernels are compiled once."""
    calls: dict[str, int] = {}
    for name, function in cases:
        of = re.split(", (?:choice|tuned|portable)", name)[0]
        if calls.setdefault(of, len(calls)) % count == index - 1:
            yield name, function


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = report.make_parser("scripts.bench.gpu_smoke", __doc__)
    add, kind = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("kind", metavar="PART", choices=PARTS, help=f"one of {', '.join(PARTS)}")
    add("--device", choices=["cpu", "cuda"], default=kind, help="default: %(default)s")
    share = "the I-th of N processes that share the cases, from 1"
    add("--part", type=share_type, metavar="I/N", default=(1, 1), help=share)
    gpu_results.add_options(parser, "")
    args = report.start(parser, argv)
    args.stage = args.stage or args.kind
    return gpu_results.run(args, shared(PARTS[args.kind](args.device), *args.part))


if __name__ == "__main__":
    sys.exit(main())
