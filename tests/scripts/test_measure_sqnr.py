"""scripts/measure/sqnr.py: its tables, its verdict, and the simulated folds against the library."""

import pytest

from scripts.common.blocks import read_block
from scripts.common.candidates import OURS
from scripts.common.metrics import sqnr
from scripts.measure import block_ways
from scripts.measure import sqnr as script
from scripts.measure.block_ways import AS_IT_IS, LINES, ONE_COPY, SQUARE, TWO_CASTS, block_figures
from scripts.measure.folds import FIGURES, WAYS, fold_figures, gradients
from scripts.measure.operands import (
    OUTPUT_CHANNELS,
    TOKENS,
    WEIGHT_ROWS,
    ZERO_ROWS,
    Place,
    record,
    recorded_linears,
    stress_cases,
)
from scripts.measure.sqnr import GEMMS, RECIPES, VARIANTS, WEIGHT_CASES, configs, products

CASES = stress_cases(1, m=96, k=64, n=80)


@pytest.fixture(scope="module")
def figures() -> script.Figures:
    """Of a training run of two steps."""
    return {place: script.measure(operands) for place, operands in record([1, 2], 0).items()}


def test_every_linear_layer_step_and_recipe_is_measured(figures):
    expected = [Place(linear, step) for step in (1, 2) for linear in recorded_linears()]
    assert list(figures) == expected
    assert len(expected) == 2 * 3 * 7
    assert set(RECIPES) == set(OURS) - {"delayed"}
    for row in figures.values():
        assert set(row) == {*RECIPES, *VARIANTS}
        for by_gemm in row.values():
            assert list(by_gemm) == list(GEMMS)
            assert all(value > 20 for value in by_gemm.values())


def test_verdict(figures):
    assert [check.holds for check in script.checks(figures, {})] == [True]
    place = Place("layers.2.attention.wo", 2)
    for gemm in GEMMS:
        for behind, holds in ((0.09, True), (0.11, False), (float("nan"), False)):
            row = figures[place]
            doctored = row["rowwise_folded"] | {gemm: row["rowwise"][gemm] - behind}
            (check,) = script.checks(figures | {place: row | {"rowwise_folded": doctored}}, {})
            assert check.holds is holds
            assert check.sentence.endswith(f"in {place.linear}, step 2, {gemm}")


@pytest.mark.parametrize(
    ("blocks", "reference"), [("mxfp8", TWO_CASTS), ("mxfp8, floor", AS_IT_IS)]
)
def test_verdict_on_casts_in_blocks(figures, blocks, reference):
    ways = block_figures(CASES["normal"], blocks)
    place = Place("a", 1)
    for behind, holds in ((0.09, True), (0.11, False), (float("nan"), False)):
        doctored = ways[ONE_COPY] | {"grad_weight": ways[reference]["grad_weight"] - behind}
        found = script.checks(figures, {blocks: {place: ways | {ONE_COPY: doctored}}})
        assert [check.holds for check in found] == [True, holds]
        assert found[1].sentence.startswith(f"{blocks}: {ONE_COPY} is at most 0.1 dB behind")


def test_blocks_and_status(monkeypatch, capsys, documents):
    """The committed document has the figures of the made-up operands."""
    page = documents / "sqnr.md"
    names = ("folds", "blockwise ways", "mxfp8 ways")
    committed = [read_block(page, name) for name in names]
    monkeypatch.setattr(script, "record", lambda at, seed: {Place("a", 1): CASES["normal"]})
    assert script.main(["--at", "1", "--write", "--assert"]) == 0
    for name, before in zip(names, committed, strict=True):
        made_up = [
            [line for line in text.splitlines() if line[1:].partition("|")[0].strip() in CASES]
            for text in (before, read_block(page, name))
        ]
        assert len(made_up[0]) == len(CASES if name == "folds" else set(CASES) - WEIGHT_CASES)
        assert made_up[0] == made_up[1]
    assert "| `rowwise_folded`     | 1 " in read_block(page, "recipes")
    worse = configs() | {"rowwise_folded": configs()["rowwise, e5m2 gradients"]}
    monkeypatch.setattr(script, "configs", lambda: worse)
    monkeypatch.setattr(script, "stress_cases", lambda seed: {})
    assert script.main(["--at", "1"]) == 0
    assert script.main(["--at", "1", "--assert"]) == 1
    assert "BROKEN: rowwise_folded is at most 0.1 dB behind" in capsys.readouterr().out


def test_refused_options(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        script.main(["--at", "0"])
    assert "0 is not positive" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES)
def test_ours_is_what_the_library_does(case):
    operands = CASES[case]
    folded = products(operands, configs()["rowwise_folded"])
    simulated = gradients(operands)["ours"]
    for gemm, expected in zip(GEMMS[1:], simulated, strict=True):
        assert sqnr(expected, folded[gemm]) > 100
    rowwise = products(operands, configs()["rowwise"])
    for gemm, expected in zip(GEMMS[1:], gradients(operands)["rowwise"], strict=True):
        assert sqnr(expected, rowwise[gemm]) > 100


def test_the_ways_differ_where_the_document_says_so():
    figure = "worst rows of grad_weight"
    for case, lost in ((ZERO_ROWS, {"chained"}), (OUTPUT_CHANNELS, {"ours", "chained"})):
        by_way = fold_figures(stress_cases(0)[case])
        assert all(list(values) == list(FIGURES) for values in by_way.values())
        assert {way for way in WAYS if by_way[way][figure] < 5} == lost


@pytest.mark.parametrize("recipe", block_ways.RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_one_copy_in_blocks_is_what_the_library_does(case, recipe):
    operands = CASES[case]
    simulated = block_ways.products(operands, *block_ways.RECIPES[recipe])[ONE_COPY]
    for gemm, found in products(operands, configs()[recipe]).items():
        assert sqnr(simulated[gemm], found) > 100


@pytest.mark.parametrize(
    ("case", "figure", "lost"),
    [
        (OUTPUT_CHANNELS, "worst rows of grad_weight", {ONE_COPY, AS_IT_IS, SQUARE, LINES}),
        (TOKENS, "worst tokens of output", {SQUARE}),
        (WEIGHT_ROWS, "worst columns of output", {TWO_CASTS, ONE_COPY, AS_IT_IS, SQUARE}),
    ],
)
def test_the_ways_to_make_blocks_differ_where_the_document_says_so(case, figure, lost):
    for recipe in block_ways.RECIPES:
        by_way = block_figures(stress_cases(0)[case], recipe)
        assert {way for way, figures in by_way.items() if figures[figure] < 10} == lost
