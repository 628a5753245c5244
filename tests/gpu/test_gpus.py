"""On several GPUs, one per rank, with NCCL alone."""

from collections.abc import Callable
from typing import Any

import mesh_training
import pytest
import torch
from ranks import device_mesh
from test_mesh_grid import MESHES, REFUSED, SHAPES, verdicts

from fp8_dist import Float8LinearRecipeName
from scripts.common.ranks import run_on_ranks

DEVICE = "cuda"
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


def on_gpus(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of a function on ranks whose default device is their GPU."""
    return run_on_ranks(
        world_size, _with_default_device, DEVICE, function, arguments, device=DEVICE
    )


def _with_default_device(device: str, function: Callable[..., Any], arguments: Any) -> Any:
    torch.set_default_device(device)
    return function(*arguments)


def grid(mesh: str) -> dict[tuple[str, bool], dict[str, list[bool]]]:
    """The verdicts of test_mesh_grid on a mesh, for all shapes and configs."""
    return {
        (shape, precompute): verdicts(MESHES[mesh], SHAPES[shape], precompute, slice(None))
        for shape in SHAPES
        for precompute in (False, True)
        if (mesh, shape) not in REFUSED
    }


MESHES_OF_GPUS = [
    pytest.param(mesh, marks=pytest.mark.gpus(torch.Size(axes).numel()))
    for mesh, (axes, _, _) in MESHES.items()
]


@pytest.mark.parametrize("mesh", MESHES_OF_GPUS)
def test_operands(mesh: str) -> None:
    size = torch.Size(MESHES[mesh][0]).numel()
    for found in on_gpus(size, grid, mesh):
        assert found
        same = {(*case, r): same for case, of in found.items() for r, same in of.items()}
        assert [case for case, each in same.items() if not (each and all(each))] == []


def trained(axes: dict[str, int], options: dict[str, Any]) -> dict[str, list[float]]:
    """The results of `mesh_training.trained` for all recipes."""
    mesh = device_mesh(**axes)
    return {r: mesh_training.trained(r, mesh, DEVICE, **options) for r in RECIPES}


def check(axes: dict[str, int], **options: Any) -> None:
    """Check that training on a mesh gives the same results as on one device."""
    size = torch.Size(axes.values()).numel()
    # Sums over several ranks have another order, so elements may be rounded differently.
    for by_recipe in on_gpus(size, trained, axes, options):
        for recipe, found in by_recipe.items():
            assert min(found) > 40, (recipe, found)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("options", [{}, {"hidden": 97}, {"offload": True}], ids=str)
def test_fsdp(options: dict[str, Any]) -> None:
    check({"dp": 2, "tp": 1}, **options)


@pytest.mark.gpus(4)
def test_hybrid_sharding() -> None:
    check({"replicate": 2, "shard": 2, "tp": 1}, data=("replicate", "shard"))


@pytest.mark.gpus(8)
def test_eight_ranks() -> None:
    check({"replicate": 2, "shard": 2, "tp": 2}, data=("replicate", "shard"))
    check({"dp": 8, "tp": 1}, hidden=97)
