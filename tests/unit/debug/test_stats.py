"""float8_stats on one process: against fp64 references, planted faults, what it costs."""

import dataclasses
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from reference import Watching, json_lines, raised
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.tensorboard import SummaryWriter

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    attach_update,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import Anomaly, AnomalyLimits, CastStats, Float8Stats, GemmStats, float8_stats
from fp8_dist.debug.measures import Measures, combine_, measure_casts, nothing
from fp8_dist.debug.rows import summarized
from fp8_dist.operand.prepare import cast_once
from fp8_dist.scaling import Dense, Quantized

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


def quantized_tensor(qdata: torch.Tensor, scale: torch.Tensor) -> Quantized:
    return Quantized(qdata, (scale,), Dense(qdata.dtype))


def expected(x: torch.Tensor, low: Quantized) -> Measures:
    values, scale = x.double(), low.scales[0].double()
    found = low.qdata.double() * scale
    limit = {E4M3: 464.0, E5M2: 61440.0}[low.qdata.dtype]
    counted = values != 0
    return Measures(
        values.abs().max().item(),
        scale.max().item(),
        -scale.min().item(),
        0.0 if (~values.isfinite()).any() else -math.inf,
        -math.inf,
        counted.sum().item(),
        (counted & (low.qdata.float() == 0)).sum().item(),
        (values.abs() > limit * scale).sum().item(),
        (~values.isfinite()).sum().item(),
        values.square().sum().item(),
        (found - values).square().sum().item(),
    )


def check(x: torch.Tensor, low: Quantized) -> Measures:
    """Check measures against those of the reference, and return the latter."""
    found, exact = Measures(*measure_casts(x, [low], 0)[0].tolist()), expected(x, low)
    assert found[:-2] == exact[:-2]
    assert found.signal == pytest.approx(exact.signal, rel=1e-4)
    assert found.noise == pytest.approx(exact.noise, rel=1e-4)
    return exact


@pytest.mark.parametrize("per", ["tensor", "row", "column"])
def test_measures(per: str) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    for rows, dtype, float8 in product(
        (300, 129), dtypes, (E4M3, E5M2)
    ):  # the last part of 129 has one row
        x = torch.randn(rows, 512) * torch.logspace(-12, 4, rows)[:, None]
        x[:, ::3] *= 1e-9
        x[::7, ::5] = 0.0
        x = x.to(dtype)
        exact = check(x, cast_once(x, Dense(float8, per)))
        assert exact.underflow
        assert not exact.saturated
    for amax in (1e-30, 1e30):  # squares are out of range
        x = amax * torch.randn(300, 512).clamp(-1, 1)
        (shape,) = Dense(E4M3, per).scale_shapes(x.shape)
        scale = torch.full(shape, amax / 448)
        check(x, Quantized((x / scale).to(E4M3), (scale,), Dense(E4M3, per)))
    # A value saturates if it is too large to round to the largest float8 number.
    x = torch.tensor([[448.0, 464.0, 465.0], [-464.0, -465.0, 1e9]])
    for qdata in (x.clamp(-448, 448).to(E4M3), x.t().contiguous().clamp(-448, 448).to(E4M3).t()):
        assert check(x, quantized_tensor(qdata, torch.tensor(1.0))).saturated == 3
    # The host reads nothing of other devices: a meta tensor has no value to be read.
    x = torch.randn(300, 512, device="meta")
    low = cast_once(x, Dense(E4M3, per))
    for measured in measure_casts(x, [low, low], 0):
        assert (measured.device.type, measured.shape) == ("meta", (11,))


