"""torch's cache of compiled graphs has a separate key for each kind of float8 tensor."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_tests import on_ranks
from ranks import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8_dist.fsdp import Float8AllGatherWeight
from fp8_dist.tensor import Float8Tensor


def casts() -> dict[str, torch.Tensor]:
    """Tensors with the same shape and dtype that need different graphs."""
    values, rows = torch.randn(16, 16), torch.arange(1.0, 17).view(16, 1)
    e4m3, e5m2 = values.to(torch.float8_e4m3fn), values.to(torch.float8_e5m2)
    return {
        "e4m3 by row": Float8Tensor(e4m3, rows, torch.float32),
        "e5m2 by row": Float8Tensor(e5m2, rows, torch.float32),
        "e4m3 by column": Float8Tensor(e4m3, rows.t(), torch.float32),
    }


def doubled(x: torch.Tensor) -> torch.Tensor:
    local = x.to_local() if isinstance(x, DTensor) else x
    return 2 * (local.dequantize() if isinstance(local, Float8Tensor) else local)


@pytest.mark.full
@on_ranks(1, returns=[], timeout=240)
def test_no_tensor_runs_the_graph_of_another(tmp_path: Path) -> list[str]:
    """Tensors for which a function, compiled with a shared cache, differs from eager; warnings."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    mesh, found = device_mesh(dp=1), []
    tensors = casts()
    placed = {
        f"{name}, in a DTensor": DTensor.from_local(tensor, mesh, [Replicate()])
        for name, tensor in tensors.items()
    }
    first, *_ = tensors
    tensors = {
        first: tensors[first],
        "shard": Float8AllGatherWeight(torch.randn(16, 16), "weight"),
        **placed,
    }
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for name, tensor in tensors.items():
            torch.compiler.reset()  # so that graphs can only come from the cache
            try:
                same = torch.equal(torch.compile(doubled)(tensor), doubled(tensor))
            except AssertionError as error:
                same, name = False, f"{name}: {error}"
            found += [] if same else [name]
    texts = dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught)
    return found + [text for text in texts if "_stable_hash_for_caching" in text]


@on_ranks(2, returns=[])
def test_keys_have_the_groups_of_a_mesh_and_the_local_shape() -> list[str]:
    """What two DTensors differ in that have one key."""
    found, local = [], torch.zeros(4, 8)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    assert meshes[0] == meshes[1]
    assert meshes[0].get_group().group_name != meshes[1].get_group().group_name
    first, second = (DTensor.from_local(local, mesh, [Replicate()]) for mesh in meshes)
    if first._stable_hash_for_caching() == second._stable_hash_for_caching():
        found.append("groups")
    parts = [
        DTensor.from_local(
            torch.zeros(rows, 8), meshes[0], [Shard(0)], shape=(12, 8), stride=(8, 1)
        )
        for rows in (5, 7)
    ]
    if parts[0]._stable_hash_for_caching() == parts[1]._stable_hash_for_caching():
        found.append("local shapes")
    return found
