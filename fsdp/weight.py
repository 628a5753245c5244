"""The weight that FSDP2 gathers in float8.

Such a weight is three tensors, in FSDP2's terms:

* The *sharded parameter* is ``DTensor(Float8AllGatherWeight(shard))``, in high precision. The
  optimizer updates it.
* The *all-gather input* is the shard's float8 bytes as ``uint8``, padded to the size that FSDP2
  gives every rank. If shards are even, scales that differ between shards are further inputs, and
  the bytes may be packed. If shards are uneven, FSDP2 only accepts inputs of the padded size, and
  all scales come from precompute's all-reduce, or from one for this weight alone.
* The *unsharded parameter* is a ``Float8Tensor`` over FSDP2's all-gather output, or a DTensor of it
  on the tensor-parallel mesh. The forward computes with it. Packed bytes are unpacked to a tensor
  that FSDP2 allocates and frees with the parameter.

The sharded parameter caches the statistics of the weight, see Note [What is known of a weight].
With CPU offload the hooks run on a copy of it. So they find the parameter through the layer that
owns the weight, which FSDP2 passes to them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fp8_dist import fsdp_internals
from fp8_dist import torch_internals as internals
from fp8_dist.device import current_capture, current_stream, keep_for
from fp8_dist.kernels.encoding import as_bytes
from fp8_dist.kernels.scale import amax_of_tensors
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.observers import Use, is_observed
from fp8_dist.operand.prepare import cast_by_state, cast_local
from fp8_dist.operand.state import State
from fp8_dist.scaling import Quantized, Scales, Scheme
from fp8_dist.tensor import Float8Tensor
from fp8_dist.text import kind_of, warn_once
from fp8_dist.weight.float8_weight import Float8Weight, Gather
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.stored import PackedFloat8, Stored
from fp8_dist.weight.weights import weights_of
from fp8_dist.weight.wrapper import padded_shard, unpadded

# The metadata of a gather: the plan, and the scales of the unsharded weight (except for levels
# whose scales are gathered).
_Metadata = tuple[Gather, Scales]


class _ShardCast(NamedTuple):
    """The cast of a shard, as FSDP2 gathers it.

    Attributes:
        inputs, metadata: see :meth:`Float8AllGatherWeight.fsdp_pre_all_gather`.
        amax: the amax of the shard, fp32, 0-dim, if the weight has an amax history.
    """

    inputs: tuple[torch.Tensor, ...]
    metadata: _Metadata
    amax: torch.Tensor | None


class _KeptCast(NamedTuple):
    """A cast that an update of scales made; see Note [Kept casts].

    Attributes:
        cast: the cast. Casts that were made together are parts of the same memory.
        state: what it depends on.
        statistic: the statistic of the weight's history, from which it was made.
        stream: the stream on which it was made; None on devices without streams.
        readers: the streams of gathers that read the memory, each with the number of the capture
            that it was in. Casts that were made together share this set.
    """

    cast: _ShardCast
    state: tuple[Any, ...]
    statistic: torch.Tensor | None
    stream: torch.Stream | None
    readers: set[tuple[torch.cuda.Stream, int]]


class Float8AllGatherWeight(KnownWeight):
    """High-precision weight (shard) that FSDP2 gathers in float8.

    With ``enable_fsdp_float8_all_gather``, the local tensors of sharded parameters have this type
    from ``fully_shard`` on (:func:`wrap_sharded`).

    Attributes:
        name_of_weight: the name of the weight in its module.
        kept_cast: the cast that the last update of scales made.
    """

    name_of_weight: str
    kept_cast: _KeptCast | None
    static = ("name_of_weight",)
    __slots__ = ("kept_cast", "name_of_weight")

    def set_up(self, **parts: torch.Tensor) -> None:
        super().set_up(**parts)
        self.kept_cast = None

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
        """
        weight = weights_of(module)[self.name_of_weight]
        assert weight.fsdp is not None
        parameter = weight.fsdp.sharded
        if (handed_over := self.kept_inputs(parameter, module)) is not None:
            return handed_over
        local = internals.dtensor_local(parameter)
        cache = self
        if isinstance(local, Float8AllGatherWeight) and local.device != self.device:
            cache = local  # with CPU offload, self is a copy
        stream = self._await_scales(weight, current_capture()) if self.plain.is_cuda else None
        use = Use((weight,), "weight") if is_observed() else None
        gather = weight.gather(parameter)
        state = weight.gather_state(cache, parameter, gather.kept)
        cast = _cast_shard(self.plain, gather, state, use)
        if weight.history is not None:
            _note_amax(weight.history, cast)
        if stream is not None:
            # The next update or sync may drop tensors while this stream still reads them.
            read = [cache.known, *cast.metadata[1]]
            if weight.history is not None and weight.history.statistic is not None:
                read.append(weight.history.statistic)
            for tensor in read:
                keep_for(stream, tensor)
        return cast.inputs, cast.metadata

    def kept_inputs(
        self, parameter: DTensor, module: nn.Module
    ) -> tuple[tuple[torch.Tensor, ...], _Metadata] | None:
        """The result of :meth:`fsdp_pre_all_gather`, if a kept cast is of the current values and
        scales, and nothing looks at casts; else None. A cast of others is dropped.

        Args:
            parameter: the sharded parameter.
            module: the module that FSDP2 passes to the hook.
        """
        kept = self.kept_cast
        if kept is None or is_observed() or not internals.can_skip_dispatch(self.plain):
            return None
        weight, capture = weights_of(module)[self.name_of_weight], current_capture()
        plan, history = weight.gather(parameter), weight.history
        has_changed = history is not None and history.statistic is not kept.statistic
        if has_changed or self.state_of_cast(parameter, plan, capture) != kept.state:
            _wait_for_readers(kept, capture, set())
            self.kept_cast = None
            return None
        cast = kept.cast
        if self.plain.is_cuda:
            kept.readers.add((self._await_scales(weight, capture), capture))
        if history is not None:
            _note_amax(history, cast)
        return cast.inputs, cast.metadata

    def _await_scales(self, weight: Float8Weight, capture: int) -> torch.cuda.Stream:
        """Let the current stream wait for the last update of scales, and return it."""
        stream = torch.cuda.current_stream(self.plain.device)
        if weight.scales_ready is not None:
            # FSDP2 gathers on a stream that only waits for the optimizer's post_optim_event.
            weight.scales_ready.wait(stream, capture)
        return stream

    def state_of_cast(self, parameter: torch.Tensor, plan: Gather, capture: int) -> tuple[Any, ...]:
        """Return the facts that a kept cast depends on, to compare.

        The plan is another object if the layout or the config has changed.
        """
        versions = internals.version_of(self.plain), internals.version_of(parameter)
        return int(self.valid), *versions, parameter.requires_grad, plan, capture

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
        gather, scales = metadata
        is_packed = gather.plan.packed
        unsharded = None if out is None else local_tensor(out)
        assert unsharded is None or isinstance(unsharded, Float8Tensor), type(unsharded)
        if unsharded is not None and not (arrived or is_packed):
            unsharded.set_scales(scales)  # FSDP2 refilled the storage of the data
            return None
        # FSDP2 keeps the weight with its buffers. They are inference tensors if the first gather
        # was in inference mode, and a normal tensor can't be on top of them.
        is_inference = data.is_inference()
        with torch.inference_mode(is_inference), torch.no_grad():
            if arrived:
                scales = _with_arrived(scales, arrived, gather)
            if unsharded is None:
                return _unsharded(data, scales, gather, param_dtype)
            unsharded.set_scales(scales)
            if is_packed:
                _unpack(data, unsharded.qdata, gather.kept.schemes[0])
            return None


