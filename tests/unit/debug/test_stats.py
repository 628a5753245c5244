"""float8_stats on one process: against fp64 references, planted faults, what it costs."""

import gc
import json
import math
import re
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from reference import raised
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.tensorboard import SummaryWriter

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    attach_update,
    convert_to_float8_training,
    skip_head,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.cast import quantize_over
from fp8_dist.config import CastSpec
from fp8_dist.debug import Anomaly, AnomalyLimits, CastStats, Float8Stats, GemmStats, float8_stats
from fp8_dist.debug.statistics import recorder
from fp8_dist.debug.statistics.measuring import (
    Measures,
    combine_,
    measure,
    measure_casts,
    nothing,
)
from fp8_dist.granularity import COLUMN, ROW, TENSOR, Granularity
from fp8_dist.tensor import Quantized
from scripts.common.llama import Llama, LlamaConfig

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def net(recipe: str = "tensorwise") -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False))
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config)


def train(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 64, generator=generator, requires_grad=True)
    model(x).square().mean().backward()


def cast_rows(stats: Float8Stats) -> list[CastStats]:
    return [row for row in stats.rows if isinstance(row, CastStats)]


# What was measured, against plain fp64 arithmetic.


def expected(x: torch.Tensor, low: Quantized) -> Measures:
    values, scale = x.double(), low.granularity.gemm_scale(low.scale).double()
    found = low.qdata.double() * scale
    limit = {E4M3: 464.0, E5M2: 61440.0}[low.qdata.dtype]
    counted = values != 0
    return Measures(
        values.abs().max().item(),
        scale.max().item(),
        -scale.min().item(),
        0.0 if (~values.isfinite()).any() else -math.inf,
        counted.sum().item(),
        (counted & (low.qdata.float() == 0)).sum().item(),
        (values.abs() > limit * scale).sum().item(),
        (~values.isfinite()).sum().item(),
        values.square().sum().item(),
        (found - values).square().sum().item(),
    )


