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
from fp8_dist.operand.observers import Use, is_observed
from fp8_dist.operand.prepare import cast_by_state, cast_local
from fp8_dist.operand.state import State
from fp8_dist.scaling import CastPlan, Quantized, Scales, Scheme
from fp8_dist.tensor import Float8Tensor
from fp8_dist.text import kind_of, warn_once
from fp8_dist.weight.float8_weight import Float8Weight, Gather
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.stored import PackedFloat8, Stored
from fp8_dist.weight.weights import weights_of
from fp8_dist.weight.wrapper import padded_shard, padded_size, unpadded

# The metadata of a gather: the plan, the scales of the unsharded weight (except for levels whose
# scales are gathered), and the weight's size.
_Metadata = tuple[Gather, Scales, torch.Size]


class _ShardCast(NamedTuple):
    """The cast of a shard, as FSDP2 gathers it.

    Attributes:
        inputs, metadata: see :meth:`Float8AllGatherWeight.fsdp_pre_all_gather`.
        amax: the amax of the shard, fp32, 0-dim, if the weight has an amax history.
    """

    inputs: tuple[torch.Tensor, ...]
    metadata: _Metadata
    amax: torch.Tensor | None


class Float8AllGatherWeight(KnownWeight):
    """High-precision weight (shard) that FSDP2 gathers in float8.

    With ``enable_fsdp_float8_all_gather``, the local tensors of sharded parameters have this type
    from ``fully_shard`` on (:func:`wrap_sharded`).

    Attributes:
        name_of_weight: the name of the weight in its module.
        kept_cast: the cast that the last update of scales made, what it depends on, and the
            statistic of its history; see Note [Kept casts].
        cast_stream: the stream on which it was made; None on devices without streams.
        readers: the streams of gathers that read the kept cast, each with the number of the capture
            that it was in.
    """

    name_of_weight: str
    kept_cast: tuple[_ShardCast, tuple[Any, ...], torch.Tensor | None] | None
    cast_stream: torch.Stream | None
    readers: set[tuple[torch.cuda.Stream, int]]
    static = ("name_of_weight",)
    __slots__ = ("cast_stream", "kept_cast", "name_of_weight", "readers")

    def set_up(self, **parts: torch.Tensor) -> None:
        super().set_up(**parts)
        self.kept_cast = None
        self.cast_stream = None
        self.readers = set()

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
        local, cache, stream = local_tensor(weight.master()), self, None
        if isinstance(local, Float8AllGatherWeight) and local.device != self.device:
            cache = local  # with CPU offload, self is a copy
        if self.is_cuda:
            stream = torch.cuda.current_stream(self.device)
        if stream is not None and weight.scales_ready is not None:
            event, capture = weight.scales_ready
            if capture == current_capture():
                # FSDP2 gathers on a stream that only waits for the optimizer's post_optim_event.
                event.wait(stream)
        cast = self._current_cast(weight)
        if cast is None:
            use = Use((weight,), "weight") if is_observed() else None
            cast = _cast_shard(self.plain, weight, weight.gather_state(cache), use)
        read: list[torch.Tensor] = [cache.known, *cast.metadata[1]]
        if (history := weight.history) is not None:
            history.last, history.restored = cast.amax, False
            read += [] if history.statistic is None else [history.statistic]
        if stream is not None:
            # The next update or sync may drop tensors while this stream still reads them.
            for tensor in read:
                keep_for(stream, tensor)
            if self.kept_cast is not None:
                self.readers.add((stream, current_capture()))
        return cast.inputs, cast.metadata

    def keep_cast(self, weight: Float8Weight, cast: _ShardCast) -> None:
        """Keep a cast for later gathers."""
        statistic = None
        if weight.history is not None:
            statistic = weight.history.statistic
            self.note_writes()
        self.kept_cast = cast, self._state_of_cast(weight), statistic
        self.cast_stream = current_stream(self.device)

    def _current_cast(self, weight: Float8Weight) -> _ShardCast | None:
        """The kept cast, if it is of the current values and scales, and nothing looks at casts."""
        if self.kept_cast is None or not _is_unobserved(self.plain):
            return None
        cast, state, statistic = self.kept_cast
        has_changed = weight.history is not None and weight.history.statistic is not statistic
        if has_changed or self._state_of_cast(weight) != state:
            self.drop_cast(set())
            return None
        return cast

    def drop_cast(self, waited: set[torch.cuda.Stream]) -> None:
        """Drop the kept cast, and free its memory for the next one.

        Args:
            waited: streams that the current stream waits for already. Others are added.
        """
        self._wait_for_readers(waited)
        self.kept_cast = None
        self.readers.clear()

    def _wait_for_readers(self, waited: set[torch.cuda.Stream]) -> None:
        """Let the stream that made the kept cast wait for the gathers that read it.

        If it can't, the memory is kept until they have read it.
        """
        capture = current_capture()
        is_reused_here = current_stream(self.device) == self.cast_stream
        for stream, capture_of_read in self.readers:
            # A capture can't wait for what was queued outside of it, nor the reverse.
            if not (is_reused_here and capture_of_read == capture):
                self._keep_cast_for(stream)
            elif stream not in waited:
                torch.cuda.current_stream(self.device).wait_stream(stream)
                waited.add(stream)

    def _keep_cast_for(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the kept cast until a gather on a stream has read it."""
        assert self.kept_cast is not None
        cast, *_ = self.kept_cast
        for tensor in cast.inputs:
            keep_for(stream, tensor)

    def _state_of_cast(self, weight: Float8Weight) -> tuple[Any, ...]:
        """Return the facts that a kept cast depends on, to compare."""
        parameter = weight.master()
        versions = internals.version_of(self.plain), internals.version_of(parameter)
        flags = parameter.requires_grad, weight.config.keep_fsdp_float8_cast
        return int(self.valid), *versions, *flags, weight.gather(), current_capture()

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: _Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the unsharded weight for FSDP2, on the storage of the gathered bytes."""
        # FSDP2 keeps the weight with its buffers. They are inference tensors if the first gather
        # was in inference mode, and a normal tensor can't be on top of them.
        is_inference = all_gather_outputs[0].is_inference()
        with torch.inference_mode(is_inference), torch.no_grad():
            return self._unsharded(all_gather_outputs, metadata, param_dtype, out)

    def _unsharded(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: _Metadata,
        param_dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        data, *arrived = all_gather_outputs
        (kept, plan, arrives, moving), known, size = metadata
        (scheme,) = kept.schemes
        scales = list(known)
        for i, scale in zip(moving, arrived, strict=True):
            shape = scheme.levels[i].shape(size, scheme.start(arrives))
            scales[i] = scale.view(scheme.levels[i].scale).reshape(shape)
        if out is not None:
            # FSDP2 refilled the same storage. The scales are new; packed data is unpacked again.
            unsharded = local_tensor(out)
            assert isinstance(unsharded, Float8Tensor), type(unsharded)
            unsharded.set_scales(tuple(scales))
            if plan.packed:
                _unpack(data, unsharded.qdata, scheme)
            return None
        # FSDP2 itself allocates and frees the storage of its all-gather outputs, and of the inner
        # tensors that this method returns. The output is padded, and its shape is not the weight's
        # if a dim other than the first is sharded.
        if plan.packed:
            qdata = torch.empty(size, dtype=scheme.dtype, device=data.device)
            _unpack(data, qdata, scheme)
        else:
            qdata = unpadded(data, scheme.dtype, size)
        position = scheme.start(arrives), scheme.splits_blocks(arrives)
        weight = Quantized(qdata, tuple(scales), scheme, *position)
        return Float8Tensor.of(weight, param_dtype), (qdata,) if plan.packed else ()


def _cast_shard(
    shard: torch.Tensor, weight: Float8Weight, state: State, use: Use | None = None
) -> _ShardCast:
    """Cast a shard for FSDP2's gather.

    Args:
        shard: the plain shard, which with CPU offload is a copy.
        state: what decides its statistics.
        use: see :func:`fp8_dist.operand.prepare.cast_local`.

    Collectives: those of :meth:`State.statistics`. If scales of the whole weight are needed and
    not cached, those of :func:`fp8_dist.scaling.reduction.global_statistics`.
    """
    assert weight.fsdp is not None
    gather, shard = weight.gather(), shard.detach()
    plan = gather.plan.on(gather.kept.layout)
    scales: Scales = ()
    (scheme,), layout, whole = gather.kept.schemes, gather.kept.layout, gather.kept.whole
    with internals.normal_tensors():
        if whole:
            (statistics,) = state.statistics(shard, plan)
            parts = scheme.local_part(scheme.scales_from(statistics), gather.arrives)
            scales = tuple([scale.to(shard.device) for scale in parts])
            own = scheme.local_part(statistics, layout)
            (cast,), amax = cast_local(shard, plan, [own], use)
        else:
            (cast,), amax = cast_by_state(shard, plan, state, use)
        size, ranks = weight.fsdp.size, weight.fsdp.mesh.size()
        data = padded_shard(as_bytes(cast.qdata), size, ranks)
        # The bytes are a view of float8 data again, which tells an audit the payload's dtype.
        data = as_bytes(data.view(cast.qdata.dtype))
        moving = [cast.scales[i] for i in gather.moving]
        carried = [as_bytes(scale.contiguous().reshape(-1)) for scale in moving]
    # The metadata must not refer to the cast, whose memory it would keep.
    return _ShardCast((data, *carried), (gather, scales or cast.scales, size), amax)


@internals.normal_tensors()
def keep_casts(weights: Iterable[Float8Weight]) -> None:
    """Cast the shards that FSDP2 gathers in float8, for the gathers until the next update.

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
    """
    groups: dict[Any, list[tuple[Float8AllGatherWeight, Float8Weight]]] = {}
    waited: set[torch.cuda.Stream] = set()
    for weight in weights:
        shard = local_tensor(weight.master())
        if isinstance(shard, Float8AllGatherWeight):
            shard.drop_cast(waited)  # before the next casts, which take its memory
            if _can_keep(shard, weight):
                kind = _kind_of_cast(weight) or weight
                groups.setdefault((kind, shard.dtype, shard.device), []).append((shard, weight))
    for (kind, *_), group in groups.items():
        if isinstance(kind, tuple):
            casts = _cast_together(*kind, group)
        else:
            casts = [_cast_shard(s.plain, w, w.gather_state(s)) for s, w in group]
        for (shard, weight), cast in zip(group, casts, strict=True):
            shard.keep_cast(weight, cast)


def _can_keep(shard: Float8AllGatherWeight, weight: Float8Weight) -> bool:
    """Whether gathers may use a cast of now."""
    assert weight.fsdp is not None
    (module, _), history = weight.fsdp.users[0], weight.history
    is_known = history is None or (history.statistic is not None and weight.master().requires_grad)
    is_asked = module is weight.module  # FSDP2 passes this one to the hook
    is_used = weight.config.keep_fsdp_float8_cast and shard.device == weight.device
    return is_known and is_asked and is_used and _is_unobserved(shard.plain)


def _kind_of_cast(weight: Float8Weight) -> tuple[CastPlan, bool] | None:
    """The plan, and whether there is a history, of a shard that can be cast with others."""
    kept, plan, *_ = weight.gather()
    if not plan.schemes[0].casts_each or kept.whole or any(kept.start()):
        return None
    return plan, weight.history is not None


def _cast_together(
    plan: CastPlan, has_history: bool, group: Sequence[tuple[Float8AllGatherWeight, Float8Weight]]
) -> list[_ShardCast]:
    """:func:`_cast_shard` of shards of one dtype whose statistics are known, in one launch."""
    (scheme,), shards = plan.schemes, [shard.plain.detach() for shard, _ in group]
    sizes, padded = [], []
    for shard, (_, weight) in zip(shards, group, strict=True):
        assert weight.fsdp is not None
        sizes.append(size := weight.fsdp.size)
        *others, columns = padded_size(shard, size, weight.fsdp.mesh.size())
        padded.append((*others, columns // 2 if plan.packed else columns))
    amaxes: Sequence[torch.Tensor | None] = [None] * len(group)
    of_histories = [h.statistic for _, weight in group if (h := weight.history) is not None]
    if has_history:
        known = torch.stack([statistic for statistic in of_histories if statistic is not None])
        measured = amax_of_tensors(shards[0], shards[1:])
        # NaN if the amax is not finite, as in cast_and_measure: other ranks see the data alone.
        known = torch.add(known, measured, alpha=0)
        amaxes = measured.unbind()
    else:
        known = torch.cat([shard.known for shard, _ in group]).view(scheme.levels[0].statistic)
    lengths, casts = [math.prod(size) for size in padded], []
    data, scales = scheme.cast_each(shards, known, lengths, plan.packed)
    all_data, all_scales = data.split(lengths), scheme.parts_of(scales, shards)
    for i, (_, weight) in enumerate(group):
        gather, (scale,) = weight.gather(), all_scales[i]
        inputs = all_data[i].view(padded[i]), *([as_bytes(scale.view(-1))] if gather.moving else [])
        casts.append(_ShardCast(inputs, (gather, (scale,), sizes[i]), amaxes[i]))
    return casts


def _is_unobserved(shard: torch.Tensor) -> bool:
    """Whether a cast may be left out, because nothing looks at it or records it."""
    return internals.can_skip_dispatch(shard) and not is_observed()


def _unpack(data: torch.Tensor, qdata: torch.Tensor, scheme: Scheme) -> None:
    """Unpack an all-gather output, and free it: FSDP2 allocates it again for the next gather."""
    # Writes to inference tensors are not counted.
    counted = () if qdata.is_inference() else (qdata,)
    with internals.unnoticed_writes(counted):  # the backward reads the same tensor again
        scheme.unpack(data, qdata)
    data.untyped_storage().resize_(0)


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
    kept, plan, *_ = weight.gather()
    if not plan.packed:
        warn_once(
            "gather not packed",
            f"{weight.fqn} and layers like it: FSDP2 gathers their weights (and keeps frozen ones) "
            "as float8, 1 byte per element, because only equal shards of dim 0 with an even number "
            f"of columns can be packed, not {tuple(kept.layout.shape)} as "
            f"{list(kept.layout.placements)} on {kept.layout.mesh}",
        )
    return plan.packed


def unwrap_float8_weights(weights: Iterable[Float8Weight]) -> None:
    """Let FSDP2 gather weights in high precision, and drop the statistics of distributed ones."""
    for weight in [weight for weight in weights if weight.is_registered]:
        parameter = weight.parameter()
        if isinstance(parameter, DTensor):
            local = internals.dtensor_local(parameter)
            internals.set_dtensor_local(parameter, KnownWeight.unwrap(local))
        if weight.fsdp is not None:
            weight.fsdp.forget_hooks()
