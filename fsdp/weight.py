"""The weight that FSDP2 gathers in float8.

Three tensors, in FSDP2's words:

* the *sharded parameter*: ``DTensor(Float8AllGatherWeight(shard))``, high precision, what the
  optimizer sees;
* the *all-gather input*: the shard's float8 bytes as ``uint8``, cast with the scale of the global
  weight and padded to the size that FSDP2 gives every rank;
* the *unsharded parameter*: ``Float8Tensor`` over FSDP2's all-gather output, or a DTensor of it
  on the tensor-parallel mesh; what the forward computes with.

The weight carries nothing but its type. Its scale lives on the layer that owns it, which the
five-argument hook hands over, so ``detach``, ``to``, offload and checkpoints have nothing to lose.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.utils._pytree import tree_map_only

from fp8_dist.debug import note_float8_payload
from fp8_dist.fsdp.resharding import check_layer
from fp8_dist.linear import Float8Linear
from fp8_dist.sharding import Layout, local_sizes, local_tensor
from fp8_dist.tensor import Float8Tensor

aten = torch.ops.aten

# Ops whose result is the same weight, moved, viewed, or about to be filled: it stays gathered in
# float8. Results of all others (zeros_like for optimizer state, arithmetic) are plain tensors.
_SAME_WEIGHT = frozenset(
    (
        aten.alias.default,
        aten.as_strided.default,
        aten.clone.default,
        aten.copy_.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.view.default,
        aten._pin_memory.default,
        aten._to_copy.default,
        torch.ops.c10d.broadcast_.default,
        torch.ops.c10d.scatter_.default,
    )
)


class Float8AllGatherWeight(torch.Tensor):
    """A high-precision weight (shard) whose all-gather FSDP2 runs in float8.

    Every op on it runs on the plain tensor inside. It is a parameter's tensor type between
    ``convert_to_float8_training(..., enable_fsdp_float8_all_gather=True)`` and the end of
    training; a ``state_dict`` holds the plain tensor.
    """

    _tensor: torch.Tensor
    __slots__ = ("_tensor",)

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> "Float8AllGatherWeight":
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            pin_memory=tensor.is_pinned(),
        )
        self._tensor = tensor
        return self

    @staticmethod
    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, gathered in float8 from now on (same storage)."""
        if isinstance(tensor, Float8AllGatherWeight):
            return tensor
        return Float8AllGatherWeight(tensor)

    @staticmethod
    def unwrap(tensor: torch.Tensor) -> torch.Tensor:
        """The plain tensor inside; any other tensor is returned as it is."""
        return tensor._tensor if isinstance(tensor, Float8AllGatherWeight) else tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Float8AllGatherWeight({self._tensor!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], static: None, outer_size: Any, outer_stride: Any
    ) -> "Float8AllGatherWeight":
        return Float8AllGatherWeight(inner["_tensor"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args_, kwargs_ = tree_map_only(cls, cls.unwrap, (args, kwargs or {}))
        out = func(*args_, **kwargs_)
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, cls, out) if func in _SAME_WEIGHT else out

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.dtype]]:
        """FSDP2: what to gather. One uint8 tensor of the padded shard's size.

        Collectives: one all-reduce of 4 bytes, over all axes on which the weight is sharded,
        unless its scale is known (precompute, or an earlier micro-batch).

        Raises:
            ValueError: the module is no Float8Linear, FSDP2 is to reshard to a smaller mesh
                (``reshard_after_forward=<int>``), or tensor parallelism leaves some rank with an
                empty shard, whose gradient FSDP2 can't reduce.
        """
        if not isinstance(module, Float8Linear):
            raise ValueError(
                f"a {type(module).__name__} owns a weight that is gathered in float8; only a "
                "Float8Linear can use it. Share a converted layer's weight with no other module, "
                "or leave the layer unconverted"
            )
        check_layer(module, module.fqn)
        _check_other_shards(module, mesh)
        cast = module.cast_weight("gather", self._tensor)
        padded = _padded(cast.qdata, _padded_size(self.size(), outer_size, mesh.size()))
        note_float8_payload(padded.numel(), padded.dtype)
        return (padded.view(torch.uint8),), (cast.scale, padded.dtype)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor, torch.dtype],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """FSDP2: the unsharded weight over the gathered bytes (no copy)."""
        (data,) = all_gather_outputs
        scale, float8_dtype = metadata
        if out is not None:
            # FSDP2 refilled the same storage: only the scale is new.
            unsharded = local_tensor(out)
            assert isinstance(unsharded, Float8Tensor), type(unsharded)
            unsharded.scale = scale
            return None
        # FSDP2 itself allocates and frees the storage of its all-gather outputs.
        return Float8Tensor(data.view(float8_dtype), scale, param_dtype), ()


def _check_other_shards(module: Float8Linear, mesh: DeviceMesh) -> None:
    """Refuse, on all ranks, weights of which some rank holds nothing before FSDP2 shards them."""
    layout = Layout.of(module.weight)
    if layout is None or layout.mesh.ndim == 1:
        return
    ours = dist.get_process_group_ranks(mesh.get_group())
    others = layout._replace(
        placements=tuple(
            Replicate() if _ranks(layout.mesh, axis) == ours else placement
            for axis, placement in enumerate(layout.placements)
        )
    )
    if any(0 in local_sizes(others, dim) for dim in range(2)):
        raise ValueError(
            f"{module.fqn}: a weight of shape {tuple(layout.shape)} leaves a tensor-parallel rank "
            f"of {layout.mesh} without any of it, and FSDP2 can't reduce an empty gradient; leave "
            "the layer out of the tensor-parallel plan"
        )


def _ranks(mesh: DeviceMesh, axis: int) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


def _padded_size(shard: torch.Size, outer: torch.Size, world_size: int) -> torch.Size:
    """The size that FSDP2 gives every rank's shard: dim 0 rounded up, if dim 0 is the sharded one.

    (FSDP2 refuses uneven shards on other dims.)
    """
    if shard[1:] != outer[1:]:
        return shard
    return torch.Size((-(-outer[0] // world_size), *shard[1:]))


def _padded(qdata: torch.Tensor, size: torch.Size) -> torch.Tensor:
    if qdata.size() == size:
        return qdata.contiguous()
    padded = torch.zeros(size, dtype=torch.uint8, device=qdata.device)
    padded[: qdata.size(0)] = qdata.view(torch.uint8)
    return padded.view(qdata.dtype)


Float8Linear.fsdp_weight_type = Float8AllGatherWeight
