"""The property tests find bugs: each of these changes to the library makes a case fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from property_cases import KINDS, Case, cases, ranks_of, to_json
from property_runs import on_this_rank
from property_verdicts import Verdict
from ranks import RankPools

import fp8_dist.cast
import fp8_dist.kernels.quantization
from fp8_dist.linear.weight_cache import WeightCache


def same_values(cache: WeightCache, param: torch.Tensor) -> bool:
    """A parameter that was written to passes for what it was."""
    return True


def local_amax(amax: torch.Tensor, groups: object) -> torch.Tensor:
    """The amax of a rank's part, in place of the whole tensor's."""
    return amax


def truncated(x: torch.Tensor, multiplier: torch.Tensor, *_: object) -> torch.Tensor:
    """Rounds toward zero, roughly: a little less than what is rounded to nearest."""
    return x.float() * multiplier * (1 - 2**-5)


# What is put where, and the kind of cases that notice.
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "stale scale": (WeightCache, "_has_same_values", same_values, "train"),
    "local amax, of a cast": (fp8_dist.cast, "all_reduce_max", local_amax, "cast"),
    "local amax, in training": (fp8_dist.cast, "all_reduce_max", local_amax, "train"),
    "wrong rounding, of a cast": (
        fp8_dist.kernels.quantization,
        "multiplied",
        truncated,
        "cast",
    ),
    "wrong rounding, in a layer": (
        fp8_dist.kernels.quantization,
        "multiplied",
        truncated,
        "layer",
    ),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    where, attribute, instead, _ = MUTATIONS[name]
    with mock.patch.object(where, attribute, instead):
        yield


def verdict_on_rank(case: Case, mutation: str) -> Verdict:
    with mutated(mutation):
        return on_this_rank(case)


def cases_until_found(pools: RankPools, mutation: str, limit: int) -> int:
    """How many cases are run before one fails; raises if none of `limit` does."""
    seen: list[Case] = []

    def fails(case: Case) -> bool:
        seen.append(case)
        if ranks_of(case) == 1:
            return verdict_on_rank(case, mutation).kind == "FAILED"
        found = pools(ranks_of(case)).run(verdict_on_rank, case, mutation)
        return any(verdict.kind == "FAILED" for verdict in found)

    settings = hypothesis.settings(
        max_examples=limit,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    kind = MUTATIONS[mutation][3]
    assert kind in KINDS
    found = hypothesis.find(cases(kind), fails, settings=settings)
    print(f"{mutation}: case {len(seen)}, {to_json(found)}")
    return len(seen)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_found(ranks: RankPools, mutation: str) -> None:
    assert cases_until_found(ranks, mutation, limit=100) <= 100