def test_casts_of_one_operand() -> None:
    """Each is measured as it is alone, also where others saturate."""
    x = torch.randn(300, 512).bfloat16()
    x[::7, ::5] = 0.0
    lows = [cast_once(x, Dense(E4M3, per)) for per in ("row", "column", "tensor")]
    small = torch.tensor(1e-3)
    lows.append(quantized_tensor((x.float() / small).clamp(-448, 448).to(E4M3), small))
    together = torch.stack(measure_casts(x, lows, 0))
    assert torch.equal(together, torch.stack([measure_casts(x, [low], 0)[0] for low in lows]))
    assert check(x, lows[-1]).saturated


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite(value: float) -> None:
    x, ones = torch.randn(4, 8), torch.ones(4, 8)
    x[1, 2] = value
    low, low_ones = (cast_once(each, Dense(E4M3)) for each in (x, ones))
    found = Measures(*measure_casts(x, [low], 3)[0].tolist())
    assert (found.nonfinite, found.minus_rank) == (1, -3)
    assert math.isnan(found.amax) is math.isnan(value)
    total = nothing("cpu")
    combine_(total, measure_casts(ones, [low_ones], 1)[0])
    combine_(total, measure_casts(x, [low], 3)[0])
    assert Measures(*total.tolist()).minus_rank == -3


def test_shapes_zeros_and_exact_values() -> None:
    for shape in ((0, 8), (3, 0), (0, 4, 8), (2, 3, 4, 8), (8,)):
        x = torch.ones(shape)
        low = quantized_tensor(x.to(E4M3), torch.tensor(1.0))
        found = Measures(*measure_casts(x, [low], 0)[0].tolist())
        assert (found.values, found.signal, found.noise) == (x.numel(), x.numel(), 0)
    layer = Float8Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(448 * torch.eye(16))  # the scale is 1
    with (stats := float8_stats(layer)), torch.no_grad():
        layer(torch.zeros(16, 16))
    rows = {row.operand: row for row in cast_rows(stats)}
    assert rows.keys() == {"input", "weight"}
    assert rows["input"].amax == rows["input"].underflow == rows["input"].nonfinite == 0
    assert (rows["input"].sqnr, rows["weight"].sqnr) == (math.inf, math.inf)


# What is recorded, and when.


def test_the_rows_of_a_step_and_their_table() -> None:
    model = net("rowwise_folded")
    with (stats := float8_stats(model, gemms=True)):
        train(model)
    casts = ["input", "weight", "grad_output", "grad_output"]
    for layer, rows in (("0", stats.rows[:7]), ("2", stats.rows[7:])):
        assert [getattr(row, "operand", None) for row in rows] == [*casts, None, None, None]
        assert {row.fqn for row in rows} == {layer}
        assert all(27 < row.sqnr < 35 for row in rows)
    head, *lines = stats.table().splitlines()
    assert head.split() == [
        *("step", "layer", "operand", "for", "amax", "scale"),
        *("underflow", "saturation", "non-finite", "SQNR"),
    ]
    for line, row in zip(lines, stats.rows, strict=True):
        assert line.split()[:2] == ["0", row.fqn]
        assert line.endswith(f" {row.sqnr:.2f} dB")
    assert lines[0].split()[2:7] == ["input", "output,", "grad_weight", "4.101", "0.01562"]


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
    # The table has the last of them.
    assert {line.split()[0] for line in stats.table().splitlines()[1:]} == {"9"}
    assert len(stats.table().splitlines()) == 1 + 6


def test_without_converted_layers_nothing_happens() -> None:
    model, tensorboard = nn.Sequential(nn.Linear(64, 64)), []
    stats = float8_stats(model, gemms=True, on_anomaly="warn")
    train(model)
    with Watching() as plain:
        train(model)
    with stats, Watching() as watched:
        train(model)
    assert watched.seen == plain.seen
    stats.to_tensorboard(tensorboard, layers="0")
    assert (stats.rows, stats.anomalies, tensorboard) == ([], [], [])
    assert stats.table() == "no casts: the model has no converted layer"
    # A model may be converted later.
    convert_to_float8_training(model)
    with stats:
        train(model)
    assert len(stats.table().splitlines()) == 1 + 6


def test_micro_batches_add_up() -> None:
    model = net()
    single, both = float8_stats(model), float8_stats(model)
    for seed in (0, 1):
        with single:
            train(model, seed)
    with both:
        train(model, 0)
        train(model, 1)
    firsts, seconds = cast_rows(single)[:6], cast_rows(single)[6:]
    for row, first, second in zip(cast_rows(both), firsts, seconds, strict=True):
        assert row.amax == max(first.amax, second.amax)
        assert row.scale == max(first.scale, second.scale)


