"""A short soak; and that it notices what grows."""

import dataclasses

from ranks import RankPool

from scripts.measure.soak import Usage, checks_of, soak, soak_table, tables

# Resident memory moves by itself in so few steps.
BROKEN_BY_NOISE = "resident memory"


def test_nothing_grows() -> None:
    pool = RankPool(2)  # of its own: other tests leave collectives that nobody has waited for
    try:
        results = pool.run(soak, 120, False, ["tensorwise", "delayed"])
    finally:
        pool.close()
    for found, kept in results:
        assert len(found) == 12
        assert soak_table(found).count("\n") == 13
        checks = checks_of(found, kept)
        assert len(checks) == 6
        broken = [c.sentence for c in checks if not c.holds and BROKEN_BY_NOISE not in c.sentence]
        assert broken == []


USAGE = Usage(rss=400, tensors=100, entries=20, works=0, graphs=2)


def broken_by(late: Usage, kept: dict[str, tuple[int, int]]) -> list[str]:
    checks = checks_of([("tensorwise", "dp=2", USAGE, late)], kept)
    return [check.sentence for check in checks if not check.holds]


def test_what_a_soak_notices() -> None:
    assert broken_by(USAGE, {"table": (3, 3)}) == []
    found = [
        broken_by(dataclasses.replace(USAGE, **{field: value}), {})
        for field, value in {
            "rss": 500,
            "tensors": 101,
            "entries": 21,
            "graphs": 3,
            "works": 1,
        }.items()
    ]
    found.append(broken_by(USAGE, {"fp8_dist.warn._warned": (3, 4)}))
    assert [sentences for (sentences,) in found] == [
        "no growth of resident memory in a turn: tensorwise on dp=2",
        "no growth of live tensors in a turn: tensorwise on dp=2",
        "no growth of entries of tables in a turn: tensorwise on dp=2",
        "no growth of graphs in a turn: tensorwise on dp=2",
        "every collective is waited for: tensorwise on dp=2",
        "no table grows in the second round: fp8_dist.warn._warned 3 -> 4",
    ]


def test_tables_of_modules_classes_and_caches_are_found() -> None:
    found = tables()
    assert "fp8_dist.warn._warned" in found
    assert "fp8_dist.convert._reasons" in found
    assert "fp8_dist.linear.operands.plan_operand (cache)" in found
