"""scripts/measure/communication.py: its rows, and what it says of rows that break promises."""

import pytest
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh

from scripts.common.blocks import read_block
from scripts.measure import communication
from scripts.measure.communication import (
    BOTH,
    DELAYED,
    FOLDED,
    FOLDED_RANK,
    FSDP,
    MESHES,
    OURS,
    OURS_PRECOMPUTED,
    OURS_RANK,
    TORCHAO,
    TORCHAO_PRECOMPUTED,
    TP,
    VARIANTS,
    Row,
    broken_promises,
    rows_of,
    rows_table,
    variants,
)


def our_rows(name: str) -> list[Row]:
    """Runs on every rank of a mesh."""
    dp, tp = MESHES[name]
    ours = [variant for variant in variants(name) if variant in VARIANTS]
    return rows_of(name, ours, device_mesh(dp=dp, tp=tp))


def cells(text: str) -> set[tuple[str, ...]]:
    """The lines of a table without the width of its columns."""
    lines = (tuple(line.split()) for line in text.splitlines())
    return {line for line in lines if line[:1] == ("|",) and not line[1].startswith("--")}


def test_our_rows_are_those_of_the_document(ranks: RankPools) -> None:
    rows: list[Row] = []
    for name, (dp, tp) in MESHES.items():
        by_rank = ranks(dp * tp).run(our_rows, name)
        assert by_rank == [by_rank[0]] * (dp * tp)
        rows += by_rank[0]
    assert list(broken_promises(rows)) == []
    assert len(rows) == 22
    assert cells(rows_table(rows)) <= cells(communication.PAGE.read_text())


def row(mesh: str, variant: str, all_reduces: int, precompute: int, amax: int) -> Row:
    counts = {"all_gather": 5, "reduce_scatter": 5, "all_reduce": all_reduces}
    sizes = {"all_gather": 1000, "reduce_scatter": 2000, "all_reduce": 4 * all_reduces}
    return Row(mesh, variant, counts, sizes, 500, precompute, amax, amax)


def test_promises_that_are_broken_are_named() -> None:
    ours, theirs = OURS_PRECOMPUTED.name, TORCHAO_PRECOMPUTED.name
    rows = {
        (r.mesh, r.variant): r
        for r in (
            row(FSDP, ours, all_reduces=1, precompute=1, amax=0),
            row(TP, ours, all_reduces=45, precompute=1, amax=44),
            row(TP, OURS_RANK.name, all_reduces=17, precompute=1, amax=16),
            row(BOTH, ours, all_reduces=45, precompute=1, amax=44),
            row(BOTH, OURS_RANK.name, all_reduces=17, precompute=1, amax=16),
            row(FSDP, OURS.name, all_reduces=1, precompute=0, amax=4),
            row(TP, OURS.name, all_reduces=60, precompute=0, amax=60),
            row(BOTH, OURS.name, all_reduces=60, precompute=0, amax=60),
            row(FSDP, FOLDED.name, all_reduces=0, precompute=0, amax=0),
            row(TP, FOLDED.name, all_reduces=29, precompute=1, amax=28),
            row(BOTH, FOLDED.name, all_reduces=29, precompute=1, amax=28),
            row(TP, FOLDED_RANK.name, all_reduces=1, precompute=1, amax=0),
            row(BOTH, FOLDED_RANK.name, all_reduces=1, precompute=1, amax=0),
            row(FSDP, DELAYED.name, all_reduces=1, precompute=1, amax=0),
            row(TP, DELAYED.name, all_reduces=1, precompute=1, amax=0),
            row(BOTH, DELAYED.name, all_reduces=1, precompute=1, amax=0),
            row(FSDP, theirs, all_reduces=1, precompute=1, amax=0),
            row(TP, TORCHAO.name, all_reduces=100, precompute=0, amax=100),
            row(BOTH, theirs, all_reduces=46, precompute=2, amax=44),
        )
    }
    assert list(broken_promises(list(rows.values()))) == []
    gathers_more = rows[TP, ours]._replace(sizes=rows[TP, ours].sizes | {"all_gather": 2000})
    worse = {
        (FSDP, ours): row(FSDP, ours, all_reduces=2, precompute=2, amax=0),
        (TP, ours): gathers_more,
        (TP, OURS_RANK.name): row(TP, OURS_RANK.name, all_reduces=21, precompute=1, amax=20),
        (BOTH, ours): row(BOTH, ours, all_reduces=49, precompute=1, amax=48),
        (FSDP, FOLDED.name): row(FSDP, FOLDED.name, all_reduces=1, precompute=1, amax=0),
        (TP, FOLDED.name): row(TP, FOLDED.name, all_reduces=45, precompute=1, amax=44),
        (TP, DELAYED.name): row(TP, DELAYED.name, all_reduces=5, precompute=1, amax=4),
        (BOTH, DELAYED.name): row(BOTH, DELAYED.name, all_reduces=2, precompute=2, amax=0),
    }
    assert_expected_inline(
        "\n".join(broken_promises([*(rows | worse).values()])),
        """\
FSDP2 x2, fp8_dist + precompute: 2 collectives of all_reduce, above the 1 of torchao + precompute
FSDP2 x2, fp8_dist + precompute: 8 bytes of all_reduce, above the 4 of torchao + precompute
TP x2 + SP, fp8_dist + precompute: 2,000 bytes of all_gather, above the 1,000 of torchao
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: 49 collectives of all_reduce, above the 46 of torchao + precompute
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: 196 bytes of all_reduce, above the 184 of torchao + precompute
FSDP2 2 x TP 2 + SP, fp8_dist delayed + sync: more than one all-reduce per sync
FSDP2 x2, fp8_dist + precompute: 2 all-reduces, 2 of them precompute's, where 1 and 1 are allowed
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: 49 all-reduces, 1 of them precompute's, where 45 and 1 are allowed
FSDP2 x2, fp8_dist rowwise_folded + precompute: 1 all-reduces, not 0
TP x2 + SP, fp8_dist + precompute, amax_scope="rank": 5 amax all-reduces per layer, not 4
TP x2 + SP, fp8_dist rowwise_folded + precompute: 11 amax all-reduces per layer, not 7
TP x2 + SP, fp8_dist delayed + sync: 1 amax all-reduces per layer, not 0
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: 12 amax all-reduces per layer, not 11""",
    )


@pytest.mark.parametrize(("all_reduces", "status"), [(0, 0), (1, 1)])
def test_status_and_block(monkeypatch, documents, all_reduces, status) -> None:
    def run_on_ranks(world_size, function, name, chosen):
        counted = {v: row(name, v.name, 1, int(v.update), 0) for v in chosen}
        counted[FOLDED] = row(name, FOLDED.name, all_reduces, 0, 0)
        return [[*counted.values()]] * world_size

    page = documents / "communication.md"
    monkeypatch.setattr(communication, "PAGE", page)
    monkeypatch.setattr(communication, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(communication.candidates, "torchao", object())
    assert communication.main([]) == 0
    assert communication.main(["--assert", "--write"]) == status
    assert "5 (1,000 B)" in read_block(page, "rows")
