"""``comm_audit(gpus_per_node=...)``: the bytes within and between nodes, in a fake world."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from fp8_dist.debug import CommRow, comm_audit
from fp8_dist.debug.collectives import Collective
from fp8_dist.tensor import Float8Tensor
from scripts.plan.world import fake_world

funcol = torch.ops._c10d_functional
WORLD = 8
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, scope="module")
def rank_0_of_8() -> Iterator[None]:
    with fake_world(WORLD):
        yield


def sent(rows: Sequence[CommRow]) -> list[tuple[int, int]]:
    return [(row.bytes_within, row.bytes_between) for row in rows]


def kinds(gpus_per_node: int | None) -> str:
    """Collectives on all ranks, with buffers of 320 bytes."""
    with comm_audit(gpus_per_node=gpus_per_node) as audit:
        dist.all_gather([torch.empty(10) for _ in range(WORLD)], torch.ones(10))
        dist.reduce_scatter(torch.empty(10), [torch.ones(10) for _ in range(WORLD)])
        dist.all_reduce(torch.ones(80))
        dist.all_to_all_single(torch.empty(80), torch.ones(80))
    return audit.table(by_module=gpus_per_node == 4, baseline=gpus_per_node == 2)


def test_a_table_on_one_node() -> None:
    # A ring passes on 320 x 7 / 8 bytes, or twice as many.
    assert_expected_inline(
        kinds(8),
        """\
op              axis   dtype    count  elements  bytes  within nodes  between nodes
all_gather      world  float32      1        80    320           280              0
reduce_scatter  world  float32      1        80    320           280              0
all_reduce      world  float32      1        80    320           560              0
all_to_all      world  float32      1        80    320           280              0
total                               4            1,280         1,400              0
  float8                                             0             0              0
  other                                          1,280         1,400              0""",
    )


def test_a_table_on_two_nodes() -> None:
    # Two of a ring's eight links leave a node. Four of the eight parts of an all-to-all do.
    assert_expected_inline(
        kinds(4),
        """\
op              axis   dtype    count  elements  bytes  within nodes  between nodes  module
all_gather      world  float32      1        80    320           210             70
reduce_scatter  world  float32      1        80    320           210             70
all_reduce      world  float32      1        80    320           420            140
all_to_all      world  float32      1        80    320           120            160
total                               4            1,280           960            440
  float8                                             0             0              0
  other                                          1,280           960            440""",
    )


def test_a_table_on_four_nodes_and_without_nodes() -> None:
    assert_expected_inline(
        kinds(2),
        """\
