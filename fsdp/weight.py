"""The weight that FSDP2 gathers in float8.

Such a weight is three tensors, in FSDP2's terms:

* The *sharded parameter* is ``DTensor(Float8AllGatherWeight(shard))``, in high precision. The
  optimizer updates it.
* The *all-gather input* is the shard's float8 bytes as ``uint8``, padded to the size that FSDP2
  gives every rank. If shards are even, scales that differ between shards are further inputs. If
  shards are uneven, FSDP2 only accepts inputs of the padded size, and all scales come from the
  all-reduce of precompute, or from one for this weight.
* The *unsharded parameter* is a ``Float8Tensor`` over FSDP2's all-gather output, or a DTensor of it
  on the tensor-parallel mesh. The forward computes with it.

What is known of the weight is in the sharded parameter, see Note [What is known of a weight]. The
hooks find it by the layer that owns the weight, which FSDP2 passes to them: with CPU offload they
run on a copy.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fp8_dist.kernels.encoding import as_bytes
from fp8_dist.linear.module import other_users
from fp8_dist.linear.weight import (
    Float8Weight,
    unwrap_weights,
    weights_of,
    weights_of_model,
    wrap_weights,
)
from fp8_dist.mesh import Layout, local_sizes, local_tensor
from fp8_dist.scaling import Quantized, Scales, Scheme, Start
from fp8_dist.tensor import Float8Tensor
from fp8_dist.tensor.known import KnownWeight
from fp8_dist.tensor.stored import Stored
from fp8_dist.tensor.wrapper import padded_shard, unpadded
from fp8_dist.torch_internals import (
    fsdp_gather_without_hooks,
    fsdp_groups,
    fsdp_parameters,
)


class _Metadata(NamedTuple):
    """Metadata for :meth:`Float8AllGatherWeight.fsdp_post_all_gather`."""

    scheme: Scheme
    scales: Scales  # of the unsharded weight, except for the gathered levels
    start: Start
    is_cut: bool
    size: torch.Size
    gathered: tuple[int, ...]  # the levels whose scales are gathered too


class Float8AllGatherWeight(KnownWeight):
    """High-precision weight (shard) that FSDP2 gathers in float8.

    Parameters have this tensor type from ``convert_to_float8_training(...,
    enable_fsdp_float8_all_gather=True)`` to the end of training.
    """

    name_of_weight: str
    static = ("name_of_weight",)
    __slots__ = ("name_of_weight",)

    @staticmethod
    def wrap(tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Wrap the tensor of a parameter of that name, on the same storage."""
        known = isinstance(tensor, Float8AllGatherWeight)
        return tensor if known else Float8AllGatherWeight(KnownWeight.unwrap(tensor), name)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], _Metadata]:
        """Return the all-gather inputs for FSDP2: the padded shard as uint8, and perhaps scales.

        Collectives: none if the scales are known (from precompute, or an earlier micro-batch).
        Otherwise an all-reduce of 4 bytes per scale, over all axes that shard the values that a
        scale covers. For unevenly sharded scales, an all-reduce over ``mesh``, of 4 bytes per scale
        of the global weight. For scales of blocks, one of 1 byte per block of the global weight;
        none if shards cut no block.

        Raises:
            ValueError: the module is not a Float8Linear; or tensor parallelism leaves some rank
                with an empty shard, whose gradient FSDP2 can't reduce.
        """
        weight = weights_of(module).get(self.name_of_weight)
        if weight is None:
            raise ValueError(
                f"a {type(module).__name__} owns a weight that is gathered in float8; only a "
                "Float8Linear can use it. Share a converted layer's weight with no other module, "
                "or leave the layer unconverted"
            )
        weight.gathered_over = mesh
        _check_other_shards(weight)
        cast, whole = weight.gather_cast(self)
        data = padded_shard(as_bytes(cast.qdata), outer_size, mesh.size())
        # A view of the float8 dtype, so that an audit can find the payload's dtype.
        data, layout = as_bytes(data.view(cast.qdata.dtype)), weight.layout()
        scheme, scales = cast.scheme, cast.scales
        unsharded = layout and weight.gathered_layout(layout)
        gathered: tuple[int, ...] = ()
        if whole is not None and unsharded is not None:
            own = scheme.local_part(whole, unsharded)
            scales = tuple([scale.to(cast.qdata.device) for scale in own])
        else:
            gathered = scheme.moving_levels(layout, unsharded)
        start, is_cut = scheme.start(unsharded), scheme.is_cut(unsharded)
        inputs = (data, *[_as_input(cast.scales[i]) for i in gathered])
        # The metadata must not refer to the cast, whose memory it would keep.
        how = _Metadata(scheme, scales, start, is_cut, outer_size, gathered)
        return inputs, how

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: _Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the unsharded weight for FSDP2, on the storage of the gathered bytes."""
        data, *arrived = all_gather_outputs
        scheme, known, start, is_cut, size, gathered = metadata
        scales, shapes = list(known), scheme.scale_shapes(size, start)
        for i, scale in zip(gathered, arrived, strict=True):
            scales[i] = scale.view(scheme.levels[i].scale).reshape(shapes[i])
        if out is not None:
            # FSDP2 refilled the same storage: only the scales are new.
            unsharded = local_tensor(out)
            assert isinstance(unsharded, Float8Tensor), type(unsharded)
            unsharded.set_scales(tuple(scales))
            return None
        # FSDP2 itself allocates and frees the storage of its all-gather outputs. The output is the
        # padded weight. It has another shape if a dim other than the first is sharded.
        qdata = unpadded(data, scheme.dtype, size)
        weight = Quantized(qdata, tuple(scales), scheme, start, is_cut)
        return Float8Tensor.of(weight, param_dtype), ()


def _as_input(scale: torch.Tensor) -> torch.Tensor:
    """Flatten scales to an all-gather input, in a dtype that every backend can send."""
    flat = scale.contiguous().reshape(-1)
    return flat if flat.dtype in (torch.float32, torch.uint8) else flat.view(torch.uint8)


def _check_other_shards(weight: Float8Weight) -> None:
    """Raise, on all ranks, if tensor parallelism leaves some rank without any of the weight."""
    layout = Layout.of(weight.parameter())
    gathered = weight.gathered_layout(layout) if layout and layout.mesh.ndim > 1 else None
    if layout and gathered and _some_are_empty(gathered):
        raise ValueError(
            f"{weight.fqn}: a weight of shape {tuple(layout.shape)} leaves a tensor-parallel rank "
            f"of {layout.mesh} without any of it, and FSDP2 can't reduce an empty gradient; leave "
            "the layer out of the tensor-parallel plan"
        )


@lru_cache(maxsize=1024)
def _some_are_empty(layout: Layout) -> bool:
    return any(0 in local_sizes(layout, dim) for dim in range(len(layout.shape)))


def rewrap_float8_weights(module: nn.Module) -> list[str]:
    """Let FSDP2 gather weights in float8 again after other code has rebuilt their parameters.

    ``convert_to_float8_training`` with ``enable_fsdp_float8_all_gather`` gives weights a tensor
    type that FSDP2 gathers in float8. Code that makes new parameters of plain tensors, such as a
    checkpoint loader, loses the type. Call this function afterwards, before ``fully_shard`` and
    before the optimizer is made. A model that was sharded with the type, for instance on the meta
    device, may be loaded and rewrapped until its first forward. A second call changes nothing.

    A weight that is a DTensor stays the same parameter. A plain weight becomes a new parameter on
    the same storage, with the gradient and attributes of the old one. Layers that shared a weight
    still share it.

    Args:
        module: the model, or a part of it.

    Returns:
        The names of the modules whose weights were wrapped.

    Collectives: none.

    Raises:
        ValueError: ``module`` has no converted layer; another module shares a weight that would be
            wrapped; or FSDP2 already gathers a weight in high precision, because ``fully_shard``
            found it without the type, or because it was gathered after it lost the type. Nothing
            has been changed then.
    """
    weights = weights_of_model(module, "rewrap_float8_weights")
    lost = {fqn: weight for fqn, weight in weights.items() if _lost_type(weight)}
    users = [weight.module for weight in lost.values()]
    if shared := other_users(module, {fqn: w.parameter() for fqn, w in lost.items()}, users):
        raise ValueError(
            "rewrap_float8_weights: FSDP2 would gather a weight in float8 for all its users, but "
            f"{'; '.join(shared)}. Leave these layers unconverted (convert_to_float8_training's "
            "module_filter_fn), or untie them"
        )
    _check_fsdp(lost)
    wrap_weights(lost.values())
    names = (fqn.rpartition(".")[0] or weight.fqn for fqn, weight in lost.items())
    return list(dict.fromkeys(names))


def unwrap_float8_weights(weights: Collection[Float8Weight]) -> None:
    """Let FSDP2 gather sharded weights in high precision: the inverse of wrapping.

    A weight that is a DTensor stays the same parameter. A plain weight becomes the parameter that
    it was before, if that is still in use and has the same storage, otherwise a new one. Weights
    that FSDP2 does not gather in float8 stay as they are.
    """
    unwrap_weights(weights)
    fsdp_gather_without_hooks({(weight.module, weight.name) for weight in weights})


def _lost_type(weight: Float8Weight) -> bool:
    if not weight.config.fsdp_float8_all_gather or not weight.is_registered:
        return False
    local = local_tensor(weight.parameter())
    return not isinstance(local, Float8AllGatherWeight | Float8Tensor | Stored)


def _check_fsdp(weights: dict[str, Float8Weight]) -> None:
    """Raise for weights that FSDP2 can only gather in high precision."""
    names = {(weight.module, weight.name): weight.fqn for weight in weights.values()}
    for parameter in fsdp_parameters(fsdp_groups()) if weights else ():
        lost = [names[user] for user in parameter.users if user in names]
        if lost and (parameter.has_gathered or not parameter.has_hooks):
            found = "has gathered it" if parameter.has_gathered else "was set up (fully_shard)"
            raise ValueError(
                f"rewrap_float8_weights: {lost[0]}: FSDP2 {found} after the weight lost "
                "its type, and goes on gathering it in high precision. Call "
                "rewrap_float8_weights(model) before fully_shard"
            )