class Shard(NamedTuple):
    """A weight that FSDP2 gathers in float8, as an update measures and casts it.

    Attributes:
        weight: the weight.
        parameter, local: its sharded parameter, and the local tensor of that.
        plan: the plan of its gather.
    """

    weight: Float8Weight
    parameter: torch.Tensor
    local: Float8AllGatherWeight
    plan: Gather


def shards_of(weights: Iterable[Float8Weight]) -> list[Shard]:
    """The shards of the weights that FSDP2 gathers in float8."""
    shards = []
    for weight in weights:
        parameter = weight.master()
        local = local_tensor(parameter)
        if isinstance(local, Float8AllGatherWeight):
            shards.append(Shard(weight, parameter, local, weight.gather(parameter)))
    return shards


def _with_arrived(known: Scales, arrived: Sequence[torch.Tensor], gather: Gather) -> Scales:
    """The scales of the unsharded weight: known ones, and those that were gathered."""
    (scheme,) = gather.kept.schemes
    scales = list(known)
    for i, scale in zip(gather.moving, arrived, strict=True):
        shape = scheme.levels[i].shape(gather.size, scheme.start(gather.arrives))
        scales[i] = scale.view(scheme.levels[i].scale).reshape(shape)
    return tuple(scales)


def _unsharded(
    data: torch.Tensor, scales: Scales, gather: Gather, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The unsharded weight on the storage of gathered bytes, and its inner tensors."""
    # FSDP2 itself allocates and frees the storage of its all-gather outputs, and of the inner
    # tensors that this function returns. The output is padded, and its shape is not the weight's
    # if a dim other than the first is sharded.
    (scheme,) = gather.kept.schemes
    is_packed = gather.plan.packed
    if is_packed:
        qdata = torch.empty(gather.size, dtype=scheme.dtype, device=data.device)
        _unpack(data, qdata, scheme)
    else:
        qdata = unpadded(data, scheme.dtype, gather.size)
    start = scheme.start(gather.arrives)
    splits_blocks = scheme.splits_blocks(gather.arrives)
    weight = Quantized(qdata, scales, scheme, start, splits_blocks)
    return Float8Tensor.of(weight, dtype), (qdata,) if is_packed else ()


def _cast_shard(
    shard: torch.Tensor, gather: Gather, state: State, use: Use | None = None
) -> _ShardCast:
    """Cast a shard for FSDP2's gather.

    Args:
        shard: the plain shard, which with CPU offload is a copy.
        gather: the plan of the gather.
        state: what decides the statistics of the shard.
        use: see :func:`fp8_dist.operand.prepare.cast_local`.

    Collectives: those of :meth:`State.statistics`. If scales of the whole weight are needed and
    not cached, those of :func:`fp8_dist.scaling.reduction.global_statistics`.
    """
    kept, plan, shard = gather.kept, gather.plan, shard.detach()
    with internals.normal_tensors():
        if kept.whole:
            (scheme,), (statistics,) = kept.schemes, state.statistics(shard, plan)
            parts = scheme.local_part(scheme.scales_from(statistics), gather.arrives)
            scales = tuple([scale.to(shard.device) for scale in parts])
            own = scheme.local_part(statistics, kept.layout)
            (cast,), amax = cast_local(shard, plan, [own], use)
        else:
            (cast,), amax = cast_by_state(shard, plan, state, use)
            scales = cast.scales
        data = padded_shard(as_bytes(cast.qdata), gather.padded[0])
        # The bytes are a view of float8 data again, which tells an audit the payload's dtype.
        inputs = [data.view(cast.qdata.dtype).view(torch.uint8)]
        for i in gather.moving:
            inputs.append(as_bytes(cast.scales[i].contiguous().reshape(-1)))
    # The metadata must not refer to the cast, whose memory it would keep.
    return _ShardCast(tuple(inputs), (gather, scales), amax)


def keep_casts(shards: Sequence[Shard]) -> None:
    """Cast the shards that FSDP2 gathers in float8, for the gathers until the next update.

    Call it outside of inference mode.

    Note [Kept casts]
    ~~~~~~~~~~~~~~~~~
    A weight changes once per optimizer step, and is gathered twice per micro-batch. So the update
    of scales also casts it, and the gathers send the same bytes. They cast the weight themselves
    if anything that the cast depends on has changed since: the values, as the cache of statistics
    notices it (Note [What is known of a weight]), the scale of a history, the layout, the config,
    or the capture of a CUDA graph (Note [Captures]). Likewise if no update has run, if an observer
    or a dispatch mode looks at casts (as that of selective checkpointing does), or if the shard is
    on another device, as with CPU offload.

    A cast together takes known statistics, or those of histories, without asking a source.

    Casts that are made together share memory, which the next update frees. It lets its stream wait
    for the streams that read the memory; ``record_stream`` would hold the memory back while the
    host is ahead.
    """
    capture = current_capture()
    _drop_casts(shards, capture)  # the next casts take their memory
    if is_observed():
        return
    together: dict[Any, list[Shard]] = {}
    alone: list[Shard] = []
    for shard in filter(_can_keep, shards):
        weight, _, local, plan = shard
        if plan.is_cast_with_others:
            of_one_cast = plan.kept.schemes, plan.plan.packed
            kind = of_one_cast, weight.history is not None, local.plain.dtype, local.plain.device
            together.setdefault(kind, []).append(shard)
        else:
            alone.append(shard)
    for group in together.values():
        _keep(group, _cast_together(group), capture)
    for shard in alone:
        weight, parameter, local, plan = shard
        state = weight.gather_state(local, parameter, plan.kept)
        _keep([shard], [_cast_shard(local.plain, plan, state)], capture)


def _keep(group: Sequence[Shard], casts: Sequence[_ShardCast], capture: int) -> None:
    """Keep casts that were made together for later gathers."""
    stream = current_stream(group[0].local.device)
    readers: set[tuple[torch.cuda.Stream, int]] = set()
    for (weight, parameter, local, plan), cast in zip(group, casts, strict=True):
        statistic = None
        if weight.history is not None:
            statistic = weight.history.statistic
            local.note_writes()
        state = local.state_of_cast(parameter, plan, capture)
        local.kept_cast = _KeptCast(cast, state, statistic, stream, readers)


def _drop_casts(shards: Iterable[Shard], capture: int) -> None:
    """Drop the kept casts of shards, and free their memory for the next ones."""
    waiting: set[torch.cuda.Stream] = set()
    seen: set[int] = set()
    for shard in shards:
        kept = shard.local.kept_cast
        if kept is not None and id(kept.readers) not in seen:
            seen.add(id(kept.readers))
            _wait_for_readers(kept, capture, waiting)
    for shard in shards:
        shard.local.kept_cast = None


def _wait_for_readers(kept: _KeptCast, capture: int, waiting: set[torch.cuda.Stream]) -> None:
    """Let the stream that made a kept cast wait for the gathers that read its memory.

    If it can't, the memory is kept until they have read it.

    Args:
        waiting: streams that the current stream waits for already. Others are added.
    """
    if not kept.readers:
        return
    data = kept.cast.inputs[0]
    is_reused_here = current_stream(data.device) == kept.stream
    for stream, capture_of_read in kept.readers:
        # A capture can't wait for what was queued outside of it, nor the reverse.
        if not (is_reused_here and capture_of_read == capture):
            for tensor in kept.cast.inputs:
                keep_for(stream, tensor)
        elif stream not in waiting:
            torch.cuda.current_stream(data.device).wait_stream(stream)
            waiting.add(stream)


def _note_amax(history: AmaxHistory, cast: _ShardCast) -> None:
    """Let the weight's history record the amax of a gathered cast."""
    history.last = cast.amax
    history.restored = False


def _can_keep(shard: Shard) -> bool:
    """Whether gathers may use a cast of now."""
    history, plain = shard.weight.history, shard.local.plain
    is_known = history is None or (history.statistic is not None and shard.parameter.requires_grad)
    is_on_device = plain.device.type == shard.plan.kept.layout.mesh.device_type
    is_kept = shard.plan.keeps_casts and is_on_device
    return is_known and is_kept and internals.can_skip_dispatch(plain)


def _cast_together(group: Sequence[Shard]) -> list[_ShardCast]:
    """:func:`_cast_shard` of shards of one kind whose statistics are known, in one launch."""
    first, plans = group[0].plan, [shard.plan for shard in group]
    (scheme,) = first.kept.schemes
    shards = [shard.local.plain.detach() for shard in group]
    amaxes: Sequence[torch.Tensor | None] = [None] * len(group)
    if group[0].weight.history is not None:
        of_histories = [h.statistic for w, *_ in group if (h := w.history) is not None]
        known = torch.stack([statistic for statistic in of_histories if statistic is not None])
        measured = amax_of_tensors(shards[0], shards[1:])
        # NaN if the amax is not finite, as in cast_and_measure: other ranks see the data alone.
        known = torch.add(known, measured, alpha=0)
        amaxes = measured.unbind()
    else:
        known = torch.cat([shard.local.known for shard in group])
        known = known.view(scheme.levels[0].statistic)
    lengths = [math.prod(plan.padded) for plan in plans]
    data, flat_scales = scheme.cast_each(shards, known, lengths, first.plan.packed)
    all_data = data.split(lengths)
    all_scales = flat_scales.split([plan.scale_count for plan in plans])
    casts = []
    for i, plan in enumerate(plans):
        inputs = [all_data[i].view(plan.padded)]
        if plan.moving:
            inputs.append(as_bytes(all_scales[i]))
        scales = (all_scales[i].view(plan.scale_shape),)
        casts.append(_ShardCast(tuple(inputs), (plan, scales), amaxes[i]))
    return casts


def _unpack(data: torch.Tensor, qdata: torch.Tensor, scheme: Scheme) -> None:
    """Unpack an all-gather output, and free it: FSDP2 allocates it again for the next gather."""
    # Writes to inference tensors are not counted.
    counted = () if qdata.is_inference() else (qdata,)
    with internals.unnoticed_writes(counted):  # the backward reads the same tensor again
        scheme.unpack(data, qdata)
    data.untyped_storage().resize_(0)


fsdp_internals.hand_over_to_fsdp_gathers(Float8AllGatherWeight)


@internals.normal_tensors()
def wrap_sharded(parameter: fsdp_internals.FsdpParameter, weights: Sequence[Float8Weight]) -> None:
    """Wrap the local tensor of a sharded parameter, so that FSDP2 gathers it as its layers ask.

    If FSDP2 gathers a weight in high precision, but its scales cover values of several ranks, its
    local tensor becomes a ``KnownWeight``, which caches the statistics of precompute. The
    parameter, a DTensor, stays the same. Packed data that can't be gathered packed is unpacked.

    Args:
        weights: the float8 weights of all users of the parameter.

    Raises:
        ValueError: another module uses a parameter that is to be gathered in float8; or tensor
            parallelism leaves a rank without any of it, and FSDP2 can't reduce empty gradients.
    """
    users, sharded = parameter.users, parameter.sharded
    local = internals.dtensor_local(sharded)
    asking = [weight for weight in weights if weight.config.fsdp_float8_all_gather]
    if isinstance(local, PackedFloat8) and not _packs(weights[0]):
        parameter.replace_local(local.in_float8(weights[0].held_scheme(sharded)))
    if isinstance(local, Float8AllGatherWeight | Stored):
        return
    if asking:
        if others := [(m, name) for m, name in users if weights_of(m).get(name) not in weights]:
            module, name = others[0]
            raise ValueError(
                f"{asking[0].fqn}: FSDP2 would gather this weight in float8 for all its users, but "
                f"it is also the {name} of {kind_of(module)} that is not converted; leave "
                "the layer unconverted (module_filter_fn), or untie them"
            )
        layout = Layout.of(sharded)
        arrives = layout and asking[0].gathered_layout(layout)
        if arrives and any(0 in arrives.local_sizes(dim) for dim in range(sharded.ndim)):
            raise ValueError(
                f"{asking[0].fqn}: a weight of shape {tuple(sharded.shape)} leaves a "
                f"tensor-parallel rank of {sharded.device_mesh} without any of it, and FSDP2 can't "
                "reduce an empty gradient; leave the layer out of the tensor-parallel plan"
            )
        plain = KnownWeight.unwrap(local)
        parameter.replace_local(Float8AllGatherWeight(plain, users[0][1]))
        if asking[0].schemes[0].packed_dtype is not None:
            _packs(asking[0])  # for its warning
    elif internals.is_plain(local) and any(weight.kept() for weight in weights):
        parameter.replace_local(KnownWeight(local))


def _packs(weight: Float8Weight) -> bool:
    """Return whether FSDP2 gathers a 4-bit weight packed; warn once if it does not."""
    gather = weight.gather()
    layout = gather.kept.layout
    if not gather.plan.packed:
        warn_once(
            "gather not packed",
            f"{weight.fqn} and layers like it: FSDP2 gathers their weights (and keeps frozen ones) "
            "as float8, 1 byte per element, because only equal shards of dim 0 with an even number "
            f"of columns can be packed, not {tuple(layout.shape)} as "
            f"{list(layout.placements)} on {layout.mesh}",
        )
    return gather.plan.packed


def unwrap_float8_weights(weights: Iterable[Float8Weight]) -> None:
    """Let FSDP2 gather weights in high precision, and drop the statistics of distributed ones."""
    for weight in [weight for weight in weights if weight.is_registered]:
        parameter = weight.parameter()
        if isinstance(parameter, DTensor):
            local = internals.dtensor_local(parameter)
            internals.set_dtensor_local(parameter, KnownWeight.unwrap(local))
        if weight.fsdp is not None:
            weight.fsdp.forget_hooks()
