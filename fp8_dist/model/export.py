"""Export of a model's weights in float8 or MXFP4, as a stream or as a state dict.

The format ``"float8"`` is that of Hugging Face's FP8 block checkpoints. Despite the name of
``NAME.weight_scale_inv``, the scale is not inverted: ``weight ~= data * scale``.

The format ``"mxfp4"`` is that of GPT-OSS's checkpoints, for weights of MXFP4. ``NAME_blocks``,
uint8 ``[..., N, K / 32, 16]``, has the codes of 32 values of a row in each 16 bytes.
``NAME_scales``, uint8 ``[..., N, K / 32]``, has the exponent of each such block, with a bias of
127. A cast has square blocks, so the rows of a square have the same exponents. Matrices of single
experts, ``NAME.weight``, are saved as those of DeepSeek-V4: the same codes are int8 ``[N, K / 2]``,
and the exponents ``NAME.scale``, e8m0 ``[N, K / 32]``.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from fp8_dist.config_text import config_text
from fp8_dist.kernels.blocks import fp32_scales
from fp8_dist.kernels.e2m1 import pack_e2m1
from fp8_dist.linear.module import other_users
from fp8_dist.mesh import Layout, full_tensors, local_tensor, this_rank, with_local
from fp8_dist.moe.experts import ExpertWeight, experts_config
from fp8_dist.operand.prepare import cast_local
from fp8_dist.scaling import BlockScheme, CastPlan, Mxfp4, Scheme, reduction
from fp8_dist.text import without_wrappers
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.stored_weight import as_stored
from fp8_dist.weight.weights import weights_of, weights_of_model

_Format = Literal["float8", "mxfp4"]

# The default size of a bucket: large enough for the full bandwidth of a network.
BUCKET_BYTES = 2**28


class WeightEntry(NamedTuple):
    """A whole tensor of :func:`iter_float8_weights`.

    Attributes:
        name: its name.
        tensor: float8_e4m3fn data, the codes or scales of MXFP4, or a tensor that is not converted,
            in its own dtype.
        scale_inv: the scale of each block of float8 data, fp32 (for a weight that is stored in
            float8, in the dtype in which it was loaded); ``None`` for other tensors.
    """

    name: str
    tensor: Tensor
    scale_inv: Tensor | None


class _Source(NamedTuple):
    """A tensor of a model's state dict."""

    value: Tensor
    weight: Float8Weight | None  # the weight that is saved in float8 or MXFP4, if it is one
    keys: list[str]  # its names in the state dict; several if layers share a weight
    dense: Float8Weight | None  # a float8 weight that is saved in high precision