@pytest.mark.parametrize("granularity", [TENSOR, ROW, COLUMN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("float8", [E4M3, E5M2])
@pytest.mark.parametrize("rows", [300, 129])  # the last part has one row
def test_measures(
    granularity: Granularity, dtype: torch.dtype, float8: torch.dtype, rows: int
) -> None:
    x = torch.randn(rows, 512) * torch.logspace(-12, 4, rows)[:, None]
    x[:, ::3] *= 1e-9
    x[::7, ::5] = 0.0
    x = x.to(dtype)
    low = quantize_over(x, CastSpec(float8, granularity), False)
    found, exact = Measures(*measure(x, low, 0).tolist()), expected(x, low)
    assert found[:-2] == exact[:-2]
    assert found.signal == pytest.approx(exact.signal, rel=1e-4)
    assert found.noise == pytest.approx(exact.noise, rel=1e-4)
    assert exact.underflow
    assert not exact.saturated


@pytest.mark.parametrize("granularity", [TENSOR, ROW, COLUMN])
@pytest.mark.parametrize("amax", [1e-30, 1e30])
def test_values_whose_squares_are_out_of_range(amax: float, granularity: Granularity) -> None:
    x = amax * torch.randn(300, 512).clamp(-1, 1)
    scale = torch.full(granularity.scale_shape(x.shape), amax / 448)
    low = Quantized((x / scale).to(E4M3), scale, granularity)
    found, exact = Measures(*measure(x, low, 0).tolist()), expected(x, low)
    assert found[:-2] == exact[:-2]
    assert found.signal == pytest.approx(exact.signal, rel=1e-4)
    assert found.noise == pytest.approx(exact.noise, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_of_one_operand(dtype: torch.dtype) -> None:
    """Each is measured as it is alone, also where others saturate."""
    x = torch.randn(300, 512).to(dtype)
    x[::7, ::5] = 0.0
    lows = [quantize_over(x, CastSpec(E4M3, each), False) for each in (ROW, COLUMN, TENSOR)]
    small = torch.tensor(1e-3)
    lows.append(Quantized((x.float() / small).clamp(-448, 448).to(E4M3), small))
    assert torch.equal(
        torch.stack(measure_casts(x, lows, 2)), torch.stack([measure(x, low, 2) for low in lows])
    )
    found = Measures(*measure_casts(x, lows, 2)[-1].tolist())
    assert found[:-2] == expected(x, lows[-1])[:-2]
    assert found.saturated


@pytest.mark.parametrize("granularity", [TENSOR, ROW, COLUMN])
def test_the_host_reads_nothing_of_other_devices(granularity: Granularity) -> None:
    """A meta tensor has no value to be read."""
    x = torch.randn(300, 512, device="meta")
    low = quantize_over(x, CastSpec(E4M3, granularity), False)
    first, second = measure_casts(x, [low, low], 0)
    assert first.device.type == "meta"
    assert first.shape == second.shape == (10,)


@pytest.mark.parametrize("transposed", [False, True])
def test_saturation(transposed: bool) -> None:
    """From the value on that rounding no longer brings to the largest number."""
    x = torch.tensor([[448.0, 464.0, 465.0], [-464.0, -465.0, 1e30]])
    qdata = x.clamp(-448, 448).to(E4M3)
    if transposed:
        qdata = qdata.t().contiguous().t()
    found = Measures(*measure(x, Quantized(qdata, torch.tensor(1.0)), 0).tolist())
    assert found.saturated == 3
    assert found.nonfinite == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite(value: float) -> None:
    x = torch.randn(4, 8)
    x[1, 2] = value
    low = quantize_over(x, CastSpec(E4M3, TENSOR), False)
    found = Measures(*measure(x, low, 3).tolist())
    assert found.nonfinite == 1
    assert found.minus_rank == -3
    assert math.isnan(found.amax) is math.isnan(value)
    total = nothing("cpu")
    combine_(
        total,
        measure(
            torch.ones(4, 8), quantize_over(torch.ones(4, 8), CastSpec(E4M3, TENSOR), False), 1
        ),
    )
    combine_(total, measure(x, low, 3))
    assert Measures(*total.tolist()).minus_rank == -3


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 4, 8), (2, 3, 4, 8), (8,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    low = Quantized(x.to(E4M3), torch.tensor(1.0))
    found = Measures(*measure(x, low, 0).tolist())
    assert found.values == found.signal == x.numel()
    assert found.noise == 0


def test_zeros_and_exact_values() -> None:
    layer = Float8Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(448 * torch.eye(16))  # the scale is 1
    with (stats := float8_stats(layer)), torch.no_grad():
        layer(torch.zeros(16, 16))
    rows = {row.operand: row for row in cast_rows(stats)}
    assert rows.keys() == {"input", "weight"}
    assert rows["input"].amax == 0
    assert (rows["input"].sqnr, rows["weight"].sqnr) == (math.inf, math.inf)
    assert rows["input"].underflow == rows["input"].nonfinite == 0


# What is recorded, and when.


def test_table() -> None:
    with (stats := float8_stats(net("rowwise_folded"), gemms=True)):
        train(stats._model)
    assert_expected_inline(
        stats.table(),
        """\
step  layer  operand      for                       amax      scale  underflow  saturation  non-finite      SQNR
   0  0      input        output, grad_weight      4.101    0.01562        0 %         0 %         0 %  31.40 dB
   0  0      weight       output, grad_input       0.125  0.0004883        0 %         0 %         0 %  32.63 dB
   0  0      grad_output  grad_input            2.77e-07  9.313e-10        0 %         0 %         0 %  31.71 dB
   0  0      grad_output  grad_weight          8.865e-06   2.98e-08        0 %         0 %         0 %  31.68 dB
   0  0                   output                                                                        29.21 dB
   0  0                   grad_input                                                                    30.66 dB
   0  0                   grad_weight                                                                   29.13 dB
   0  2      input        output, grad_weight      1.833   0.007812        0 %         0 %         0 %  31.23 dB
   0  2      weight       output, grad_input      0.1021  0.0002441        0 %         0 %         0 %  31.63 dB
   0  2      grad_output  grad_input           2.358e-07  9.313e-10        0 %         0 %         0 %  31.54 dB
   0  2      grad_output  grad_weight          5.222e-06   1.49e-08        0 %         0 %         0 %  31.67 dB
   0  2                   output                                                                        27.92 dB
   0  2                   grad_input                                                                    30.80 dB
   0  2                   grad_weight                                                                   34.56 dB""",
    )


def test_steps() -> None:
    model = net()
    stats = float8_stats(model, every=3)
    for _ in range(5):
        with stats:
            train(model)
    with stats.at(9):
        train(model)
    assert list(dict.fromkeys(row.step for row in stats.rows)) == [0, 3, 9]
    with stats.at(10):
        train(model)
    train(model)
    assert len(stats.rows) == 3 * 6


def test_micro_batches_add_up() -> None:
    model = net()
    single, both = float8_stats(model), float8_stats(model)
    for seed in (0, 1):
        with single:
            train(model, seed)
    with both:
        train(model, 0)
        train(model, 1)
    for row, first, second in zip(both.rows, single.rows[:6], single.rows[6:], strict=True):
        assert isinstance(row, CastStats)
        assert row.amax == max(first.amax, second.amax)  # type: ignore[union-attr]
        assert row.scale == max(first.scale, second.scale)  # type: ignore[union-attr]


def save_products() -> Any:
    """Selective checkpointing: what its operators return must not depend on who observes."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


CHECKPOINTING = {
    "reentrant": {"use_reentrant": True},
    "full": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": save_products},
}


@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_repeated_forward_does_not_count(recipe: str, kind: str) -> None:
    model = net(recipe)
    x = torch.randn(32, 64, requires_grad=True)
    plain, repeated = float8_stats(model, gemms=True), float8_stats(model, gemms=True)
    with plain:
        model(x).square().mean().backward()
    with repeated:
        checkpoint(model, x, **CHECKPOINTING[kind]).square().mean().backward()
    assert plain.rows == repeated.rows


def test_an_error_in_the_block_leaves_nothing() -> None:
    model = net()
    stats = float8_stats(model)
    failing = nn.Sequential(model, nn.Linear(3, 3))
    with pytest.raises(RuntimeError), stats:
        train(failing)
    assert stats.rows == []
    with stats:
        train(model)
    assert {row.step for row in stats.rows} == {1}


def test_blocks_of_several_objects() -> None:
    model, other = net(), net("rowwise")
    outer, inner = float8_stats(model), float8_stats(other)
    with outer:
        train(model)
        with inner:
            train(other)
        with pytest.raises(RuntimeError, match="this float8_stats is already recording"):
            outer.__enter__()
    assert len(outer.rows) == 6
    assert len(inner.rows) == 12


def test_layers_of_other_models_are_not_measured() -> None:
    model, other = net(), net()
    stats = float8_stats(model[0], gemms=True)
    with mock.patch.object(recorder, "measure_casts", side_effect=measure_casts) as measured, stats:
        train(model)
        train(other)
    assert measured.call_count == 3
    assert {row.fqn for row in stats.rows} == {"0"}


def test_casts_of_one_operand_are_measured_together() -> None:
    model = net("rowwise")
    stats = float8_stats(model)
    with mock.patch.object(recorder, "measure_casts", side_effect=measure_casts) as measured, stats:
        train(model)
    assert [len(call.args[1]) for call in measured.call_args_list] == [2] * 6
    assert len(stats.rows) == 12


def test_inputs_are_not_kept_after_the_backward() -> None:
    model, kept = net(), []
    stats = float8_stats(model, gemms=True)
    with stats:
        x = torch.randn(32, 64, requires_grad=True)
        hidden = model[0](x)
        kept.append(weakref.ref(hidden))
        loss = model[2](hidden).sum()
        del hidden
        loss.backward()
    gc.collect()
    assert kept[0]() is None


def test_wrong_arguments() -> None:
    errors = [
        raised(ValueError, lambda: float8_stats(nn.Linear(2, 2))),
        raised(ValueError, lambda: float8_stats(net(), every=0)),
        raised(ValueError, lambda: float8_stats(net(), every=True)),
        raised(TypeError, lambda: float8_stats(net(), on_anomaly="raise")),  # type: ignore[arg-type]
        raised(TypeError, lambda: float8_stats("model")),  # type: ignore[arg-type]
        raised(TypeError, lambda: float8_stats(net(), limits={"sqnr": 1})),  # type: ignore[arg-type]
        raised(TypeError, lambda: float8_stats(net(), mesh="dp")),  # type: ignore[arg-type]
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
float8_stats: the model has no Float8Linear; call convert_to_float8_training first
float8_stats: every=0 must be a positive integer
float8_stats: every=True must be a positive integer
float8_stats: on_anomaly='raise': use 'warn', a function or None
expected a model (an nn.Module), got a str
float8_stats: limits={'sqnr': 1} must be of type AnomalyLimits
float8_stats: mesh='dp' must be of type DeviceMesh""",
    )


# Anomalies.


def test_planted_faults(tmp_path: Path) -> None:
    """An input x 1e4 where the scale is delayed, gradients that underflow, and a NaN."""
    model = net("delayed")
    sync_float8_amax_and_scale_history(model)
    seen: list[Anomaly] = []
    stats = float8_stats(model, on_anomaly=seen.append)
    faults = {7: ("0", "input"), 9: ("2", "grad_output"), 11: ("0", "grad_output")}

    def plant(step: int) -> list[torch.utils.hooks.RemovableHandle]:
        if step == 7:
            return [model[0].register_forward_pre_hook(lambda m, args: (args[0] * 1e4,))]
        small = torch.full((32, 64), 1e-30)
        small[0, 0] = 1e3
        if step == 9:
            return [model[2].register_full_backward_pre_hook(lambda m, grads: (small,))]
        if step == 11:
            return [
                model[0].register_full_backward_pre_hook(lambda m, grads: (grads[0] * math.nan,))
            ]
        return []

    for step in range(12):
        handles = plant(step)
        with stats:
            train(model)
        for handle in handles:
            handle.remove()
        sync_float8_amax_and_scale_history(model)
    found = [(a.row.step, a.row.fqn, getattr(a.row, "operand", None), a.what) for a in seen]
    assert_expected_inline(
        "\n".join(map(str, found)),
        """\
(7, '0', 'input', 'jump')
(7, '0', 'input', 'lag')
(7, '0', 'input', 'SQNR')
(7, '2', 'input', 'lag')
(7, '2', 'input', 'SQNR')
(9, '2', 'grad_output', 'jump')
(9, '2', 'grad_output', 'underflow')
(11, '0', 'grad_output', 'non-finite')""",
    )
    assert {(step, *faults[step]) for step in faults} <= {entry[:3] for entry in found}
    assert_expected_inline(
        # (The last digits of so small an SQNR are the machine's.)
        re.sub(r"0\.00276\d", "0.00276", "\n".join(map(str, seen))),
        """\
step 7: 0: input (for output, grad_weight): the amax is 13.29 octaves above the largest of the last steps (limit: 7)
step 7: 0: input (for output, grad_weight): the amax is 13.29 octaves above what the delayed scale was made for (limit: 1): values saturate until the history has caught up
step 7: 0: input (for output, grad_weight): an SQNR of 0.00276 dB (limit: 15 dB)
step 7: 2: input (for output, grad_weight): the amax is 2.222 octaves above what the delayed scale was made for (limit: 1): values saturate until the history has caught up
step 7: 2: input (for output, grad_weight): an SQNR of 6.373 dB (limit: 15 dB)
step 9: 2: grad_output (for grad_input, grad_weight): the amax is 18.85 octaves above the largest of the last steps (limit: 7)
step 9: 2: grad_output (for grad_input, grad_weight): 99.95 % of the values become zero in float8 (limit: 20 %)
step 11: 0: grad_output (for grad_input, grad_weight): 100 % of the values are NaN or infinite, first on rank 0""",
    )
    assert stats.anomalies == seen


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"underflow": -1.0}, ValueError, "underflow=-1.0 is no limit; give a number that is not"),
        ({"underflow": math.nan}, ValueError, "underflow=nan is no limit"),
        ({"lag": -0.5}, ValueError, "lag=-0.5 is no limit; give a number that is not negative"),
        ({"jump": -1}, ValueError, "jump=-1 is no limit; give a number that is not negative"),
        ({"sqnr": math.nan}, ValueError, "sqnr=nan is no limit; give a number, or None (never)"),
        ({"sqnr": "15"}, TypeError, "sqnr='15' must be a number or None (never)"),
        ({"lag": True}, TypeError, "lag=True must be a number or None (never)"),
    ],
)
def test_limits_that_are_none(limits: dict[str, Any], error: type[Exception], message: str) -> None:
    assert raised(error, lambda: AnomalyLimits(**limits)).startswith(f"AnomalyLimits: {message}")
    AnomalyLimits(underflow=0, sqnr=-5.0, lag=None)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "delayed", "mxfp8"])
