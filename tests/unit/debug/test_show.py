"""show: the counts of a histogram, its text and its picture, and wrong calls."""

import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn

from fp8_dist import CastConfig, Float8Tensor, ScalingGranularity, cast_to_float8
from fp8_dist.debug import CapturedCast, show
from fp8_dist.debug.capturing import save_capture
from fp8_dist.debug.histogram import histogram
from fp8_dist.debug.plot import draw
from fp8_dist.scaling import Dense

ROWS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
E5M2 = CastConfig(target_dtype=torch.float8_e5m2)


def cast_of(high: torch.Tensor, config: CastConfig | None = None) -> CapturedCast:
    by_rows = config is ROWS
    made = cast_to_float8(high, config or CastConfig(), dim=-1 if by_rows else None)
    assert isinstance(made, Float8Tensor)
    others = (made.qdata, made.scales, made.scheme.key)
    return CapturedCast(7, 0, "layers.1.w2", "input", ("output",), 0, False, None, high, *others)


def saturating(high: torch.Tensor, scale: float) -> CapturedCast:
    """Cast by a scale of earlier steps."""
    qdata = (high / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    others = (high, qdata, (torch.tensor(scale),), Dense(qdata.dtype).key)
    return CapturedCast(7, 1, "layers.1.w2", "input", ("output",), 2, True, None, *others)


def wide(seed: int = 0) -> torch.Tensor:
    """Values over 40 octaves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, generator=generator)
    return x * torch.exp2(torch.randint(-36, 4, x.shape, generator=generator).float())


@pytest.mark.parametrize("config", [None, E5M2, ROWS], ids=["e4m3", "e5m2", "rows"])
def test_every_value_is_counted_in_its_octave(config: CastConfig | None) -> None:
    high = wide()
    high[3, 4:6] = 0
    cast = cast_of(high, config)
    found = histogram(cast)
    scale = cast.scale.expand(64, 32).double()
    expected: dict[int, list[int]] = {}
    columns = (high.double(), scale, cast.qdata.float())
    for value, one, byte in zip(*(each.flatten().tolist() for each in columns), strict=True):
        if value:
            magnitude = abs(value / one if config is ROWS else value)
            numbers = expected.setdefault(math.floor(math.log2(magnitude)), [0, 0])
            numbers[byte == 0] += 1
    assert {o.exponent: [o.kept, o.to_zero] for o in found.octaves if o.values} == expected
    assert found.values == 64 * 32 - 2
    assert found.unit == ("divided by the scale of its row" if config is ROWS else "of a value")
    assert any(octave.to_zero for octave in found.octaves)
    assert not any(octave.saturated for octave in found.octaves)
    exponents = [octave.exponent for octave in found.octaves]
    assert exponents == list(range(exponents[0], exponents[-1] + 1))


def test_what_saturates_is_counted() -> None:
    high = torch.tensor([[500.0, -470, 460, 448, 3, 0, math.nan, math.inf]])
    found = histogram(saturating(high, 1.0))
    assert [(o.exponent, o.saturated) for o in found.octaves if o.saturated] == [(8, 2)]
    assert found.values == 5


def test_the_text() -> None:
    high = torch.tensor([[900.0, -470, 300, 200, 140, 3, 2, 1.5, 1, 0, 2**-7, 2**-12, 2**-30]])
    rows = torch.tensor([[100.0, 50, 1e-5, 0], [1e-3, 5e-4, 1e-5, 1e-6]], dtype=torch.bfloat16)
    of_one, of_rows = show.describe(saturating(high, 1.0)), show.describe(cast_of(rows, ROWS))
    lines = of_one.splitlines()
    assert lines[:2] == ["layers.1.w2: input, for output", "  step 7, rank 1, call 2"]
    for line in (
        "  underflow   16.67 % of the non-zero values become zero",
        "  saturation  16.67 % are beyond the largest float8 number",
        f"          2^9    8.333 %  {20 * '!'}",
        f"          2^8   16.667 %  {20 * '#'}{20 * '!'}  <- 448: the largest float8 number",
        f"         2^-6{55 * ' '}<- 0.01562: the smallest normal one",
        f"        2^-10{55 * ' '}<- 0.0009766: this and less becomes zero",
        f"        2^-12    8.333 %  {20 * '.'}",
        f"  below 2^-16    8.333 %  {20 * '.'}",
    ):
        assert line in lines
    assert lines.count("  ...") == 3
    assert "  scale       0.2232 (2.231e-06 the smallest), dynamic, one per row\n" in of_rows
    assert "  magnitude divided by the scale of its row: # kept, . becomes zero" in of_rows
    assert of_rows.endswith(f"\n        2^-15   14.286 %  {20 * '.'}")


def test_zeros_and_what_is_not_finite() -> None:
    assert "no finite value but zeros" in show.describe(cast_of(torch.zeros(2, 16)))
    assert "no finite value but zeros" in show.describe(cast_of(torch.full((2, 16), math.nan)))
    high = torch.ones(2, 16)
    high[0, 0] = math.inf
    text = show.describe(cast_of(high))
    assert "3.125 % are NaN or infinite" in text
    assert "largest float8" not in text.partition("magnitude")[2]  # its scale is NaN
    rows = histogram(cast_of(high, ROWS))
    assert rows.values == 16  # those of the other row
    assert histogram(cast_of(torch.ones(0, 16))).values == 0


def test_the_picture_shows_what_becomes_of_values(tmp_path: Path) -> None:
    kept, zero, beyond = "#3b75af", "#d1495b", "#edae49"
    legend = 400  # pixels of a colour that are in any picture

    def large(cast: CapturedCast) -> set[str]:
        draw([cast], tmp_path / "x.png")
        pixels = (imread(tmp_path / "x.png")[..., :3] * 255).round().astype(np.uint8)
        flat = ["#" + bytes(pixel).hex() for pixel in pixels.reshape(-1, 3)]
        return {color for color in (kept, zero, beyond) if flat.count(color) > legend}

    assert large(cast_of(torch.linspace(1, 2, 32)[None])) == {kept}
    assert large(cast_of(wide())) == {kept, zero}
    assert large(saturating(torch.linspace(1, 4096, 99)[None], 1.0)) == {kept, beyond}
    assert large(cast_of(torch.zeros(2, 16))) == set()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    casts, plot = [cast_of(wide()), cast_of(wide(1), ROWS)], tmp_path / "out.png"
    files = []
    for cast, name in zip(casts, "ab", strict=True):
        (tmp_path / name).mkdir()
        files.append(str(save_capture(cast, tmp_path / name, "torch")))
    monkeypatch.setattr(sys, "argv", ["show", *files, "--plot", str(plot)])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("fp8_dist.debug.show", run_name="__main__")
    assert not done.value.code
    texts = "\n\n".join(show.describe(cast) for cast in casts)
    assert capsys.readouterr().out == f"{texts}\n\n{plot}: written\n"
    assert plot.stat().st_size


def test_wrong_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "model.pt"
    torch.save(nn.Linear(2, 2).state_dict(), foreign)
    good = save_capture(cast_of(wide()), tmp_path, "torch")
    for args, message in [
        ([foreign], f"{foreign} holds no cast that fp8_dist.debug.capture saved"),
        ([tmp_path / "none.pt"], "No such file or directory"),
        ([good, "--plot", tmp_path / "x.txt2"], "Format 'txt2' is not supported"),
    ]:
        assert show.main([str(arg) for arg in args]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m fp8_dist.debug.show: error: ")
        assert message in error
    monkeypatch.setattr(show, "find_spec", lambda name: None)
    assert show.main([str(good), "--plot", "x.png"]) == 2
    assert '--plot needs matplotlib: pip install "fp8-dist[report]"' in capsys.readouterr().err