CHECKPOINTING = {
    "reentrant": {"use_reentrant": True},
    "full": {"use_reentrant": False},
    # What its operators return must not depend on who observes.
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default]),
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_repeated_forward_does_not_count(recipe: str) -> None:
    model = net(recipe)
    x = torch.randn(32, 64, requires_grad=True)
    with (plain := float8_stats(model, gemms=True)):
        model(x).square().mean().backward()
    for arguments in CHECKPOINTING.values():
        with (repeated := float8_stats(model, gemms=True)):
            checkpoint(model, x, **arguments).square().mean().backward()
        assert plain.rows == repeated.rows


def test_an_error_in_the_block_leaves_nothing_and_blocks_nest() -> None:
    model, other = net(), net("rowwise")
    outer, inner = float8_stats(model), float8_stats(other)
    with pytest.raises(RuntimeError), outer:
        train(nn.Sequential(model, nn.Linear(3, 3)))
    assert outer.rows == []
    with outer:
        train(model)
        with inner:
            train(other)
        with pytest.raises(RuntimeError, match="this Float8Stats is already recording"):
            outer.__enter__()
    assert [row.step for row in outer.rows] == [1] * 6
    assert len(inner.rows) == 12


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


WRONG: list[tuple[type[Exception], Any, str]] = [
    (ValueError, partial(float8_stats, net(), every=0), "float8_stats: every=0 must be a positive"),
    (ValueError, partial(float8_stats, net(), every=True), "float8_stats: every=True must be a posit"),
    (TypeError, partial(float8_stats, net(), on_anomaly="raise"), "on_anomaly='raise': use 'warn', a"),
    (TypeError, partial(float8_stats, "model"), "expected a model (an nn.Module), got a str"),
    (TypeError, partial(float8_stats, net(), limits={"sqnr": 1}), "limits={'sqnr': 1} must be of"),
    (TypeError, partial(float8_stats, net(), mesh="dp"), "mesh='dp' must be of type DeviceMesh"),
    (ValueError, partial(AnomalyLimits, underflow=math.nan), "underflow=nan is no limit; give a num"),
    (ValueError, partial(AnomalyLimits, lag=-0.5), "lag=-0.5 is no limit; give a number that is not"),
    (ValueError, partial(AnomalyLimits, sqnr=math.nan), "sqnr=nan is no limit; give a number, or No"),
    (TypeError, partial(AnomalyLimits, sqnr="15"), "sqnr='15' must be a number or None (never)"),
    (TypeError, partial(AnomalyLimits, lag=True), "AnomalyLimits: lag=True must be a number or None"),
]  # fmt: skip


def test_wrong_arguments() -> None:
    for kind, call, message in WRONG:
        assert message in raised(kind, call)
    AnomalyLimits(underflow=0, sqnr=-5.0, lag=None)


# Anomalies.


class Block(nn.Module):
    """Layers behind norms, with a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def with_outlier(value: float, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[3, 5] = value
    return x


def vanishing(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of the same amax, nearly all of whose values are tiny."""
    found = torch.full_like(gradient, 1e-30)
    found[:, ::32] = gradient.abs().max()
    return found


def on_norm(change: Callable[[torch.Tensor], torch.Tensor], model: Block) -> Any:
    return model.norms[1].register_forward_hook(lambda m, args, output: change(output))


def on_gradient(change: Callable[[torch.Tensor], torch.Tensor], model: Block) -> Any:
    hook = model.layers[1].register_full_backward_pre_hook
    return hook(lambda m, grads: (change(grads[0]),))


def on_weight(model: Block) -> None:
    with torch.no_grad():
        model.layers[1].weight.mul_(1e4)


