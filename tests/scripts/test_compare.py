"""The comparison of two runs: losses, ratios, communication, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from scripts.train import compare

# The run of a model whose layer "a" is float8, beside a norm, and whose head is not.
CONFIG = {
    "float8_layers": ["layer.a"],
    "high_precision_gather": {"layer.norm.weight": 8, "head.weight": 100},
}


def rows(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of comm.json, one collective each, from bytes by "op dtype [module]"."""
    made = []
    for kind, size in sizes.items():
        op, dtype, module = [*kind.split(), ""][:3]
        itemsize = 1 if "8" in dtype else 2 if "16" in dtype else 4
        shape = {"count": 1, "elements": size // itemsize, "bytes": size, "in_mixed_gather": False}
        float8 = {"float8_bytes": size if "float8" in dtype else 0}
        made.append({"op": op, "axis": "dp", "dtype": dtype, "module": module} | shape | float8)
    return made


def write_run(folder: Path, recipe: str, losses: list[float], sizes: dict[str, int]) -> Path:
    """Writes the files of a run; sizes: see `rows`."""
    folder.mkdir()
    config = CONFIG | {"recipe": recipe, "steps": len(losses)}
    if recipe == "bf16":
        config["float8_layers"] = []
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        {"step": step, "loss": loss, "tokens_per_second": 1000.0, "grad_norm": 1.0}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "comm.json").write_text(json.dumps(rows(sizes)))
    return folder


def test_comparison_of_good_runs(tmp_path, capsys):
    losses = [5.5 - 0.1 * step for step in range(40)]
    bf16 = write_run(
        tmp_path / "a", "bf16", losses, {"all_gather bfloat16": 3000, "all_reduce bfloat16": 1000}
    )
    float8 = write_run(
        tmp_path / "b",
        "tensorwise",
        [5.5, *(x * 1.004 for x in losses[1:])],
        {"all_gather float8_e4m3fn": 1500, "all_reduce bfloat16": 700},
    )
    assert compare.main([str(bf16), str(float8), "--out", str(tmp_path), "--assert"]) == 0
    shown = capsys.readouterr().out.partition("written:")[0].strip("\n")
    assert_expected_inline(
        shown,
        """\
|            | first loss | mean of last 20 | bytes per step | of it float8 | tokens/s |
| ---------- | ---------: | --------------: | -------------: | -----------: | -------: |
| bf16       |     5.5000 |          2.5500 |          4,000 |            0 |    1,000 |
| tensorwise |     5.5000 |          2.5602 |          2,200 |        1,500 |    1,000 |
loss of tensorwise against bf16: +0.40%
bytes of all-gathers, unconverted layers included, tensorwise / bf16: 0.500
bytes of all collectives, gradients and sums included, tensorwise / bf16: 0.550
verdict: within 1% of bf16, and both below 70% of their first loss; every gather for a float8 layer is float8""",
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (3.06, "the losses differ by more than 1%"),
        (float("nan"), "the losses differ by more than 1%"),
        (4.5, "tensorwise did not get below 70% of its first loss"),
    ],
)
def test_comparison_of_a_bad_run(tmp_path, capsys, last, problem):
    bf16 = write_run(tmp_path / "a", "bf16", [5.5] + [3.0] * 20, {"all_gather bfloat16": 4000})
    float8 = write_run(
        tmp_path / "b", "tensorwise", [5.5] + [last] * 20, {"all_gather float8_e4m3fn": 2200}
    )
    arguments = [str(bf16), str(float8), "--out", str(tmp_path)]
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--assert"]) == 1
    assert problem in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ({}, []),
        (
            {"all_reduce float32": 4},
            ["bytes of all collectives, gradients and sums included, tensorwise / bf16: 1.000"],
        ),
    ],
)
def test_a_ratio_to_nothing_is_left_out(tmp_path, capsys, sizes, shown):
    runs = [
        write_run(tmp_path / name, name, [5.5] + [3.0] * 20, sizes)
        for name in ("bf16", "tensorwise")
    ]
    assert compare.main([*map(str, runs), "--out", str(tmp_path), "--assert"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[:5] == "bytes"] == shown


def test_float8_that_is_not_communicated_is_a_problem(tmp_path, capsys):
    bf16 = write_run(tmp_path / "a", "bf16", [5.5] + [3.0] * 20, {"all_gather bfloat16": 4000})
    run = write_run(tmp_path / "b", "tensorwise", [5.5] + [3.0] * 20, {"all_gather bfloat16": 80})
    assert compare.main([str(bf16), str(run), "--out", str(tmp_path), "--assert"]) == 1
    assert "tensorwise communicated nothing in float8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "size", "allowed"),
    [
        ("all_gather bfloat16 head", 10**6, True),
        ("all_gather bfloat16", 2 * 108, True),
        ("all_gather bfloat16", 2 * 109, False),
        ("all_gather bfloat16 layer", 2 * 8, True),
        ("all_gather bfloat16 layer", 2 * 9, False),
        ("all_gather bfloat16 layer.a", 2, False),
        ("all_gather bfloat16 layer.ab", 2, True),
        ("all_gather float8_e5m2 layer.a", 10**6, True),
        ("reduce_scatter bfloat16 layer.a", 10**6, True),
    ],
)
def test_gathers_that_should_have_been_float8(kind, size, allowed):
    assert (compare.unexpected_gathers(rows({kind: size}), CONFIG) == []) == allowed


def test_the_rest_of_a_mixed_gather_is_counted_with_it():
    mixed = rows({"all_gather float8_e4m3fn layer": 64, "all_gather bfloat16 layer": 2 * 16})
    mixed[0]["count"], mixed[1]["count"] = 2, 0
    assert compare.unexpected_gathers(mixed, CONFIG) == []
    mixed[0]["count"] = 1
    assert_expected_inline(
        "\n".join(compare.unexpected_gathers(mixed, CONFIG)),
        """layer gathered 16 elements in high precision on dp, where 8 are not float8's""",
    )


def test_comparison_of_an_unfinished_run(tmp_path):
    with pytest.raises(SystemExit, match="is not a finished run of"):
        compare.read_run(tmp_path)


@pytest.mark.parametrize(
    ("end", "message"),
    [(-1, "metrics.jsonl holds 1 of 2 steps"), (-5, "is not a finished run of")],
)
def test_comparison_of_a_run_that_was_cut_off(tmp_path, end, message):
    run = write_run(tmp_path / "a", "bf16", [5.5, 5.4], {})
    text = (run / "metrics.jsonl").read_text()
    first_line = text[: text.index("\n") + 1]
    (run / "metrics.jsonl").write_text(first_line if end == -1 else text[:end])
    with pytest.raises(SystemExit, match=re.escape(message)):
        compare.read_run(run)


def test_comparison_of_a_run_with_itself(tmp_path, capsys):
    run = write_run(tmp_path / "a", "bf16", [5.5, 5.4], {})
    with pytest.raises(SystemExit):
        compare.main([str(run), str(run)])
    assert "compare different recipes" in capsys.readouterr().err