def iter_float8_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    ranks: Collection[int] | None = None,
    format: _Format = "float8",
) -> Iterator[WeightEntry]:
    """Iterate over a model's tensors, with converted weights in float8 as GEMMs multiply them.

    Each item unpacks to a name, a tensor and the scales of its blocks. Names and tensors are those
    of :func:`fp8_dist.float8_state_dict`, byte for byte. Tensors that are not converted come in
    their own dtype, without scales. If the model's checkpoints store each expert separately, and
    the weight is whole, experts come one by one, under the names of these checkpoints.

    Weights are cast and gathered a bucket at a time. Besides the model and the tensors that the
    consumer keeps, a rank holds little more than one bucket.

    Call this function on all ranks, with the same arguments, and exhaust the iterator on all of
    them, also where it yields nothing, or stop after the same item. Ranks need not be in step
    within a bucket. A rank that stops earlier than others leaves them waiting in the next bucket's
    collective, until the timeout of the process group. The model must neither run nor change
    meanwhile.

    Args:
        model: a model with layers or experts that are converted by ``blockwise`` or ``mxfp8``. For
            a DDP model, the names don't contain the wrapper.
        bucket_bytes: the size of a bucket, in bytes of whole tensors as they are sent. A larger
            tensor is a bucket of its own.
        ranks: the global ranks that get tensors. The others take part in the collectives, and
            their iterators yield nothing. ``None`` means all ranks.
        format: ``"mxfp4"`` yields two items for each weight in MXFP4, ``NAME_blocks`` and
            ``NAME_scales`` (of a single expert's ``NAME.weight``: int8, and ``NAME.scale``, e8m0),
            whose ``scale_inv`` is ``None``, and other weights in high precision.
            Ranks still send 1 byte per element in MXFP4, and pack the gathered tensors.

    Returns:
        An iterator. Float8 data is on the device of the weight's mesh. Tensors that are neither
        cast nor gathered are those of the model.

    Collectives: for each bucket, and for each group of the axes that shard its weights: one
    all-reduce (MAX) of 1 byte per block (4 bytes for fp32 scales), and one all-gather of 1 byte per
    element. Tensors that are not converted are sent in the same all-gather, in their own dtype. The
    scales of weights that are stored in float8 need one all-gather, and no all-reduce.

    Raises:
        ValueError: no layer is converted; a layer's weight has no square blocks of float8_e4m3fn,
            or has other blocks than another layer; a module that is not converted shares a weight;
            a checkpoint divides the weight of an expert within a block; a weight is on the meta
            device; or ``bucket_bytes`` is not positive. ``format`` is neither ``"float8"`` nor
            ``"mxfp4"``. With ``"mxfp4"``: no weight is in MXFP4; 32 does not divide K; or a
            checkpoint transposes the weight of experts. On all ranks, when the iterator reaches the
            bucket: a block has a value that is not finite.
        NotImplementedError: a weight is a plain local tensor (``declare_placements``), or ranks
            have several pieces of a weight that cut blocks.
    """
    if bucket_bytes < 1:
        raise ValueError(f"iter_float8_weights: bucket_bytes is {bucket_bytes}; pass 1 or more")
    keeps = ranks is None or this_rank() in ranks
    return float8_stream(model, "iter_float8_weights", format, True, keeps, bucket_bytes)


def float8_state_dict(
    model: nn.Module,
    *,
    full_state_dict: bool = False,
    cpu_offload: bool = False,
    format: _Format = "float8",
) -> dict[str, Any]:
    """Return the state dict of a model, with converted weights in float8 as GEMMs multiply them.

    The names are those of ``get_model_state_dict``. For a converted layer, ``NAME.weight`` is
    ``[N, K]`` in float8_e4m3fn, and ``NAME.weight_scale_inv`` has one fp32 scale per block: it is
    ``[ceil(N / 128), ceil(K / 128)]`` for the recipe ``blockwise``. Blocks are 32 x 32 for
    ``mxfp8``. Biases and unconverted modules keep their dtypes.

    The weights ``[E, N, K]`` of transformers' experts become entries of single experts, under the
    names of the model's checkpoints, such as ``experts.3.up_proj.weight``. Where they stay
    DTensors, and for models whose checkpoints do not divide them, an entry is the whole weight
    ``NAME``, and ``NAME_scale_inv`` is ``[E, ceil(N / 128), ceil(K / 128)]``.

    Data and scales are bit for bit the operands that the next forward multiplies on any mesh. If
    FSDP2 gathers a weight in the dtype of ``MixedPrecisionPolicy(param_dtype=...)``, the weight is
    rounded to that dtype first here, too. Call this function on all ranks.

    Args:
        model: a model with layers or experts that are converted by ``blockwise`` or ``mxfp8``. For
            a DDP model, the names don't contain the wrapper.
        full_state_dict: gather full tensors. Otherwise the weight of a distributed parameter is a
            DTensor with the same placements, and its scales are a replicated DTensor, because
            shards may cut blocks.
        cpu_offload: move tensors to the CPU. With ``full_state_dict``, only rank 0 gets them, and
            other ranks get an empty dict, as with torch's ``StateDictOptions``.
        format: ``"mxfp4"`` replaces both entries of a weight in MXFP4 by ``NAME_blocks``, uint8
            ``[..., N, K / 32, 16]``, and ``NAME_scales``, uint8 ``[..., N, K / 32]``: the layout of
            GPT-OSS's checkpoints. The matrix ``NAME.weight`` of a single expert becomes int8
            ``[N, K / 2]``, and ``NAME.scale``, e8m0 ``[N, K / 32]``, as in DeepSeek-V4's. A weight
            that is stored as ``[E, K, N]`` is transposed first.
            Other weights are in high precision, as those of unconverted modules. ``"float8"``
            exports the same values of an MXFP4 model as float8_e4m3fn.

    Collectives: those of :func:`fp8_dist.iter_float8_weights`; this function collects its stream.

    Raises: the errors of that function; with ``"mxfp4"``, without ``full_state_dict``, also:
        ValueError: ranks have parts of a block of 32 values along K.
    """
    keeps = this_rank() == 0 or not (full_state_dict and cpu_offload)
    state: dict[str, Any] = {}
    arguments = "float8_state_dict", format, full_state_dict, keeps, BUCKET_BYTES
    for name, tensor, scales in float8_stream(model, *arguments):
        state[name] = tensor.cpu() if cpu_offload else tensor
        if scales is not None:
            state[f"{name}_scale_inv"] = scales.cpu() if cpu_offload else scales
    if keeps:
        plain = get_model_state_dict(unwrapped(model))
        state |= {k: extra for k, extra in plain.items() if not isinstance(extra, Tensor)}
    return state


