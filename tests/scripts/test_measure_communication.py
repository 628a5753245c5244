"""scripts/measure/communication.py: its rows, and what it says of rows that break promises."""

import pytest
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh

from scripts.common.blocks import DOCS, read_block
from scripts.measure import communication
from scripts.measure.communication import (
    BLOCKWISE,
    BOTH,
    DELAYED,
    FLOAT8_GRADIENTS,
    FOLDED,
    FOLDED_RANK,
    FSDP,
    MESHES,
    MXFP8,
    OURS,
    OURS_PRECOMPUTED,
    OURS_RANK,
    TORCHAO,
    TORCHAO_PRECOMPUTED,
    TP,
    VARIANTS,
    Row,
    Variant,
    checks,
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
    assert all(check.holds for check in checks(rows))
    assert len(rows) == 30
    assert cells(rows_table(rows)) <= cells((DOCS / "communication.md").read_text())


def row(mesh: str, variant: Variant, *, all_reduces: int, precompute: int, amax: int) -> Row:
    counts = {"all_gather": 5, "reduce_scatter": 5, "all_to_all": 0, "all_reduce": all_reduces}
    sizes = dict.fromkeys(counts, 0) | {"all_gather": 1000, "all_reduce": 4 * all_reduces}
    sizes["reduce_scatter"] = 2000
    if variant is FLOAT8_GRADIENTS:
        counts |= {"reduce_scatter": 0, "all_to_all": 5}
        sizes |= {"reduce_scatter": 0, "all_to_all": 1010}
    return Row(mesh, variant.name, counts, sizes, 500, precompute, amax, amax)


# (all-reduces, those of precompute, those of amaxes).
COUNTS = {
    FSDP: {
        OURS_PRECOMPUTED: (1, 1, 0),
        FLOAT8_GRADIENTS: (1, 1, 0),
        OURS: (1, 0, 4),
        FOLDED: (0, 0, 0),
        DELAYED: (1, 1, 0),
        BLOCKWISE: (1, 1, 0),
        MXFP8: (0, 0, 0),
        TORCHAO_PRECOMPUTED: (1, 1, 0),
    },
    TP: {
        OURS_PRECOMPUTED: (33, 1, 32),
        OURS_RANK: (17, 1, 16),
        OURS: (60, 0, 60),
        FOLDED: (29, 1, 28),
        FOLDED_RANK: (1, 1, 0),
        DELAYED: (1, 1, 0),
        BLOCKWISE: (29, 1, 28),
        MXFP8: (1, 1, 0),
        TORCHAO: (100, 0, 100),
    },
}
COUNTS[BOTH] = COUNTS[TP] | {TORCHAO_PRECOMPUTED: (46, 2, 44)}
GOOD = {
    (mesh, variant): row(mesh, variant, all_reduces=all_reduces, precompute=precompute, amax=amax)
    for mesh, by_variant in COUNTS.items()
    for variant, (all_reduces, precompute, amax) in by_variant.items()
}


def test_promises_that_are_broken_are_named() -> None:
    assert all(check.holds for check in checks(list(GOOD.values())))

    def worse(mesh: str, variant: Variant, more: int, precompute: int = 1) -> Row:
        counts = COUNTS[mesh][variant]
        amax = counts[2] + more
        return row(mesh, variant, all_reduces=counts[0] + more, precompute=precompute, amax=amax)

    gathers_more = GOOD[TP, OURS_PRECOMPUTED]
    gathers_more = gathers_more._replace(sizes=gathers_more.sizes | {"all_gather": 2000})
    sends_more = GOOD[FSDP, FLOAT8_GRADIENTS]
    sends_more = sends_more._replace(sizes=sends_more.sizes | {"all_to_all": 1050})
    changed = {
        (FSDP, FLOAT8_GRADIENTS): sends_more,
        (FSDP, OURS_PRECOMPUTED): worse(FSDP, OURS_PRECOMPUTED, 1, 2),
        (TP, OURS_PRECOMPUTED): gathers_more,
        (TP, OURS_RANK): worse(TP, OURS_RANK, 4),
        (BOTH, OURS_PRECOMPUTED): worse(BOTH, OURS_PRECOMPUTED, 16),
        (FSDP, FOLDED): worse(FSDP, FOLDED, 1),
        (TP, FOLDED): worse(TP, FOLDED, 16),
        (FSDP, MXFP8): worse(FSDP, MXFP8, 1),
        (TP, BLOCKWISE): worse(TP, BLOCKWISE, 16),
        (TP, MXFP8): worse(TP, MXFP8, 4, 2),
        (TP, DELAYED): worse(TP, DELAYED, 4),
        (BOTH, DELAYED): worse(BOTH, DELAYED, 0, 2),
    }
    broken = [check for check in checks(list((GOOD | changed).values())) if not check.holds]
    assert_expected_inline(
        "\n".join(check.sentence for check in broken),
        """\
FSDP2 x2, fp8_dist + precompute: no more collectives or bytes of any kind than torchao + precompute
TP x2 + SP, fp8_dist + precompute: no more collectives or bytes of any kind than torchao
TP x2 + SP, fp8_dist mxfp8 + precompute: at most one all-reduce per precompute
TP x2 + SP, fp8_dist + precompute, amax_scope="rank": at most 4 amax all-reduces per layer
TP x2 + SP, fp8_dist rowwise_folded + precompute: at most 7 amax all-reduces per layer
TP x2 + SP, fp8_dist delayed + sync: at most 0 amax all-reduces per layer
TP x2 + SP, fp8_dist blockwise + precompute: at most 7 amax all-reduces per layer
TP x2 + SP, fp8_dist mxfp8 + precompute: at most 0 amax all-reduces per layer
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: no more collectives or bytes of any kind than torchao + precompute
FSDP2 2 x TP 2 + SP, fp8_dist delayed + sync: at most one all-reduce per sync
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: at most 8 amax all-reduces per layer
FSDP2 x2, fp8_dist + precompute: at most 1 all-reduces, one of them precompute's
FSDP2 2 x TP 2 + SP, fp8_dist + precompute: at most 33 all-reduces, one of them precompute's
FSDP2 x2, fp8_dist rowwise_folded + precompute: no all-reduce
FSDP2 x2, fp8_dist mxfp8 + precompute: no all-reduce
FSDP2 x2, fp8_dist + precompute, float8 gradients: gradients take 0.525 of bf16's bytes, at most 0.52""",
    )


@pytest.mark.parametrize(("all_reduces", "status"), [(0, 0), (1, 1)])
def test_status_and_block(monkeypatch, documents, all_reduces, status) -> None:
    def run_on_ranks(world_size, function, name, chosen, threads):
        counted = {v: row(name, v, all_reduces=1, precompute=v.update, amax=0) for v in chosen}
        for v in (FOLDED, MXFP8):
            counted[v] = row(name, v, all_reduces=all_reduces, precompute=0, amax=0)
        return [[*counted.values()]] * world_size

    monkeypatch.setattr(communication, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(communication.candidates, "torchao", object())
    assert communication.main([]) == 0
    assert communication.main(["--assert", "--write"]) == status
    assert "5 (1,000 B)" in read_block(documents / "communication.md", "rows")
