"""torch.compile of layers, and of whole blocks as is usual with FSDP2, without graph breaks."""

import copy
import math
import pickle
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from checkpointed import SELECTIVE
from delayed_steps import Run, disturbed_steps
from documented import python_blocks, run_shown
from graphs import Compilations, Graphs, Ops
from local_nets import local_net
from nets import Distributed, Net, blocks, full
from ranks import RankPools, device_mesh
from reference import all_warnings, raised, same_bits, sqnr
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_releases import rows_in_torchs_gemm
from two_level import config_named

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingGranularity,
    attach_update,
    cast_to_float8,
    convert_to_float8_training,
    convert_to_linear,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist import recipe as recipes
from fp8_dist.debug import comm_audit
from fp8_dist.debug.audit import CommTable
from fp8_dist.kernels import gemm
from fp8_dist.kernels.quantization import cast_copies, fusible_copies
from fp8_dist.kernels.scale import amax, fusible_amax
from fp8_dist.scaling import dense
from fp8_dist.scaling.operators import multiply_operator

DTENSORS, SHARDED, LOCAL = "of DTensors", "sharded first", "of local tensors"
full_tier = pytest.mark.full


class Steps(NamedTuple):
    """Three steps of compiled blocks, compared with eager blocks.

    Attributes:
        differ: the results of the third step whose bits differ.
        worst: the smallest SQNR of a result.
        rows: the collectives of the third step, by block: in eager code, and in compiled code.
        graphs: counts of ops in the graphs of the third step (with the backend "counting").
        graph_bytes: the bytes of the collectives in these graphs.
    """

    differ: list[str]
    worst: float
    rows: list[list[tuple[object, ...]]]
    graphs: Counter[str]
    graph_bytes: int


def compiled_steps(
    dp: int, tp: int, recipe: str, precompute: bool, backend: str, model_is: str = DTENSORS
) -> Steps:
    config, sharded_first = config_named(recipe), model_is == SHARDED
    results: list[dict[str, torch.Tensor]] = []
    rows: list[list[tuple[object, ...]]] = []
    compilations, whole = Compilations(), torch.randn(4, 8, 64)
    for compiled in (False, True):
        world = Distributed(dp, tp, shard=False, config=config)
        if model_is == LOCAL:
            gather_config = world.net.layers[0].w1.config  # with float8 gathers if FSDP2 shards
            world.net = local_net(world.mesh["tp"], gather_config, True)
        graphs, model = Graphs(world.mesh), blocks(world)
        if sharded_first:
            world.fully_shard(model, model)
        if compiled:
            for block in model:
                used = graphs.backend if backend == "counting" else backend
                block.compile(backend=used, fullgraph=True)
        if not sharded_first:
            world.fully_shard(model, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        audit = comm_audit(world.mesh)
        for step in range(3):
            if precompute and recipe != "delayed":
                precompute_float8_dynamic_scale(model)
            optimizer.zero_grad()
            graphs.forget_runs()
            leaf = world.mine(whole).requires_grad_()
            with audit if step == 2 else nullcontext():
                output = model(leaf)
                output.square().mean().backward()
            optimizer.step()
            if recipe == "delayed":
                sync_float8_amax_and_scale_history(model)
        by_block = CommTable(
            replace(row, module=row.module.partition(".")[0]) for row in audit.rows
        )
        key = ("op", "axis", "dtype", "module", "in_mixed_gather", "elements", "bytes", "count")
        rows.append(sorted(tuple(str(getattr(row, k)) for k in key) for row in by_block.rows))
        results.append(
            {"output": output.detach(), "grad_input": leaf.grad}
            | {n: full(p.grad) for n, p in model.named_parameters()}
        )
    # One captured graph serves both blocks in all steps, also under an audit.
    assert (compilations.breaks, compilations.graphs) == (0, 1)
    if backend == "counting":
        assert graphs.made == {"forward": 1, "backward": 1}
        assert graphs.ran == {"forward": 2, "backward": 2}
    expected, found = results
    return Steps(
        [name for name in expected if not same_bits(expected[name], found[name])],
        min(sqnr(expected[name], found[name]) for name in expected),
        rows,
        graphs.ops["forward"] + graphs.ops["backward"],
        graphs.bytes,
    )


# Without precompute, exponents of blocks that shards cut are computed in the step. Graphs compute
# amaxes of, and cast, inputs (w1 and w3 share one), gradients, and weights that FSDP2 does not
# gather in float8. One operator computes both amaxes of the rows of a folded gradient.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dp", "tp", "recipe", "precompute", "backend", "model_is", "casts"),
    [
        (1, 2, "tensorwise", False, "counting", DTENSORS, (10, 16)),
        (2, 2, "rowwise_folded", True, "counting", SHARDED, (16, 22)),
        pytest.param(2, 1, "blockwise", False, "counting", DTENSORS, None, marks=full_tier),
        pytest.param(1, 2, "delayed", True, "counting", DTENSORS, (0, 16), marks=full_tier),
        (1, 2, "rowwise_folded", False, "aot_eager", LOCAL, None),
    ],
)
def test_blocks(
    ranks: RankPools,
    dp: int,
    tp: int,
    recipe: str,
    precompute: bool,
    backend: str,
    model_is: str,
    casts: tuple[int, int] | None,
) -> None:
    arguments = (dp, tp, recipe, precompute, backend, model_is)
    for steps in ranks(dp * tp).run(compiled_steps, *arguments, timeout=180):
        assert steps.differ == []
        assert steps.rows[0] == steps.rows[1]
        if backend == "counting":
            assert casts in (None, (steps.graphs["amax"], steps.graphs["quantize"]))
            assert steps.graphs["scaled_mm"] == 18
            # (Rows and their scales are sent as one message of bytes.)
            on_tp = sum(int(row[-2]) for row in steps.rows[0] if row[1] == "tp")
            beside = 6 * 4 if (dp, precompute) == (1, False) else 0  # the weights' amaxes
            assert steps.graph_bytes == on_tp - beside


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_blocks_with_inductor(ranks: RankPools) -> None:
    # Inductor's fusions round the inputs of activations' casts differently.
    # New ranks, because torch 2.13 can't lower a mesh that equals the mesh of an earlier graph.
    ranks(2).close()
    arguments = (2, 1, "rowwise_folded", True, "inductor")
    for steps in ranks(2).run(compiled_steps, *arguments, timeout=240):
        assert steps.worst > 30
        assert steps.rows[0] == steps.rows[1]