def float8_quantization_config(model: nn.Module, *, format: _Format = "float8") -> dict[str, Any]:
    """Return the ``quantization_config`` for the config.json of a :func:`float8_state_dict`.

    ``format``: the format of the state dict. With ``"mxfp4"``, modules without weights in MXFP4
    count as unconverted.

    Returns:
        Plain data. ``modules_to_not_convert`` lists the unconverted modules that have matrices of
        their own, except for embeddings and for modules that contain converted layers. It is always
        present: loaders would otherwise assume that the head is in high precision. With
        ``"mxfp4"`` the only other entry is ``quant_method``.

    Collectives: none.

    Raises: the errors of :func:`float8_state_dict`, except those about shapes, shards and values
    in MXFP4.
    """
    model = unwrapped(model)
    weights, blocks = checked_weights(model, "float8_quantization_config", format)
    converted = {weight.module for weight in weights.values()}
    in_high_precision = [
        without_wrappers(name)
        for name, module in model.named_modules()
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        and not isinstance(module, nn.Embedding)
        and converted.isdisjoint(module.modules())
    ]
    if format == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": in_high_precision}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [blocks.rows, blocks.columns],
        "modules_to_not_convert": in_high_precision,
    }


def float8_stream(
    model: nn.Module, caller: str, format: _Format, gather: bool, keeps: bool, bucket_bytes: int
) -> Iterator[WeightEntry]:
    """Check a model, and iterate over its tensors in float8 or MXFP4.

    Without ``gather``, tensors of distributed parameters are DTensors, and so are their scales,
    replicated. ``keeps``: whether this rank gets tensors. For all else see
    :func:`iter_float8_weights`, whose errors this call raises.
    """
    model = unwrapped(model)
    (weights, _), packs = checked_weights(model, caller, format), format == "mxfp4"
    known = weights_by_key(model)
    scales = {f"{key}_scale_inv" for key, weight in known.items() if weight.is_stored}
    sources: dict[object, _Source] = {}
    # get_model_state_dict reshards the parameters that FSDP2 has gathered. It moves the entries of
    # modules that torch.compile wraps to the end; here all are in the order of the model.
    state = get_model_state_dict(model)
    ordered = {key: state[key] for key in map(without_wrappers, model.state_dict()) if key in state}
    for key, value in (ordered | state).items():
        if not isinstance(value, Tensor) or key in scales:  # which are sent with weights
            continue
        source = _Source(value, weights.get(key), [], None if key in weights else known.get(key))
        if (weight := source.weight) is not None:
            scheme = weight.held_scheme(weight.parameter())
            scheme.start(Layout.of(weight.parameter()))  # raises if it can't be cast
            if packs and (why := _why_not_packed(model, key, weight, gather)):
                raise ValueError(f"{caller}: {key}, {list(value.shape)}, {why}")
        # Layers may share a weight, which is cast once.
        sources.setdefault(id(weight.parameter()) if weight else key, source).keys.append(key)

    def stream() -> Iterator[WeightEntry]:
        for bucket in _buckets(sources.values(), bucket_bytes):
            tensors, scales = _cast(bucket, gather)
            for source, blocks in zip(bucket, scales, strict=True):
                if packs and blocks is not None and not fp32_scales(blocks).isfinite().all():
                    raise ValueError(
                        f"{source.keys[0]} has a block with NaN or infinity, which MXFP4 doesn't "
                        "have; load an earlier checkpoint, and export that"
                    )
            # All messages of a bucket are exchanged before its first tensor is yielded.
            sent = full_tensors(tensors) if gather else iter(tensors)
            if keeps:
                for source, blocks in zip(bucket, scales, strict=True):
                    yield from _entries(model, source, next(sent), blocks, packs)

    return stream()


