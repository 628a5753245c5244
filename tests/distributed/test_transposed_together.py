"""Training under FSDP2 with the weights of a group transposed together, as on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from nets import Distributed, full
from ranks import RankPools
from reference import same_bits
from torch import Tensor

from fp8_dist import Float8LinearConfig, update_float8_scales
from fp8_dist.fsdp import weight
from fp8_dist.kernels import gemm, transposing
from fp8_dist.kernels.gemm import emulated_mm, scaled_mm, scaled_mm_with
from fp8_dist.kernels.transposing import transposed, transposed_copy


def native(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    """Stands for a GPU's GEMM."""
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    return emulated_mm(a, b, scale_a, scale_b, options["out_dtype"])


@contextmanager
def on_a_gpu(transpose: Callable[[Tensor], Tensor]) -> Iterator[None]:
    run = partial(scaled_mm_with, emulated_mm, transpose=transpose)
    with (
        patch.object(gemm, "device_has_float8_gemm", lambda device: True),
        patch.object(gemm, "native_scaled_mm", native),
        patch.object(weight, "takes_transposed", lambda device: True),
        patch.dict(scaled_mm.implementations, {"cpu": run}),
    ):
        yield


def trained(recipe: str, tp: int, reshard: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of some steps, and how many weights each launch of the last one transposed."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(2, tp, config=config, fsdp_arguments={"reshard_after_forward": reshard})
    optimizer = torch.optim.SGD(world.net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    seen, launches = list[Tensor](), list[int]()

    def counted(first: Tensor, others: list[Tensor]) -> list[Tensor]:
        launches.append(1 + len(others))
        return [transposed_copy(x) for x in (first, *others)]

    with patch.object(transposing, "transposed_copies", counted):
        for _ in range(3):
            with torch.no_grad():
                world.net(world.mine(torch.randn(4, 8, 64, generator=generator)))
            for _ in range(2):  # micro-batches
                launches.clear()
                x = world.mine(torch.randn(4, 8, 64, generator=generator))
                world.net(x).square().mean().backward()
            seen.extend(full(p.grad).clone() for p in world.net.parameters())
            optimizer.step()
            optimizer.zero_grad()
            update_float8_scales(world.net)
    return seen, launches


def both_ways(recipe: str, tp: int, reshard: bool) -> tuple[bool, list[int]]:
    found = []
    for transpose in (transposed_copy, transposed):
        with on_a_gpu(transpose):
            found.append(trained(recipe, tp, reshard))
    (alone, none), (together, launches) = found
    assert none == []
    return all(map(same_bits, together, alone)), launches


@pytest.mark.parametrize(
    ("recipe", "tp", "reshard"),
    [
        ("tensorwise", 1, True),
        ("rowwise_folded", 1, False),
        ("delayed", 2, True),
    ],
)
def test_training(ranks: RankPools, recipe: str, tp: int, reshard: bool) -> None:
    # Two groups of three weights; two of the first take an input that needs no gradient.
    expected = (True, [3, 1])
    assert ranks(2 * tp).run(both_ways, recipe, tp, reshard) == [expected] * (2 * tp)
