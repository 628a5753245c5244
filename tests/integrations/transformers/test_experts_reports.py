"""Statistics, recordings, collectives, filters and the doctor's report for converted experts."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hf_experts import IDS, Mixture, made, step
from hf_models import build
from moe_layers import GEMMS, expected, rounded
from ranks import RankPools, device_mesh
from recordings import casts, different, written
from reference import raised, same_bits, sqnr
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import (
    Float8Tensor,
    attach_update,
    auto_filter,
    conversion_summary,
    convert_to_float8_training,
    doctor,
    precompute_float8_dynamic_scale,
    update_float8_scales,
)
from fp8_dist.debug import CastStats, GemmStats, comm_audit, float8_stats, record
from fp8_dist.fsdp import average_gradients_over
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    float8_experts,
)
from fp8_dist.moe.config import ExpertsRecipe
from fp8_dist.tensor_parallel import Float8ExpertParallel

EXPERTS = "model.layers.1.mlp.experts"
# The numbers of rows and columns of an operand that share a scale; None: all.
BLOCKS: dict[ExpertsRecipe, tuple[tuple[int, int | None], tuple[int | None, int | None]]] = {
    "rowwise_folded": ((1, None), (1, None)),
    "tensorwise": ((1, None), (None, None)),
    "blockwise": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (32, 32)),
}


def operands(model: nn.Module) -> dict[str, torch.Tensor]:
    """Some operands of a layer's experts in a step, from hooks, by weight and operand."""
    experts, found = model.get_submodule(EXPERTS), {}

    def before(_: Any, args: Any) -> None:
        found["gate_up_proj input"], found["weights"] = args[0].detach(), args[2].detach()

    def after(_: Any, __: Any, grads: Any) -> None:
        found["down_proj grad_output"] = (grads[0][:, None] * found["weights"][..., None]).flatten(
            0, 1
        )

    handles = experts.register_forward_pre_hook(before), experts.register_full_backward_hook(after)
    step(model)
    for handle in handles:
        handle.remove()
    del found["weights"]
    weights = {f"{n} weight": p.detach() for n, p in experts.named_parameters() if p.ndim == 3}
    return found | weights


@pytest.mark.parametrize(
    ("kind", "recipe"), [*(("mixtral", recipe) for recipe in BLOCKS), ("gpt_oss", "rowwise_folded")]
)
def test_casts_of_experts(tmp_path: Path, kind: str, recipe: ExpertsRecipe) -> None:
    model = made(kind, recipe)
    stats, recorder = float8_stats(model, gemms=True), record(model, tmp_path, layers="*")
    with stats, recorder:
        expected = operands(model)
    assert len(stats.rows) == 2 * 2 * (3 + 3)  # layers, weights, operands and GEMMs
    rows = {f"{r.fqn} {r.operand}": r for r in stats.rows if isinstance(r, CastStats)}
    found = {f"{c.parts[0]['fqn']} {c.parts[0]['operand']}": c for c in casts(written(recorder))}
    assert found.keys() == rows.keys()
    row_blocks, weight_blocks = BLOCKS[recipe]
    rule = "ceil" if recipe == "mxfp8" else None
    for name, high in expected.items():
        row, cast = rows[f"{EXPERTS}.{name}"], found[f"{EXPERTS}.{name}"]
        again = {"gemms": row.gemms, "position": cast.parts[0]["position"]}
        assert dataclasses.replace(cast.stats(), **again) == row
        assert same_bits(cast.high, high)
        blocks = weight_blocks if high.ndim == 3 else row_blocks
        matrices = high if high.ndim == 3 else high[None]
        is_turned = kind == "gpt_oss" and high.ndim == 3  # GPT-OSS stores weights as [E, K, N]
        matrices = matrices.mT if is_turned else matrices
        sizes = [b or n for b, n in zip(blocks, matrices.shape[1:], strict=True)]
        low = torch.stack([rounded(matrix.double(), *sizes, rule) for matrix in matrices])
        low = (low.mT if is_turned else low).reshape(high.shape)
        assert same_bits(Float8Tensor.of(cast.low, torch.float32).dequantize(), low.float())
        assert row.amax == high.abs().max().item()
        values = high.count_nonzero().item()
        assert row.underflow == pytest.approx(100 * (1 - low.count_nonzero().item() / values))
        noise = (low - high.double()).square().sum() / high.double().square().sum()
        assert row.sqnr == pytest.approx(-10 * noise.log10().item(), abs=1e-3)
        kept, to_zero, saturated = map(sum, zip(*cast.octaves().values(), strict=True))
        assert (kept, saturated) == (low.count_nonzero().item(), 0)
        assert to_zero == values - kept