def _entries(
    model: nn.Module, source: _Source, tensor: Tensor, scales: Tensor | None, packs: bool
) -> Iterator[WeightEntry]:
    if (weight := source.weight) is None or scales is None:
        yield from (WeightEntry(key, tensor, None) for key in source.keys)
        return
    if packs:
        tensor, scales = _packed(weight, tensor, scales)
    if (layout := Layout.of(tensor)) is not None:
        # The scales are on the device of the data.
        scales = Layout(layout.mesh, (Replicate(),) * layout.mesh.ndim, scales.shape).wrap(scales)
    for key in source.keys:
        data_parts, scale_parts = (
            {key: x} if layout is not None else entries_of(model, weight, key, x)
            for x in (tensor, scales)
        )
        for name, data in data_parts.items():
            if packs and isinstance(weight, ExpertWeight) and name.endswith(".weight"):
                yield WeightEntry(name, data.flatten(-2).view(torch.int8), None)
                exponents = scale_parts[name].view(torch.float8_e8m0fnu)
                yield WeightEntry(f"{name.removesuffix('weight')}scale", exponents, None)
            elif packs:
                yield WeightEntry(f"{name}_blocks", data, None)
                yield WeightEntry(f"{name}_scales", scale_parts[name], None)
            else:
                yield WeightEntry(name, data, scale_parts[name])


def _contracted_dim(weight: Float8Weight) -> int:
    """The dim K of a weight, along which MXFP4 has blocks."""
    return -2 if isinstance(weight, ExpertWeight) and weight.is_transposed else -1


def _saved_scheme(weight: Float8Weight) -> Scheme:
    """The scheme of a weight as ``[..., N, K]``."""
    scheme = weight.held_scheme(weight.parameter())
    is_turned = isinstance(scheme, BlockScheme) and _contracted_dim(weight) == -2
    return scheme.transposed_scheme if is_turned else scheme