op              axis   dtype    count  elements  bytes  in bf16  within nodes  between nodes
all_gather      world  float32      1        80    320      320           140            140
reduce_scatter  world  float32      1        80    320      320           140            140
all_reduce      world  float32      1        80    320      320           280            280
all_to_all      world  float32      1        80    320      320            40            240
total                               4            1,280    1,280           600            800
  float8                                             0        0             0              0
  other                                          1,280    1,280           600            800""",
    )
    plain, *_ = kinds(None).splitlines()
    assert plain == "op              axis   dtype    count  elements  bytes"


def ring(ranks: Sequence[int], gpus_per_node: int, links: int) -> Fraction:
    """The share of links that leave a node, over all ways to begin a ring, or chain, of ranks."""
    crossing = 0
    for first in range(len(ranks)):
        order = [*ranks[first:], *ranks[:first], ranks[first]]
        pairs = list(pairwise(order))[:links]
        crossing += sum(a // gpus_per_node != b // gpus_per_node for a, b in pairs)
    return Fraction(crossing, len(ranks) * links)


@pytest.mark.parametrize("ranks", [[0, 1], [0, 4], [0, 1, 4], [0, 2, 4, 6], [0, 1, 2, 3, 4, 7]])
def test_rings_and_chains_link_by_link(ranks: list[int]) -> None:
    group, size = dist.new_group(ranks), len(ranks)
    nbytes = 4 * size**2  # no number is rounded
    for gpus_per_node in range(1, WORLD + 1):
        with comm_audit(gpus_per_node=gpus_per_node) as audit:
            x = torch.ones(size**2)
            dist.all_gather([*x.chunk(size)], torch.ones(size), group=group)
            dist.reduce_scatter(torch.empty(size), [*x.chunk(size)], group=group)
            dist.all_reduce(x, group=group)
            dist.broadcast(x, 0, group=group)
            dist.reduce(x, 0, group=group)
        in_ring = nbytes * Fraction(size - 1, size)
        shares = [ring(ranks, gpus_per_node, links) for links in (size, size - 1)]
        expected = [
            (turns * in_ring * (1 - share), turns * in_ring * share)
            for turns, share in zip((1, 1, 2, 1, 1), [shares[0]] * 3 + [shares[1]] * 2, strict=True)
        ]
        assert sent(audit.rows) == expected


@pytest.mark.parametrize(
    ("ranks", "found"), [([0, 1, 2], [(8, 0), (8, 0), (36, 0)]), ([0], [(0, 0)] * 3)]
)
def test_a_group_inside_a_node(ranks: list[int], found: list[tuple[int, int]]) -> None:
    group, x = dist.new_group(ranks), torch.ones(3)
    with comm_audit(gpus_per_node=3) as audit:
        dist.all_gather([torch.empty(1) for _ in ranks], x[:1], group=group)
        dist.all_to_all_single(torch.empty(3), x, group=group)
        dist.gather(x, [torch.empty(3) for _ in ranks], group=group)  # counts whole
    assert sent(audit.rows) == found


@pytest.mark.parametrize("op", ["functional", "c10d", "list"])
def test_an_all_to_all_sends_its_parts(op: str) -> None:
    # Three rows for the rank itself, 5 and 1 within its node of four, 6 to two others.
    sizes, group = [3, 5, 0, 1, 0, 2, 0, 4], dist.group.WORLD
    rows = torch.ones(sum(sizes), 2)
    with comm_audit(gpus_per_node=4) as audit:
        if op == "functional":
            funcol.wait_tensor(funcol.all_to_all_single(rows, sizes, sizes, group.group_name))
        elif op == "c10d":
            dist.all_to_all_single(torch.empty_like(rows), rows, sizes, sizes)
        else:
            dist.all_to_all([part.clone() for part in rows.split(sizes)], [*rows.split(sizes)])
    assert sent(audit.rows) == [(6 * 8, 6 * 8)]
    # Two hops: all within the node, and all between nodes.
    for sizes, found in (([2] * 4 + [0] * 4, (48, 0)), ([4, 0, 0, 0] * 2, (0, 32))):
        with comm_audit(gpus_per_node=4) as audit:
            dist.all_to_all_single(torch.empty(8, 2), torch.ones(8, 2), sizes, sizes)
        assert sent(audit.rows) == [found]
    with comm_audit(gpus_per_node=4) as audit:
        dist.all_to_all_single(torch.empty(0, 2), torch.ones(0, 2), [0] * WORLD, [0] * WORLD)
    assert sent(audit.rows) == [(0, 0)]


def test_parts_of_a_message_share_what_is_sent() -> None:
    sizes, group = [1, 0, 1, 0, 2, 0, 0, 0], dist.new_group([0, 1, 4])
    rows = Float8Tensor(torch.ones(4, 8).to(E4M3), torch.ones(4, 1), torch.bfloat16)
    row = Float8Tensor(torch.ones(1, 8).to(E4M3), torch.ones(1, 1), torch.bfloat16)
    with comm_audit(gpus_per_node=4) as audit:
        world = dist.group.WORLD.group_name
        funcol.wait_tensor(funcol.all_to_all_single(rows, sizes, sizes, world))
    # Rows of 8 and 4 bytes: one within the node, two between nodes.
    assert [row.dtype for row in audit.rows] == [E4M3, torch.float32]
    assert sent(audit.rows) == [(8, 16), (4, 8)]
    with comm_audit(gpus_per_node=2) as audit:
        funcol.wait_tensor(funcol.all_gather_into_tensor(row, 3, group.group_name))
    # A ring passes 36 x 2 / 3 bytes on, 16 of them between nodes. Shares of 2 / 3 are rounded.
    assert sent(audit.rows) == [(5, 10), (3, 6)]


def test_sums_of_rows() -> None:
    audit = comm_audit(gpus_per_node=4)
    for _ in range(2):
        with audit:
            dist.all_reduce(torch.ones(16))
    (row,) = audit.rows
    assert (row.count, row.bytes, row.bytes_within, row.bytes_between) == (2, 128, 168, 56)
    assert audit.without_modules().gpus_per_node == 4
    with comm_audit() as audit:
        dist.all_reduce(torch.ones(16))
    assert sent(audit.rows) == [(0, 0)]


@pytest.mark.parametrize(
    ("op", "group", "found"),
    [
        ("send", [0, 4], (0, 100)),
        ("send", [0, 3], (100, 0)),
        ("recv", [0, 4], (0, 0)),
        ("scatter", [0, 1, 4], (0, 100)),
        ("symm_mem::one_shot_all_reduce", [0, 1], (100, 0)),
        ("symm_mem::one_shot_all_reduce", None, (0, 100)),
    ],
)
def test_other_ops_send_the_buffer(
    op: str, group: list[int] | None, found: tuple[int, int]
) -> None:
    call = Collective(op, dist.new_group(group) if group else None, (), 1)
    assert call.sent(100, gpus_per_node=4) == found


@pytest.mark.parametrize("value", [0, -8, True, 8.0, "8"])
def test_numbers_that_are_refused(value: object) -> None:
    message = f"^comm_audit: gpus_per_node={value!r} must be a positive integer$"
    with pytest.raises(ValueError, match=message):
        comm_audit(gpus_per_node=value)  # type: ignore[arg-type]