def by_the_page(*parts: str) -> tuple[int, int]:
    """Graphs and graph breaks of three steps of blocks, by the code of docs/training.md with parts."""
    shown = python_blocks("docs/training.md")
    code = "\n".join(block for block in shown if any(part in block for part in parts))
    world = Distributed(2, 1, shard=False, config=config_named("tensorwise"))
    model, compilations = blocks(world), Compilations()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        run_shown(code, {"model": nn.ModuleDict({"layers": model})})
    world.fully_shard(model, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_update(optimizer, model)
    for _ in range(3):
        x = world.mine(torch.randn(4, 8, 64)).requires_grad_()  # as embeddings do
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return compilations.graphs, compilations.breaks


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_page(ranks: RankPools) -> None:
    assert ranks(2).run_same(by_the_page, ".compile(", timeout=180) == (1, 0)
    parts = "checkpoint_wrapper(", ".compile("
    assert ranks(2).run_same(by_the_page, *parts, timeout=180) == (1, 0)


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


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        *(("counting", recipe) for recipe in ("tensorwise", "rowwise_folded", "mxfp8", "delayed")),
        ("counting", "rowwise_with_gw_hp"),
        ("inductor", "rowwise_folded"),
    ],
)
def test_a_layer_alone(backend: str, recipe: str) -> None:
    """Steps, some of them after precompute (or sync), have the bits of eager code, in one graph."""
    compilations, graphs = Compilations(), Graphs()
    config = Float8LinearConfig.from_recipe_name(recipe)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = Float8Linear(64, 48, dtype=torch.bfloat16, config=config)
        if compiled:
            used = graphs.backend if backend == "counting" else backend
            layer.compile(backend=used, fullgraph=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found = []
        for step in range(4):
            graphs.forget_runs()
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
    assert (compilations.breaks, compilations.graphs) == (0, 1)
    if backend == "counting":
        forward, backward = graphs.ops["forward"], graphs.ops["backward"]
        # The backward casts only the output gradient.
        assert (forward["quantize"], backward["quantize"]) == (2, int(recipe != "rowwise_folded"))
        assert forward["scaled_mm"] + backward["scaled_mm"] + backward["mm"] == 3


def test_layers_that_were_compiled_before_the_conversion() -> None:
    """After the conversion, a layer has another class, and is traced again."""
    layer, x = nn.Linear(32, 32), torch.randn(16, 32)
    plain = layer(x)
    layer.compile(backend="eager")
    assert same_bits(layer(x), plain)
    expected = convert_to_float8_training(copy.deepcopy(layer))(x)
    convert_to_float8_training(layer)
    assert same_bits(layer(x), expected)
    assert same_bits(pickle.loads(pickle.dumps(layer))(x), expected)
    assert same_bits(convert_to_linear(layer)(x), plain)


@pytest.mark.parametrize(
    ("dtype", "float8"),
    [
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
    ],
)
def test_casts_in_a_graph_have_the_bits_of_the_operators(
    dtype: torch.dtype, float8: torch.dtype
) -> None:
    """Casts see rounded values, even fused with the op that makes them, which computes in fp32."""
    both = [False, True]

    @torch.compile(fullgraph=True)
    def made(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, weight: nn.Parameter
    ) -> list[tuple[torch.Tensor, ...]]:
        each = [F.silu(a) * b, F.rms_norm(a, a.shape[-1:], b[0]), (a + b).unsqueeze(0), a[:16].t()]
        each.append(weight)
        found = []
        for x in each:
            x_amax = fusible_amax(x)
            own = fusible_copies(x, x_amax, float8, both)
            found.append((x, x_amax, *own, *fusible_copies(x, c, float8, both, saturate=True)))
        return found

    def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
        wide, other = (each.float() for each in (found, expected))
        alike = wide.isnan().equal(other.isnan()) and found.is_contiguous()
        return alike and same_bits(wide.nan_to_num(), other.nan_to_num())

    for value in (*torch.randn(10).tolist(), 0.0, 1e-13, 6e4, math.inf, math.nan):
        a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
        a[3, 5] = value
        known = torch.rand(())  # some values are larger
        weight = nn.Parameter(a, requires_grad=False)
        for x, x_amax, *copies in made(a, b, known, weight):
            expected = amax(x)
            assert is_same(x_amax, expected)
            each = cast_copies(x, [expected], float8, False, [0, 0], both)
            each += cast_copies(x, [known], float8, False, [0, 0], both, saturate=True)
            assert all(map(is_same, copies, each))


@pytest.mark.parametrize(("tokens", "dynamic"), [(13, False), (16, False), (16, True)])
def test_graphs_that_cast_by_themselves(
    tokens: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs cast without operators on GPUs; here the checks for a GPU are replaced."""
    monkeypatch.setattr(dense, "fuses_casts", lambda x: True)
    monkeypatch.setattr(dense, "rounds_to", lambda dtype, device: True)
    monkeypatch.setattr(recipes, "takes_transposed", lambda device: True)
    layer, graphs = Float8Linear(64, 48, dtype=torch.bfloat16), Graphs()
    torch._dynamo.reset()
    results = []
    compiled = torch.compile(layer, backend=graphs.backend, fullgraph=True, dynamic=dynamic)
    for run in (layer, compiled):
        torch.manual_seed(0)
        x = torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        output = run(x)
        output.float().square().mean().backward()
        results.append([output.detach(), x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    # One amax op for the weight; two for each other operand: per row, then over all rows.
    assert (graphs.ops["forward"]["amax"], graphs.ops["backward"]["amax"]) == (3, 2)
    # Operands that need, or may need, rows of zeros as padding are cast by an operator.
    odd = tokens % 16 > 0 or dynamic
    assert (graphs.ops["forward"]["quantize"], graphs.ops["backward"]["quantize"]) == (odd, odd)


ASYNC_TP = "_micro_pipeline_tp"
GEMMS = {torch.ops.aten._scaled_mm.default: "torch's", multiply_operator.overload: "ours"}


@pytest.mark.parametrize(
    ("recipe", "tokens", "option", "expected"),
    [
        ("tensorwise", 13, {}, {"torch's": 3}),  # transposed copies are padded with zeros
        ("rowwise", 13, {}, {"torch's": 3}),
        ("rowwise_folded", 1, {}, {"torch's": 3}),
        ("tensorwise", 0, {}, {"ours": 3}),
        ("tensorwise", 16, {"max_autotune_gemm": True}, {"ours": 3}),
        ("tensorwise", 16, {ASYNC_TP: True}, {"torch's": 3}),
        ("rowwise", 16, {ASYNC_TP: True}, {"ours": 3}),
    ],
)
def test_graphs_that_multiply_by_torchs_operator(
    recipe: str,
    tokens: int,
    option: dict[str, bool],
    expected: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs do so on GPUs; here the check for a device's float8 GEMM is replaced."""
    monkeypatch.setattr(gemm, "has_gemm", lambda *_: True)
    torch._dynamo.reset()
    config, results = Float8LinearConfig.from_recipe_name(recipe), []
    layer = Float8Linear(64, 48, config=config, dtype=torch.bfloat16)
    with rows_in_torchs_gemm(recipe), all_warnings() as warned:
        with torch._inductor.config.patch(option), Ops(GEMMS.get) as gemms:
            for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
                torch.manual_seed(0)
                gemms.counts.clear()
                x = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
                output = run(x)
                output.float().square().sum().backward()
                results.append([output.detach(), x.grad, *(p.grad for p in layer.parameters())])
                layer.zero_grad()
        assert gemms.counts == expected
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    nothing_is_fused = any("no collective is fused with a float8" in told for told in warned)
    assert nothing_is_fused is (ASYNC_TP in option and recipe != "tensorwise")


def test_a_product_of_torchs_operator_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Selective checkpointing saves the product."""
    monkeypatch.setattr(gemm, "has_gemm", lambda *_: True)
    torch._dynamo.reset()
    layer = Float8Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)

    @torch.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False, **SELECTIVE)

    with Ops(GEMMS.get) as gemms:
        checkpointed(x).float().sum().backward()
    assert gemms.counts == {"torch's": 3}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_amaxes_of_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the number of rows is unknown until run time, and may be 0, an operator finds amaxes."""
    monkeypatch.setattr(dense, "fuses_casts", lambda x: True)
    layer, x = Float8Linear(64, 48), torch.randn(8, 64)
    masked = torch.compile(lambda x, mask: layer(x[mask]), backend="aot_eager", fullgraph=True)
    sizes = ({0: torch.export.Dim("rows", min=0, max=64)},)
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes).module()
    for rows in (3, 1, 0):
        mask = torch.arange(8) < rows
        assert same_bits(masked(x, mask), layer(x[mask]))
        assert same_bits(program(x[mask]), layer(x[mask]))
    assert layer(x).requires_grad
    assert not program(x).requires_grad  # as docs/state.md says


def test_passes_that_are_no_steps_leave_no_trace() -> None:
    """(Graphs don't know which gradients were asked for, so a gradient of the input counts.)"""

    def compiled(net: nn.Module) -> Run:
        return torch.compile(net, backend="aot_eager", fullgraph=True)

    (kept, mine), (expected, theirs) = disturbed_steps(compiled, within=1)
    assert kept == expected
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("recipe", ["rowwise_folded", "mxfp8", "delayed", "fp32 blocks"])
def test_a_layer_whose_batches_differ(recipe: str) -> None:
    """Once the number of rows is marked as dynamic, one graph serves all numbers."""
    compilations = Compilations()
    layer = Float8Linear(64, 48, config=config_named(recipe))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (144, 256, 135):  # several blocks, with and without remainders
        x, results = torch.randn(rows, 64), []
        for run in (layer, compiled):
            leaf = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(leaf, 0)
            output = run(leaf)
            output.square().sum().backward()
            results.append([output.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
            layer.zero_grad()
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert compilations.graphs == 1


def inside_ddp(compiled: bool) -> tuple[list[torch.Tensor], str]:
    """The gradients and the collectives of a step."""
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


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_nested_tensors(recipe: str, layout: torch.layout) -> None:
    """Nested tensors are refused in eager code and in graphs, and the proposed remedy works."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    net = nn.Sequential(nn.Linear(32, 48))
    (layer,) = convert_to_float8_training(net, config=config)
    parts = [torch.randn(5, 32), torch.randn(16, 32)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    torch._dynamo.reset()
    for run in (layer, torch.compile(layer, backend="eager")):
        text = raised(NotImplementedError, lambda: run(x))  # noqa: B023
        assert text.startswith("0: the input is a nested tensor, which has no float8 cast")
    with pytest.raises(NotImplementedError, match="cast_to_float8: the input is a nested tensor"):
        cast_to_float8(x, CastConfig())
    if layout is torch.jagged:
        expected = layer(torch.cat(parts))
        _, _, remedy = text.partition("again: ")
        again = eval(remedy.partition(". One")[0], {"torch": torch, "layer": layer, "x": x})
        assert again.values().equal(expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors(layout: torch.layout) -> None:
    (layer,) = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)))
    x = torch.eye(4, 32)
    sparse = x.to_sparse() if layout is torch.sparse_coo else x.to_sparse_csr()
    text = raised(NotImplementedError, lambda: layer(sparse))
    assert text.startswith(f"0: the input has the layout {layout}, which has no float8 cast")
    with pytest.raises(NotImplementedError, match=f"cast_to_float8: the input has .* {layout}"):
        cast_to_float8(sparse, CastConfig())
    assert layer(sparse.to_dense()).equal(layer(x))


class CastOtherwise(nn.Module):
    """A layer whose input was cast for another recipe than its own."""

    def __init__(self) -> None:
        super().__init__()
        config = Float8LinearConfig.from_recipe_name("rowwise")
        self.layer, self.cast = Float8Linear(32, 32, config=config), CastConfig()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(cast_to_float8(x, self.cast))


def test_errors_name_the_module() -> None:
    """Like blocks share a graph, but the one that is traced has a name."""
    compiled = torch.compile(nn.Sequential(CastOtherwise()), backend="eager", fullgraph=True)
    x = torch.randn(16, 32)
    error = raised(torch._dynamo.exc.TorchRuntimeError, lambda: compiled(x))
    assert 'ValueError("0.layer: ' in error
