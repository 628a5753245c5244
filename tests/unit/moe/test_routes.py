"""Routes of slots to experts on one device, beside Python's sort."""

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from reference import raised

from fp8_dist.moe import route
from fp8_dist.moe.dispatch import slots_by_expert


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_route(tokens: int, leaves_out: bool, poisoned: None) -> None:
    experts, top_k = 7, 3
    ids = torch.randint(experts + leaves_out, (tokens, top_k))
    flat = ids.flatten().tolist()
    routing = route(ids, experts)
    slots = sorted(range(len(flat)), key=flat.__getitem__)
    assert routing.slots.tolist() == [slot for slot in slots if flat[slot] < experts]
    counts = [flat.count(expert) for expert in range(experts)]
    assert routing.groups.counts == routing.groups.sizes.tolist() == counts
    assert routing.groups.group_of_row.tolist() == sorted(e for e in flat if e < experts)
    assert routing.groups.ends.tolist() == [sum(counts[: e + 1]) for e in range(experts)]
    # Slots that are left out become 0.
    expected = [[float(slot)] if flat[slot] < experts else [0.0] for slot in range(len(flat))]
    assert routing.to_slots(routing.slots.float().unsqueeze(1)).tolist() == expected


@pytest.mark.parametrize("wrong", [-1, -(2**40), 8, 2**40])
def test_an_id_that_is_out_of_range(wrong: int) -> None:
    for place in range(4):
        ids = torch.tensor([0, 7, 7, 3])
        ids[place] = wrong
        assert slots_by_expert(ids, 7)[1].tolist() == [-1] * 7
    assert_expected_inline(
        raised(ValueError, lambda: route(torch.tensor([[0, 1, -1]]), 2)),
        "route: expert ids must be from 0 to 2; rank 0 of 1 has others, such as [-1]",
    )