def test_an_outlier_is_named_where_it_is(recipe: str) -> None:
    """Healthy training raises no alarm, from the first step on. Then one layer's input has a 1e5."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(64, 2, 4, 2, 96, vocab_size=64, max_seq_len=32))
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    attach_update(optimizer, model)
    stats = float8_stats(model, limits=AnomalyLimits(None, None, None))
    tokens = torch.randint(64, (30, 2, 17))

    def plant(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0].clone()
        x[0, 0, 0] = 1e5
        return (x,)

    for step, part in enumerate(tokens):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 10)
        if step == len(tokens) - 1:
            assert stats.anomalies == []
            model.layers[0].feed_forward.w1.register_forward_pre_hook(plant)
        with stats:
            logits = model(part[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    first = stats.anomalies[0]
    assert (first.what, first.row.step, first.row.fqn) == (
        "jump",
        len(tokens) - 1,
        "layers.0.feed_forward.w1",
    )
    assert "input (for output" in str(first)
    assert "octaves above the largest of the last steps (limit: 7)" in str(first)


@pytest.mark.parametrize(
    ("recipe", "what", "factors"),
    [
        ("delayed", "lag", (1, 7)),
        ("delayed", "lag", (1, 9)),
        ("tensorwise", "jump", (1, 7)),
        ("tensorwise", "jump", (1, 9)),
        ("tensorwise", "jump", (1, math.inf, 9)),  # what is infinite is not usual from then on
    ],
)
def test_limits_are_octaves(recipe: str, what: str, factors: tuple[float, ...]) -> None:
    model, x = net(recipe), torch.randn(32, 64)
    limits = {"underflow": None, "sqnr": None, "lag": None, "jump": None} | {what: 3.0}
    stats = float8_stats(model, limits=AnomalyLimits(**limits))
    for factor in factors:
        with stats:
            model[0](x * factor)
        if recipe == "delayed":
            sync_float8_amax_and_scale_history(model)
    found = [anomaly.what for anomaly in stats.anomalies if anomaly.what != "non-finite"]
    assert found == ([what] if factors[-1] == 9 else [])


def test_warnings_once_per_layer() -> None:
    model = net()
    stats = float8_stats(model, on_anomaly="warn", limits=AnomalyLimits(sqnr=100.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with stats:
                train(model)
    assert {w.filename for w in caught} == {__file__}
    assert_expected_inline(
        "\n".join(str(w.message) for w in caught),
        """\