FAULTS: dict[str, tuple[Callable[[Block], Any], str, str]] = {
    "an outlier": (partial(on_norm, partial(with_outlier, 1e5)), "input", "jump"),
    "NaN": (partial(on_norm, partial(with_outlier, math.nan)), "input", "non-finite"),
    "a weight": (on_weight, "weight", "jump"),
    "a gradient": (partial(on_gradient, lambda g: 1e5 * g), "grad_output", "jump"),
    "Inf": (partial(on_gradient, partial(with_outlier, math.inf)), "grad_output", "non-finite"),
    "underflow": (partial(on_gradient, vanishing), "grad_output", "underflow"),
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "delayed"])
def test_faults_are_named_where_they_happen(recipe: str) -> None:
    """The first anomaly: of the faulty layer and cast, in the step of the fault."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    for plant, operand, what in FAULTS.values():
        torch.manual_seed(0)
        model = convert_to_float8_training(Block(), config=config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        attach_update(optimizer, model)
        stats = float8_stats(model)
        for step in range(20):
            if step == 18:
                assert stats.anomalies == []
                plant(model)
            with stats:
                model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        row = stats.anomalies[0].row
        assert isinstance(row, CastStats)
        assert (row.step, row.fqn, row.operand, stats.anomalies[0].what) == (
            18,
            "layers.1",
            operand,
            what,
        )


@pytest.mark.parametrize(
    ("recipe", "what", "factors"),
    [
        ("delayed", "lag", (1, 7)),
        ("delayed", "lag", (1, 9)),
        ("tensorwise", "jump", (1, 7)),
        ("tensorwise", "jump", (1, 9)),
        ("tensorwise", "jump", (1, 0.01, 1)),  # the largest one counts
        ("tensorwise", "jump", (1, math.inf, 9)),  # an infinite amax sets no new usual level
    ],
)
def test_limits_are_octaves(recipe: str, what: str, factors: tuple[float, ...]) -> None:
    model, x = net(recipe), torch.randn(32, 64)
    limits = {"underflow": None, "sqnr": None, "lag": None, "jump": None} | {what: 3.0}
    seen: list[Anomaly] = []
    stats = float8_stats(model, on_anomaly=seen.append, limits=AnomalyLimits(**limits))
    for factor in factors:
        with stats:
            model[0](x * factor).sum().backward()
        if recipe == "delayed":
            sync_float8_amax_and_scale_history(model)
    found = [anomaly.what for anomaly in seen if anomaly.what != "non-finite"]
    assert stats.anomalies == seen
    assert found == ([what] if factors[-1] == 9 else [])


def test_one_warning_per_step() -> None:
    """It has the first anomaly, and counts the others by kind and layer."""
    model = net()
    stats = float8_stats(model, on_anomaly="warn", limits=AnomalyLimits(sqnr=100.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with stats:
                train(model)
    assert {w.filename for w in caught} == {__file__}
    (text,) = [str(w.message) for w in caught]
    assert text.startswith("float8_stats: step 0: 0: weight (for output, grad_input): an SQNR of ")
    assert text.endswith(". Then 1 more: SQNR in 2")
    other = dataclasses.replace(stats.anomalies[0], what="jump")
    assert summarized([other]) == str(other)
    assert summarized([other, *stats.anomalies]).endswith(". Then 2 more: SQNR in * (2)")
    assert summarized([*stats.anomalies, other]).endswith(". Then 2 more: SQNR in 2; jump in 0")


# Outputs.


def test_casts_to_four_bits_have_a_limit_of_their_own() -> None:
    """Of Laplace-distributed weights, whose squares have large amaxes."""
    layer = nn.Linear(256, 256)
    layer.weight.data = torch.distributions.Laplace(0.0, 1.0).sample((256, 256))
    config = Float8LinearConfig.from_recipe_name("blockwise", weight_format="mxfp4")
    convert_to_float8_training(layer, config=config)
    for limits, count in ((AnomalyLimits(), 0), (AnomalyLimits(sqnr=26.0), 1)):
        with float8_stats(layer, on_anomaly=(found := []).append, limits=limits) as stats:
            layer(torch.randn(64, 256)).sum().backward()
        (row,) = [row for row in stats.rows if row.operand == "weight"]
        assert row.dtype is torch.float4_e2m1fn_x2
        assert 12 < row.sqnr < 14.9
        assert row.saturation < 15
        assert [each.row for each in found if each.row.operand == "weight"] == [row] * count


def test_jsonl(tmp_path: Path) -> None:
    path, stats = tmp_path / "stats.jsonl", float8_stats(model := net(), gemms=True)
    with stats, torch.no_grad():
        model(torch.full((4, 64), math.nan))
    kinds = [row["kind"] for row in stats.to_dicts()]
    stats.append_jsonl(path)
    assert stats.rows == []
    stats.append_jsonl(path)
    lines = json_lines(path)
    assert [line["kind"] for line in lines] == kinds
    assert lines[0]["amax"] == lines[0]["sqnr"] == "NaN"
    assert (lines[0]["nonfinite"], lines[0]["gemms"]) == (100.0, ["output", "grad_weight"])


def test_a_call_in_each_step_writes_the_recorded_steps() -> None:
    model, scalars = net(), list[int]()
    writer: Any = SimpleNamespace(add_scalar=lambda tag, value, step: scalars.append(step))
    run: Any = SimpleNamespace(log=lambda values, step: logged.append(step))
    logged, stats, other = list[int](), float8_stats(model, every=2), float8_stats(model, every=2)
    for _ in range(3):
        with stats, other:
            train(model)
        stats.to_tensorboard(writer)
        other.to_wandb(run)
    assert [*dict.fromkeys(scalars)] == logged == [0, 2]


def test_tensorboard(tmp_path: Path) -> None:
    model = net()
    stats = float8_stats(model, gemms=True)
    with stats.at(3):
        train(model)
    rows = {row.fqn: row for row in cast_rows(stats) if row.operand == "input"}
    gemm = next(row for row in stats.rows if isinstance(row, GemmStats))
    with SummaryWriter(str(tmp_path)) as writer:
        assert "to_tensorboard: layers='1' matches no c" in raised(
            ValueError, partial(stats.to_tensorboard, writer, layers="1")
        )
        stats.to_tensorboard(writer)
    assert stats.rows == []
    with stats.at(5):
        train(model)
    with SummaryWriter(str(tmp_path / "one")) as writer:
        stats.to_tensorboard(writer, layers="[2-9]")
    one = EventAccumulator(str(tmp_path / "one"))
    one.Reload()
    assert len(one.Tags()["scalars"]) == 3 * 6 + 3
    assert all("/2/" in tag for tag in one.Tags()["scalars"])
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert len(tags) == 6 * 6 + 6
    for fqn, row in rows.items():
        (event,) = found.Scalars(f"float8/input_for_output_grad_weight/{fqn}/sqnr")
        assert (event.step, event.value) == (3, pytest.approx(row.sqnr))
    (event,) = found.Scalars("float8/output/0/sqnr")
    assert event.value == pytest.approx(gemm.sqnr)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    model = net()
    stats = float8_stats(model)
    settings = wandb.Settings(silent=True, console="off", disable_git=True)
    run = wandb.init(mode="offline", dir=tmp_path, settings=settings)
    for step in range(2):
        with stats:
            train(model)
        sqnr = next(row.sqnr for row in stats.rows if row.fqn == "2")
        stats.to_wandb(run, layers=["2"])
        run.log({"loss": 1.0}, step=step)
    assert stats.rows == []
    summary = dict(run.summary)
    found = {name: value for name, value in summary.items() if name.startswith("float8/")}
    assert len(found) == 3 * 6
    assert found["float8/input_for_output_grad_weight/2/sqnr"] == sqnr
    run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_off_costs_no_operator(recipe: str) -> None:
    model = net(recipe)

    def ops() -> list[str]:
        with Watching() as watching:
            train(model)
        return watching.seen

    train(model)
    before = ops()
    with float8_stats(model, gemms=True):
        ops()
    with float8_stats(model, every=2).at(1):
        assert ops() == before
    assert ops() == before
