"""Comparison of facts between ranks."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8_dist.torch_internals import without_dispatch_modes

_KNOWN = ""  # the name under which a known difference is added to the facts


def first_difference(
    facts: Mapping[str, str],
    groups: Sequence[dist.ProcessGroup],
    device: str,
    known: str | None = None,
) -> str | None:
    """Describe the first fact that differs between ranks, and the ranks on which it differs.

    Returns None if there is no difference. All ranks get the same result.

    Args:
        facts: values by name. Their order is compared, too.
        groups: the groups of this rank along each axis of a mesh, or one group of all ranks.
        device: the type of the devices that communicate.
        known: a difference that was found before. If any rank passes one, it is the result.

    Collectives: one all-reduce of 16 bytes over each group. If there is a difference, also those of
    ``all_gather_object`` of the facts over each group. Dispatch modes, such as ``comm_audit``, do
    not see them.
    """
    if not groups:
        return None
    facts = facts if known is None else {_KNOWN: known, **facts}
    text = "".join(f"\n{name}\t{value}" for name, value in facts.items())
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    with without_dispatch_modes(), torch.inference_mode(False):
        bounds = torch.tensor([digest, -digest], device=device)
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
        largest, negative_smallest = bounds.tolist()
        if largest == -negative_smallest:
            return None
        texts = [f"{dist.get_rank()}{text}"]
        for group in groups:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, texts, group)
            texts = [text for part in parts for text in part]
    by_rank = {}
    for each in texts:
        rank, *lines = each.split("\n")
        by_rank[int(rank)] = dict(line.split("\t", 1) for line in lines)
    return _described(dict(sorted(by_rank.items())))


def _described(by_rank: Mapping[int, Mapping[str, str]]) -> str:
    for facts in by_rank.values():
        if _KNOWN in facts:
            return facts[_KNOWN]
    for name in dict.fromkeys(name for facts in by_rank.values() for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in by_rank.items():
            ranks.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{value} on {_listed(some)}" for value, some in ranks.items())
            return f"{name}: {found}"
    return "the order of layers differs"


def _listed(ranks: Iterable[int]) -> str:
    numbers = list(map(str, ranks))
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