@pytest.mark.parametrize("recipe", BLOCKS)
def test_gemms_of_experts(tmp_path: Path, recipe: ExpertsRecipe) -> None:
    """GEMMs have the same errors as the formula of the recipe for the same operands."""
    model, x = Mixture(Float8ExpertsConfig(recipe)), torch.randn(40, 160)
    ids = torch.rand(40, 7).argsort(1)[:, :2]  # expert 7 has no tokens
    stats, recorder = float8_stats(model, gemms=True), record(model, tmp_path, layers="experts.*")
    with stats, recorder:
        model(x, ids, torch.rand(40, 2)).backward(torch.randn(40, 160))
    found = {(r.fqn, r.gemm): r.sqnr for r in stats.rows if isinstance(r, GemmStats)}
    recorded = [(cast.parts[0], cast.high) for cast in casts(written(recorder))]
    highs = {(part["fqn"], part["operand"]): high for part, high in recorded}
    slots, counts = ids.flatten().argsort(stable=True), ids.flatten().bincount(minlength=8).tolist()
    rows = {"gate_up_proj": (slots // 2, slice(None)), "down_proj": (slice(None), slots)}
    for name, (input_rows, grad_rows) in rows.items():
        fqn = f"experts.{name}"
        x, w, g = (highs[fqn, operand] for operand in ("input", "weight", "grad_output"))
        operands = x[input_rows], w, g[grad_rows], counts
        results = expected("high_precision", *operands), expected(recipe, *operands)
        for gemm, exact, low in zip(GEMMS, *results, strict=True):
            assert found[fqn, gemm] == pytest.approx(sqnr(exact, low), abs=0.01)


def parallel(model: Any, dp: int, ep: int, dim: int) -> nn.Module:
    """Divide experts over ``ep`` ranks, and shard them along ``dim`` over ``dp`` ranks."""
    mesh = device_mesh(dp=dp, ep=ep)
    for experts in float8_experts(model).values():
        if ep > 1:
            parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
        if dp > 1:
            fully_shard(experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
            average_gradients_over(experts, mesh)
    if dp > 1:
        fully_shard(model, mesh=mesh._flatten("all"))
    return model  # type: ignore[no-any-return]


def recorded(
    dp: int, ep: int, dim: int, fields: dict[str, Any], folder: Path
) -> tuple[list[Any], list[Any]]:
    """Statistics and recordings of a step, on ranks with one text each, and on one device."""
    rank, texts = dist.get_rank(), len(IDS) // (dp * ep)
    model, twin = parallel(made("mixtral", **fields), dp, ep, dim), made("mixtral", **fields)
    mine, its = float8_stats(model), float8_stats(twin)
    mine_too = record(model, folder / "ranks", layers="*")
    its_too = record(twin, folder / "twin", layers="*")
    with mine_too:
        mine.__enter__()
        step(model, IDS[texts * rank : texts * (rank + 1)])
        with comm_audit() as audit:
            mine.__exit__(None)
        assert audit.count() == 1
    with its, its_too:
        step(twin)
    for recorder in (mine_too, its_too):
        written(recorder)
    return mine.rows, its.rows


@pytest.mark.parametrize(
    ("dp", "ep", "dim", "fields"),
    [
        (2, 1, 1, {"recipe": "tensorwise", "enable_fsdp_float8_all_gather": False}),
        (2, 2, 0, {"recipe": "mxfp8", "combine": "float8"}),
    ],
)
def test_casts_on_ranks_are_those_of_one_device(
    ranks: RankPools, tmp_path: Path, dp: int, ep: int, dim: int, fields: dict[str, Any]
) -> None:
    results = ranks(dp * ep).run(recorded, dp, ep, dim, fields, tmp_path)
    for mine, its in results:
        assert len(mine) == len(its) == 2 * 2 * 3
        for row, other in zip(mine, its, strict=True):
            assert abs(row.sqnr - other.sqnr) < 0.01, (row, other)
            assert dataclasses.replace(row, sqnr=other.sqnr) == other
        assert any(row.underflow for row in its if isinstance(row, CastStats))
    assert different(tmp_path / "ranks" / "step000000", tmp_path / "twin" / "step000000") == []


def messages(checkpointing: bool) -> list[tuple[str, ...]]:
    mesh, rank = device_mesh(ep=2), dist.get_rank()
    model = parallel(made("mixtral"), 1, 2, 0)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    with comm_audit(mesh) as audit:
        step(model, IDS[2 * rank : 2 * rank + 2])
    counts, rows, scales, outputs, *_ = audit.rows
    assert counts.bytes == (1 + checkpointing) * 4 * 8
    assert rows.bytes // 64 * 4 == scales.bytes
    assert outputs.elements % 64 == 0
    shown = [
        (r.op, r.axis, str(r.dtype), "+" if r.in_mixed_gather else str(r.count), r.module)
        for r in audit.rows
    ]
    return sorted(shown, key=lambda row: row[-1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_messages_have_the_names_of_their_experts(ranks: RankPools, checkpointing: bool) -> None:
    """Counts, rows with their scales, and outputs are sent, in forward and in backward."""
    found, _ = ranks(2).run(messages, checkpointing)
    again = int(checkpointing)
    expected = [("int64", 1 + again), ("float8_e4m3fn", 2 + again), ("float32", "+")]
    assert found == [
        ("all_to_all", "ep", f"torch.{dtype}", str(count), f"model.layers.{layer}.mlp.experts")
        for layer in range(2)
        for dtype, count in [*expected, ("float32", 2 + again)]
    ]


def test_auto_filter() -> None:
    with torch.device("meta"):
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 64}
        model = build("mixtral", **sizes, num_hidden_layers=1, head_dim=128)
        small = build("qwen3_moe", hidden_size=2048, moe_intermediate_size=768)
    admits = auto_filter("tensorwise", ["layers.7"], tp_size=2)
    convert_to_float8_training(model, module_filter_fn=admits)
    convert_experts_to_float8_training(model, module_filter_fn=admits)
    assert_expected_inline(
        str(admits.report),
        """\
auto_filter: 4 of 7 weights to float8, recipe tensorwise (thresholds: H100)
local: tp_size 2, out or in divided, whichever gains less
  layer                                    out x in      local                reason
  model.layers.0.self_attn.q_proj          8192 x 4096   8192 x 2048  float8  large enough, from about 6,700 tokens on
  model.layers.0.self_attn.k_proj          256 x 4096    128 x 4096   skip    out <= 1024 and in <= 4096
  model.layers.0.self_attn.v_proj          256 x 4096    128 x 4096   skip    out <= 1024 and in <= 4096
  model.layers.0.self_attn.o_proj          4096 x 8192   2048 x 8192  float8  large enough, from about 6,700 tokens on
  lm_head                                  256 x 4096    128 x 4096   skip    it is the model's head, by its name
  model.layers.0.mlp.experts.gate_up_proj  28672 x 4096  not divided  float8  large enough
  model.layers.0.mlp.experts.down_proj     4096 x 14336  not divided  float8  large enough
filter_fqns: 'layers.7' matched no layer""",
    )
    assert sum(row.kind == "experts" for row in conversion_summary(model).converted) == 2
    admits = auto_filter("blockwise")
    call = partial(convert_experts_to_float8_training, small, module_filter_fn=admits)
    assert "module_filter_fn admits none" in raised(ValueError, call)
    (*_, last) = admits.report.rows
    assert (last.fqn, last.shape) == ("model.layers.1.mlp.experts.down_proj", (2048, 768))
    assert_expected_inline(
        admits.reasons["model.layers.1.mlp.experts"], """auto_filter: gate_up_proj: out <= 2048"""
    )


def small_mixtral() -> nn.Module:
    return build("mixtral", vocab_size=64)


def report_of(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> str:
    """The lines about experts in the doctor's report."""
    doctor.main(["--model", f"test_experts_reports:{model}", *options])
    _, _, text = capsys.readouterr().out.partition("module_filter_fn")
    return "\n".join(line for line in text.splitlines() if "experts" in line)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert_expected_inline(
        report_of(capsys, "small_mixtral", "--recipe", "rowwise_folded", "--tp", "2"),
        """\
experts: Float8ExpertsConfig('rowwise_folded')
  model.layers.*.mlp.experts.gate_up_proj (2)  4 x 256 x 64  float8       56.9%
  model.layers.*.mlp.experts.down_proj (2)     4 x 64 x 128  float8       28.5%
  model.layers.*.mlp.experts.gate_up_proj (2), 256 x 64: out <= 2048
  model.layers.*.mlp.experts.down_proj (2), 64 x 128: out <= 2048""",
    )
    first, *_ = report_of(capsys, "small_mixtral", "--recipe", "delayed").splitlines()
    assert_expected_inline(
        first,
        """experts stay in high precision: Float8ExpertsConfig.recipe must be None or 'rowwise_folded' or 'tensorwise' or 'blockwise' or 'mxfp8', got 'delayed'""",
    )


def test_messages_name_both_conversions() -> None:
    model = build("mixtral")
    optimizer = torch.optim.SGD(model.parameters())
    for call in (
        partial(precompute_float8_dynamic_scale, model),
        partial(update_float8_scales, model),
        partial(attach_update, optimizer, model),
    ):
        text = raised(ValueError, call)
        assert "convert_to_float8_training of fp8_dist first (for experts" in text
