"""scripts/measure/gradient_sqnr.py: its figures, its table and its verdict."""

import pytest
from expecttest import assert_expected_inline
from ranks import RankPools

from scripts.common.blocks import read_block
from scripts.measure import gradient_sqnr
from scripts.measure.gradient_sqnr import WAYS, Found, checks, on_ranks, sqnr_table

GOOD: Found = {name: (30.5 if "float8" in name else 55.5, 60.0) for name in WAYS}
TWO = {k: each for k, each in GOOD.items() if not (WAYS[k].replicas or WAYS[k].nodes)}


def test_figures(ranks: RankPools) -> None:
    for world_size, expected in ((2, TWO), (4, GOOD)):
        found = ranks(world_size).run_same(on_ranks)
        assert found.keys() == expected.keys()
        assert all(check.holds for check in checks({world_size: found}))
        assert all(worst <= median < 70 for worst, median in found.values())
        assert found["float8, stochastic rounding"][1] < found["float8"][1] < found["bf16"][1]
        assert found["float8, error feedback"][1] < found["float8"][1]


def test_table_and_verdict() -> None:
    bad = TWO | {"float8": (29.9, 40.0), "bf16": (float("nan"), 60.0)}
    found = checks({2: bad, 4: GOOD})
    assert_expected_inline(
        "\n".join([sqnr_table({2: TWO, 4: GOOD}), *(c.sentence for c in found if not c.holds)]),
        """\
| gradients on the wire       | 2 ranks: worst | 2 ranks: median | 4 ranks: worst | 4 ranks: median |
| --------------------------- | -------------: | --------------: | -------------: | --------------: |
| bf16                        |           55.5 |            60.0 |           55.5 |            60.0 |
| bf16, HSDP                  |                |                 |           55.5 |            60.0 |
| bf16, 2 nodes               |                |                 |           55.5 |            60.0 |
| float8                      |           30.5 |            60.0 |           30.5 |            60.0 |
| float8, bf16 compute        |           30.5 |            60.0 |           30.5 |            60.0 |
| float8, HSDP                |                |                 |           30.5 |            60.0 |
| float8, 2 nodes             |                |                 |           30.5 |            60.0 |
| float8, error feedback      |           30.5 |            60.0 |           30.5 |            60.0 |
| float8, stochastic rounding |           30.5 |            60.0 |           30.5 |            60.0 |
bf16 on 2 ranks: nan dB, at least 55
float8 on 2 ranks: 29.9 dB, at least 30""",
    )


@pytest.mark.parametrize(("found", "status"), [(GOOD, 0), (TWO | {"float8": (29.0, 40.0)}, 1)])
def test_block_and_status(monkeypatch, documents, found: Found, status: int) -> None:
    monkeypatch.setattr(gradient_sqnr, "run_on_ranks", lambda ranks, task: [found])
    assert gradient_sqnr.main([]) == 0
    assert gradient_sqnr.main(["--assert", "--write"]) == status
    assert "| bf16 " in read_block(documents / "numerics.md", "sqnr by transport")
