"""A *fake world*: one process plays rank 0 of thousands.

Its collectives move no data, and its tensors have no storage. Only the sequence of collectives and
the sizes of tensors are real.
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
    """Make this process rank 0 of `ranks`. (Where shards are uneven, rank 0 has the largest.)

    DTensor never forgets a mesh, so use a process for one world only.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # Gradient clipping reduces norms axis by axis, and torch warns about that.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake() -> Iterator[None]:
    """Make tensors fake. Create meshes and their slices, and parallelize the model, before this."""
    with FakeTensorMode(allow_non_fake_inputs=True), HostValues():
        yield


class HostValues(TorchDispatchMode):
    """Within a FakeTensorMode, compute real results from inputs that are real tensors.

    torch and the library read ranks from small tensors, such as a mesh's, which must be real. An op
    with any fake input returns fake tensors.
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
                    # All ranks have the same values here, so each rank receives what it sends.
                    args[0].copy_(args[1])
                return func(*args, **kwargs)
        return func(*args, **kwargs)
