"""A *fake world*: one process plays rank 0 of thousands.

Its process group's collectives move nothing, and its tensors hold nothing. What is left of a step
is its sequence of collectives and the sizes of its tensors.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """This process is rank 0 of so many. (Rank 0 has the largest shards where they are uneven.)

    DTensor keeps meshes for good: use a process for one world only.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # Clipping reduces norms axis by axis, which torch warns about.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake() -> Iterator[None]:
    """Tensors are fake. Make meshes and their slices, and parallelize a meta model, before it."""
    with FakeTensorMode(allow_non_fake_inputs=True), HostValues():
        yield


class HostValues(TorchDispatchMode):
    """Inside a FakeTensorMode: what is computed from tensors with values has values.

    torch and the library look up ranks in small tensors, such as a mesh's. Whatever a fake tensor
    goes into is fake.
    """

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = all(type(tensor) is torch.Tensor for tensor in tensors)
        makes = func.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.scalar_tensor)
        if known and (tensors or makes):
            with unset_fake_temporarily():
                if func is torch.ops.c10d.alltoall_base_.default:
                    # All ranks have the same values here, so equal parts come as they go.
                    args[0].copy_(args[1])
                return func(*args, **kwargs)
        return func(*args, **kwargs)
