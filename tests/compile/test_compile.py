"""torch.compile of layers, and of whole blocks as FSDP2 users do it, without graph breaks."""

from contextlib import nullcontext

import pytest
import torch
from graphs import Compilations
from nets import Distributed, Net, blocks, full
from ranks import RankPools, device_mesh
from reference import same_bits, same_cast, sqnr
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import comm_audit
from fp8_dist.kernels import block_scaled_mm, scaled_mm
from fp8_dist.kernels.cpu.gemm import left_upcasts

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


class GemmWeights(TorchDispatchMode):
    """Records the right operands of the float8 GEMMs, in compiled graphs too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[bytes, float]] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (scaled_mm.overload, block_scaled_mm.overload):
            qdata, scale = args[1].t().contiguous(), args[3]
            self.found.add((bytes(qdata.view(torch.uint8).flatten().tolist()), scale.sum().item()))
        return func(*args, **(kwargs or {}))


def compiled_steps(
    dp: int,
    tp: int,
    precompute: bool,
    backend: str,
    recipe: str = "tensorwise",
    sharded_first: bool = False,
) -> tuple[list[str], float, bool]:
    """A compiled model beside the eager model, in the third step.

    Returns:
        The results whose bits differ, the smallest SQNR of a result, and whether the weights that
        the first step multiplied had the same bits.
    """
    config = Float8LinearConfig.from_recipe_name(recipe)
    torch._dynamo.reset()
    counters.clear()
    results: list[dict[str, torch.Tensor]] = []
    weights: list[set[tuple[bytes, float]]] = []
    whole = torch.randn(4, 8, 64)
    for compiled in (False, True):
        world = Distributed(dp, tp, shard=False, config=config)
        model = blocks(world)
        if sharded_first:
            world.fully_shard(model, model)
        if compiled:
            for block in model:
                block.compile(backend=backend, fullgraph=True)
        if not sharded_first:
            world.fully_shard(model, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if precompute and recipe != "delayed":
                precompute_float8_dynamic_scale(model)
            optimizer.zero_grad()
            leaf = world.mine(whole).requires_grad_()
            recorder = GemmWeights()
            with nullcontext() if step else recorder:
                output = model(leaf)
            weights += [] if step else [recorder.found]
            output.square().mean().backward()
            optimizer.step()
            if recipe == "delayed":
                sync_float8_amax_and_scale_history(model)
        results.append(
            {"output": output.detach(), "grad_input": leaf.grad}
            | {n: full(p.grad) for n, p in model.named_parameters()}
        )
    assert sum(counters["graph_break"].values()) == 0
    # One graph serves both blocks, forward and backward, in all steps.
    assert counters["stats"]["unique_graphs"] == 1
    expected, found = results
    differ = [name for name in expected if not same_bits(expected[name], found[name])]
    assert len(weights[0]) == 6
    worst = min(sqnr(expected[name], found[name]) for name in expected)
    return differ, worst, weights[0] == weights[1]


full_tier = pytest.mark.full


# Every recipe on both axes: at once where a mesh gathers weights in float8, else one by one. Blocks
# that shards cut find their exponents in the step, where nothing was precomputed.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dp", "tp", "recipe", "precompute", "backend", "sharded_first"),
    [
        (2, 2, "tensorwise", True, "aot_eager", False),
        (2, 1, "tensorwise", False, "eager", True),
        (1, 2, "tensorwise", False, "aot_eager", False),
        (2, 2, "rowwise_folded", True, "aot_eager", True),
        (2, 2, "blockwise", False, "aot_eager", False),
        (2, 2, "mxfp8", True, "aot_eager", False),
        (2, 2, "delayed", True, "aot_eager", False),
        (1, 2, "rowwise", True, "aot_eager", False),
        (2, 1, "rowwise_with_gw_hp", True, "aot_eager", False),
        pytest.param(2, 2, "blockwise", True, "aot_eager", False, marks=full_tier),
        pytest.param(2, 2, "mxfp8", False, "aot_eager", False, marks=full_tier),
        pytest.param(2, 1, "rowwise", True, "aot_eager", False, marks=full_tier),
        pytest.param(1, 2, "rowwise_with_gw_hp", True, "aot_eager", False, marks=full_tier),
    ],
)
def test_blocks(
    ranks: RankPools,
    dp: int,
    tp: int,
    recipe: str,
    precompute: bool,
    backend: str,
    sharded_first: bool,
) -> None:
    arguments = (dp, tp, precompute, backend, recipe, sharded_first)
    for differ, _, same_weights in ranks(dp * tp).run(compiled_steps, *arguments, timeout=180):
        assert (differ, same_weights) == ([], True)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dp", "tp", "recipe"), [(2, 1, "rowwise_folded"), (2, 2, "delayed"), (1, 2, "blockwise")]
)
def test_blocks_with_inductor(ranks: RankPools, dp: int, tp: int, recipe: str) -> None:
    # Its fusions round the operands of the casts of activations otherwise; weights are as they are.
    for _, worst, same_weights in ranks(dp * tp).run(
        compiled_steps, dp, tp, True, "inductor", recipe, timeout=240
    ):
        assert same_weights
        assert worst > 30


@pytest.mark.parametrize(
    ("backend", "dim"), [("eager", 1), ("aot_eager", None), ("aot_eager", 0), ("inductor", 1)]
)
def test_a_cast_alone(backend: str, dim: int | None) -> None:
    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    config = CastConfig(scaling_granularity=granularity)

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        float8 = cast_to_float8(x, config, dim=dim)
        return float8.qdata, float8.scale  # type: ignore[attr-defined]

    torch._dynamo.reset()
    compiled = torch.compile(cast, backend=backend, fullgraph=True)
    for bad in (1.0, torch.nan, torch.inf):
        x = torch.randn(48, 33, dtype=torch.bfloat16) * bad
        assert all(same_bits(a, b) for a, b in zip(cast(x), compiled(x), strict=True))


@pytest.mark.parametrize(("target", "rows"), [(torch.float8_e4m3fn, 4), (torch.float8_e5m2, 5003)])
def test_an_amax_of_fp64_is_fp32(target: torch.dtype, rows: int) -> None:
    torch._dynamo.reset()
    config = CastConfig(target_dtype=target)
    x = torch.randn(rows, 16, dtype=torch.float64) / 100
    x[1, 1] = 1 + 2**-24
    with torch.no_grad():
        compiled = torch.compile(cast_to_float8, backend="eager")(x, config)
    assert same_cast(cast_to_float8(x, config), compiled)


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        *(("aot_eager", recipe) for recipe in RECIPES),
        ("eager", "tensorwise"),
        ("inductor", "rowwise_folded"),
        *(
            pytest.param("inductor", recipe, marks=full_tier)
            for recipe in ("tensorwise", "rowwise", "blockwise", "delayed")
        ),
    ],
)
def test_a_layer_alone(backend: str, recipe: str) -> None:
    """Steps with precompute (or sync) between some of them: the same bits, from one graph."""
    torch._dynamo.reset()
    counters.clear()
    config = Float8LinearConfig.from_recipe_name(recipe)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = Float8Linear(64, 48, dtype=torch.bfloat16, config=config)
        if compiled:
            layer.compile(backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found = []
        for step in range(4):
            x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
            output = layer(x)
            output.float().square().mean().backward()
            found += [output.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]
            optimizer.step()
            optimizer.zero_grad()
            if recipe == "delayed":
                sync_float8_amax_and_scale_history(layer)
                found += [history.history.clone() for history in layer.histories.values()]
            elif step % 2:
                precompute_float8_dynamic_scale(layer)
        results.append(found)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert sum(counters["graph_break"].values()) == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_a_graph_keeps_no_upcast_copy_of_an_operand() -> None:
    layers = [Float8Linear(64, 48, bias=False, dtype=torch.bfloat16) for _ in range(2)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layers[0](x) + layers[1](x)

    found = []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        left_upcasts._entry = None
        x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
        output = run(x)
        assert (left_upcasts._entry is None) is (run is not forward)
        output.square().sum().backward()
        found.append(x.grad)
    assert same_bits(*found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_whose_batches_differ(recipe: str) -> None:
    """One graph for all numbers of rows, once that is marked as dynamic."""
    torch._dynamo.reset()
    counters.clear()
    layer = Float8Linear(64, 48, config=Float8LinearConfig.from_recipe_name(recipe))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (16, 24, 7):
        x, results = torch.randn(rows, 64), []
        for run in (layer, compiled):
            leaf = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(leaf, 0)
            output = run(leaf)
            output.square().sum().backward()
            results.append([output.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
            layer.zero_grad()
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


def precomputed_in_graphs(recipe: str) -> list[tuple[int, int]]:
    """All-reduces of amaxes in the passes of tensor-parallel blocks: two of each step."""
    torch._dynamo.reset()
    world = Distributed(1, 2, shard=False, config=Float8LinearConfig.from_recipe_name(recipe))
    model = blocks(world)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduced = []
    for step in range(4):
        if step in (1, 2):
            precompute_float8_dynamic_scale(model)
        audits = [comm_audit(world.mesh) for _ in range(2)]
        for audit in audits:
            with audit:
                model(world.mine(torch.randn(4, 8, 64))).sum().backward()
        reduced.append(tuple(audit.count("all_reduce", dtype=torch.int32) for audit in audits))
        optimizer.step()
    return reduced


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "activations", "weights"), [("tensorwise", 0, 0)])
def test_graphs_use_what_precompute_left(
    ranks: RankPools, recipe: str, activations: int, weights: int
) -> None:
    # Two micro-batches share what the first of them computes.
    alone = (activations + weights, activations)
    known = (activations, activations)
    assert ranks(2).run_same(precomputed_in_graphs, recipe) == [alone, known, known, alone]


def inside_ddp(compiled: bool) -> tuple[list[torch.Tensor], str]:
    """Gradients, and the collectives of a step."""
    compilations = Compilations()
    net = convert_to_float8_training(Net(layers=1))
    if compiled:
        net.compile(backend="aot_eager", fullgraph=True)
    parallel = DistributedDataParallel(net)
    with comm_audit(device_mesh(dp=2)) as audit:
        parallel(torch.randn(2, 8, 64)).square().mean().backward()
    assert (compilations.breaks, compilations.graphs) == (0, compiled)
    return [p.grad for p in net.parameters()], audit.table()


def test_a_module_inside_ddp(ranks: RankPools) -> None:
    eager, compiled = (ranks(2).run(inside_ddp, compiled) for compiled in (False, True))
    for (expected, table), (found, same_table) in zip(eager, compiled, strict=True):
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
        assert table == same_table