float8_stats: step 0: 0: weight (for output, grad_input): an SQNR of 31.91 dB (limit: 100 dB)
float8_stats: step 0: 2: weight (for output, grad_input): an SQNR of 31.99 dB (limit: 100 dB)""",
    )


# Outputs.


def test_jsonl(tmp_path: Path) -> None:
    model = net()
    path = tmp_path / "stats.jsonl"
    stats = float8_stats(model, gemms=True)
    with stats, torch.no_grad():
        model(torch.full((4, 64), math.nan))
    rows = stats.to_dicts()
    stats.append_jsonl(path)
    assert stats.rows == []
    stats.append_jsonl(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == [row["kind"] for row in rows]
    assert lines[0]["amax"] == lines[0]["sqnr"] == "NaN"
    assert lines[0]["nonfinite"] == 100.0
    assert lines[0]["gemms"] == ["output", "grad_weight"]


def test_tensorboard(tmp_path: Path) -> None:
    model = net()
    stats = float8_stats(model, gemms=True)
    with stats.at(3):
        train(model)
    rows = {row.fqn: row for row in cast_rows(stats) if row.operand == "input"}
    gemm = next(row for row in stats.rows if isinstance(row, GemmStats))
    with SummaryWriter(str(tmp_path)) as writer:
        stats.to_tensorboard(writer)
    assert stats.rows == []
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert len(tags) == 6 * 6 + 6
    for fqn, row in rows.items():
        (event,) = found.Scalars(f"float8/input_for_output_grad_weight/{fqn}/sqnr")
        assert (event.step, event.value) == (3, pytest.approx(row.sqnr))
    (event,) = found.Scalars("float8/output/0/sqnr")
    assert event.value == pytest.approx(gemm.sqnr)


# What it costs when it is off.


class Ops(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_off_costs_no_operator(recipe: str) -> None:
    model = net(recipe)

    def ops() -> list[str]:
        with Ops() as seen:
            train(model)
        return seen.names

    train(model)
    before = ops()
    with float8_stats(model, gemms=True):
        ops()
    stats = float8_stats(model, every=2)
    with stats.at(1):
        assert ops() == before
    assert ops() == before
    assert not [name for name in before if "observe" in name]
