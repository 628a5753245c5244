"""A mesh of fake CUDA devices. This process is rank 0, and collectives move no data."""

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 8


@cache
def meshes(dp: int = 1, tp: int = 1) -> dict[str, DeviceMesh]:
    """The mesh of each axis. Call it outside of fake modes, where meshes can't be made or sliced.

    dp * tp must be `RANKS`. DTensor never forgets a mesh, so a process can have only one world.
    """
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
    return {axis: mesh[axis] for axis in ("dp", "tp")}
