"""scripts/measure_sqnr.py: its tables, its verdict, its page, and its folds against the library."""

import json

import measure_sqnr
import pytest
import torch
from measure_sqnr import RECIPES, REPORT, broken_promises, configs, main, products
from sqnr_folds import FIGURES, WAYS, exact, fold_figures, gradients, sqnr
from sqnr_page import GEMMS, VARIANTS
from sqnr_tensors import OUTPUT_CHANNELS, ZERO_ROWS, Operands, Place, recorded_linears, stress_cases

from fp8_dist import Float8LinearRecipeName

CASES = stress_cases(1, m=96, k=64, n=80)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict]:
    """The status and the figures of a run of two steps."""
    path = tmp_path_factory.mktemp("sqnr") / "figures.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_sqnr, "stress_cases", lambda seed: CASES)
        status = main(["--at", "1", "2", "--full", "--assert", "--json", str(path)])
    return status, json.loads(path.read_text())


def figures_of(run: tuple[int, dict]) -> dict[Place, dict[str, dict[str, float]]]:
    return {Place(row["linear"], row["step"]): row["sqnr"] for row in run[1]["recorded"]}


def test_every_linear_layer_step_and_recipe_is_measured(run):
    figures = figures_of(run)
    expected = [Place(linear, step) for step in (1, 2) for linear in recorded_linears()]
    assert list(figures) == expected
    assert len(expected) == 2 * 3 * 7
    assert set(RECIPES) == {recipe.value for recipe in Float8LinearRecipeName} - {"delayed"}
    for row in figures.values():
        assert set(row) == {*RECIPES, *VARIANTS}
        for by_gemm in row.values():
            assert list(by_gemm) == list(GEMMS)
            assert all(value > 20 for value in by_gemm.values())
    for case in (*(row["gradients"] for row in run[1]["recorded"]), *run[1]["stressed"].values()):
        assert list(case) == list(WAYS)
        assert all(list(values) == list(FIGURES) for values in case.values())


def test_verdict(run):
    status, _ = run
    assert status == 0
    figures = figures_of(run)
    assert list(broken_promises(figures)) == []
    place = Place("layers.2.attention.wo", 2)
    for gemm in GEMMS:
        for behind, broken in ((0.09, 0), (0.11, 1), (float("nan"), 1)):
            row = figures[place]
            doctored = row["rowwise_folded"] | {gemm: row["rowwise"][gemm] - behind}
            sentences = list(broken_promises(figures | {place: row | {"rowwise_folded": doctored}}))
            assert len(sentences) == broken
            assert all(f"{place.linear}, step 2, {gemm}" in sentence for sentence in sentences)


def one_layer() -> dict[Place, Operands]:
    """In the place of a training run."""
    return {Place("a", 1): CASES["normal"]}


def test_status_is_that_of_the_verdict(monkeypatch, capsys):
    monkeypatch.setattr(measure_sqnr, "record", lambda steps, seed: one_layer())
    monkeypatch.setattr(measure_sqnr, "stress_cases", lambda seed: {})
    e5m2 = configs()["rowwise, e5m2 gradients"]
    worse = configs() | {"rowwise_folded": e5m2}
    assert main(["--at", "1", "--assert"]) == 0
    monkeypatch.setattr(measure_sqnr, "configs", lambda: worse)
    assert main(["--at", "1"]) == 0
    assert main(["--at", "1", "--assert"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("broken: a, step 1, grad_") for line in errors) == 2


@pytest.mark.parametrize("options", ["--at 0", "--seed -1"])
def test_refused_options(options, capsys):
    with pytest.raises(SystemExit) as error:
        main(options.split())
    assert error.value.code == 2
    assert "steps count from 1" in capsys.readouterr().err


def test_page(monkeypatch, tmp_path):
    """docs/sqnr.md has the form of a page written now, and its figures of the made-up operands."""
    page = tmp_path / "docs" / "sqnr.md"
    monkeypatch.setattr(measure_sqnr, "record", lambda steps, seed: one_layer())
    monkeypatch.setattr(measure_sqnr, "REPORT", page)
    main(["--at", "1", "--write"])
    written, committed = page.read_text(), REPORT.read_text()
    assert "measure_sqnr.py --at 1 --seed 0 --write" in written
    assert "measure_sqnr.py --at 5 300 --seed 0 --write" in committed
    headings = [
        [line for line in text.splitlines() if line.startswith("#")]
        for text in (written, committed)
    ]
    assert headings[0] == headings[1]
    made_up = [
        [line for line in text.splitlines() if line.startswith(tuple(f"| {c} " for c in CASES))]
        for text in (written, committed)
    ]
    assert len(made_up[0]) == len(CASES)
    assert made_up[0] == made_up[1]


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


def test_the_ways_differ_where_the_page_says_so():
    figure = "worst rows of grad_weight"
    for case, lost in ((ZERO_ROWS, {"chained"}), (OUTPUT_CHANNELS, {"ours", "chained"})):
        by_way = fold_figures(stress_cases(0)[case])
        assert {way for way in WAYS if by_way[way][figure] < 5} == lost


def test_sqnr_of_a_known_error():
    operands = Operands(torch.eye(4), torch.eye(4), torch.eye(4))
    output, *_ = exact(operands)
    assert sqnr(output, output * 1.01) == pytest.approx(40)
    assert sqnr(output, output) == float("inf")