def _packed(weight: Float8Weight, tensor: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed blocks of an MXFP4 weight, a DTensor if ``tensor`` is one, and scales."""
    if _contracted_dim(weight) == -2:
        tensor, scales = tensor.mT, scales.mT
    scheme, n, k = _saved_scheme(weight), *tensor.shape[-2:]
    assert isinstance(scheme, Mxfp4)
    local = local_tensor(tensor)
    blocks = pack_e2m1(local).view(*local.shape[:-1], local.shape[-1] // 32, 16)
    if (layout := Layout.of(tensor)) is not None:
        blocks = layout._replace(shape=torch.Size([*tensor.shape[:-1], k // 32, 16])).wrap(blocks)
    row = torch.arange(n, device=scales.device) // scheme.rows
    column = torch.arange(0, k, 32, device=scales.device) // scheme.columns
    return blocks, as_stored(scales, scheme)[..., row.unsqueeze(1), column]


def _why_not_packed(model: nn.Module, name: str, weight: Float8Weight, gather: bool) -> str | None:
    """The reason why a weight of this shape and layout can't be exported in MXFP4, or ``None``."""
    shape, layout = weight.parameter().shape, Layout.of(weight.parameter())
    k = _contracted_dim(weight)
    if shape[k] % 32:
        return f'has K = {shape[k]}, and MXFP4 has whole blocks of 32; pass format="float8"'
    rows = torch.empty((*shape[:-2], shape[-3 - k], 1, 16), device="meta")
    if any(part.shape[-2:] != (1, 16) for part in entries_of(model, weight, name, rows).values()):
        return 'is transposed as it is saved, and blocks can\'t be; pass format="float8"'
    if layout is not None and not gather and layout.cuts_blocks(k, 32):
        return (
            f"is placed as {list(layout.placements)}, and ranks have parts of blocks of 32 values, "
            "which MXFP4 packs together; pass full_state_dict=True"
        )
    return None


def _buckets(sources: Iterable[_Source], size: int) -> Iterator[list[_Source]]:
    bucket, total = list[_Source](), 0
    for source in sources:
        sent = source.value.numel() * (1 if source.weight else source.value.dtype.itemsize)
        if bucket and total + sent > size:
            yield bucket
            bucket, total = [], 0
        bucket.append(source)
        total += sent
    yield bucket


@torch.no_grad()
def _cast(
    bucket: Sequence[_Source], stays_on_mesh: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Cast the weights of a bucket as a forward does. Scales are those of all blocks of a weight.

    Collectives: those of ``global_statistics``, and of ``full_tensors`` for the scales
    of weights that are stored in float8.
    """
    tensors = [x.value if x.dense is None else x.dense.high_precision() for x in bucket]
    weights = {i: source.weight for i, source in enumerate(bucket) if source.weight is not None}
    stored = {i: parts for i, weight in weights.items() if (parts := weight.stored()) is not None}
    gathered = full_tensors([parts.scales_entry() for parts in stored.values()])
    scales = dict(zip(stored, gathered, strict=True))
    measured = {}
    for i, weight in weights.items():
        if i not in stored:
            (scheme,), layout = weight.schemes, Layout.of(weight.parameter())
            measured[i] = scheme, scheme.measure(_shard(weight), scheme.start(layout)), layout
    wholes = reduction.global_statistics([*measured.values()])
    for (i, (scheme, _, layout)), whole in zip(measured.items(), wholes, strict=True):
        shard, parameter = _shard(weights[i]), weights[i].parameter()
        statistics = whole if layout is None else scheme.local_part(whole, layout)
        (cast,), _ = cast_local(shard, CastPlan((scheme,)).on(layout), [statistics])
        device = shard.device if stays_on_mesh else parameter.device
        tensors[i] = with_local(parameter, cast.qdata.to(device))
        scales[i] = fp32_scales(scheme.scales_from(whole)[0]).to(device)
    return tensors, [scales.get(i) for i in range(len(bucket))]


def _shard(weight: Float8Weight) -> Tensor:
    """The values of a weight that are cast, on the device of the mesh."""
    parameter, shard = weight.parameter(), weight.shard()
    if isinstance(parameter, DTensor):  # collectives need it; FSDP2 may offload to the CPU
        shard = shard.to(parameter.device_mesh.device_type)
    return shard.detach().to(weight.gathered_as or shard.dtype)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers of DDP and of ``torch.compile``."""
    while inner := model._modules.get("_orig_mod") or (
        model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
    ):
        model = inner
    return model


def weights_by_key(model: nn.Module) -> dict[str, Float8Weight]:
    """Return the float8 weights by their keys in ``state_dict()``. Shared ones have several."""
    return {
        f"{without_wrappers(fqn)}.{name}".removeprefix("."): weight
        for fqn, module in model.named_modules(remove_duplicate=False)
        for name, weight in weights_of(module).items()
    }


def checked_weights(
    model: nn.Module, caller: str, format: _Format
) -> tuple[dict[str, Float8Weight], BlockScheme]:
    """Return the float8 weights by their state-dict keys, and their scheme.

    With ``"mxfp4"``, these are the weights in MXFP4, and others are saved in high precision.

    Raises:
        ValueError: there is no converted layer, a layer can't be exported, or the format is not
            known.
        NotImplementedError: a weight is a plain local tensor (``declare_placements``).
    """
    if format not in get_args(_Format):
        raise ValueError(f"{caller}: format is {format!r}; pass one of {list(get_args(_Format))}")
    converted = weights_of_model(model, caller)
    for name, weight in converted.items():
        if getattr(weight.module, "local_placements", None) is not None:
            raise NotImplementedError(
                f"{caller}: {name} is a plain local tensor (declare_placements), and "
                "where its other parameters belong is not known; load the state dict into a model "
                "that is not parallelized, and export that"
            )
    schemes = {name: _saved_scheme(weight) for name, weight in converted.items() if weight.schemes}
    in_mxfp4 = {name: converted[name] for name in schemes if isinstance(schemes[name], Mxfp4)}
    converted = in_mxfp4 or converted if format == "mxfp4" else converted
    first_name, first = next(iter(converted.items()))
    for name, weight in converted.items():
        blocks = _saved_scheme(weight) if len(weight.schemes) == 1 or weight.is_stored else None
        if (
            not isinstance(blocks, Mxfp4 if format == "mxfp4" else BlockScheme)
            or (format == "float8" and blocks.rows != blocks.columns)
            or blocks.dtype is not torch.float8_e4m3fn
        ):
            config = experts_config(weight.module) or config_text(weight.config)
            needed = "float8_e4m3fn weights with one scale per square block"
            remedy = 'the recipe "blockwise"'
            if format == "mxfp4":
                needed, remedy = "weights in MXFP4", 'weight_format="mxfp4"'
            raise ValueError(
                f"{caller}: {name} was converted with {config}, but a checkpoint in {format} holds "
                f"{needed}; load the state dict into a model that was converted with {remedy}, and "
                "export that"
            )
        if blocks != _saved_scheme(first):
            raise ValueError(
                f"{caller}: {first_name} and {name} are in blocks of different sizes or rules, "
                "but a checkpoint has one weight_block_size; convert all layers with one recipe"
            )
        if weight.parameter().is_meta:
            raise ValueError(
                f"{caller}: {name} is on the meta device and has no values; load a checkpoint first"
            )
    parameters = {name: weight.parameter() for name, weight in converted.items()}
    if shared := other_users(model, parameters, [w.module for w in converted.values()]):
        raise ValueError(
            f"{caller}: {'; '.join(shared)}, which would stay in high precision; leave the layer "
            "unconverted (module_filter_fn), or untie the weights"
        )
    weights = {k: w for k, w in weights_by_key(model).items() if w in converted.values()}
    assert isinstance(blocks, BlockScheme)
    for name, weight in weights.items():
        whole = torch.empty(weight.parameter().shape, device="meta")
        sizes = whole.shape[-2:]
        for part in entries_of(model, weight, name, whole).values():
            held = weight.held_scheme(weight.parameter())
            assert isinstance(held, BlockScheme)
            dims = zip(part.shape[-2:], sizes, (held.rows, held.columns), strict=True)
            if any(size != whole_size and size % block for size, whole_size, block in dims):
                raise ValueError(
                    f"{caller}: checkpoints divide {name}, {list(sizes)}, into parts of "
                    f"{list(part.shape)}, which cut blocks of {held.rows} x {held.columns}; "
                    "leave the experts unconverted (module_filter_fn), or convert with the recipe "
                    '"mxfp8", whose blocks are 32 x 32'
                )
    return weights, blocks


def entries_of(
    model: nn.Module, weight: Float8Weight, name: str, tensor: Tensor
) -> dict[str, Tensor]:
    """The entries of a checkpoint for a whole float8 weight, or for its scales."""
    if isinstance(weight, ExpertWeight):
        return weight.adapter.entries(model, name, tensor)
    return {name: tensor}
