"""Weights that are stored in float8: their operands, state dict entries, and writes to them.

A stored weight is a pair of parameters of its module, ``NAME`` and ``NAME_scale_inv``
(:mod:`fp8_dist.weight.stored`). A forward multiplies the data without a cast.
"""

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fp8_dist import mesh
from fp8_dist.device import is_float8
from fp8_dist.kernels.blocks import fp32_scales
from fp8_dist.kernels.e2m1 import round_to_e2m1
from fp8_dist.mesh import Layout, local_tensor, with_local
from fp8_dist.operand.prepare import cast_local
from fp8_dist.operand.state import measured
from fp8_dist.scaling import CastPlan, Quantized, Scheme, operators
from fp8_dist.text import warn_once
from fp8_dist.weight.decoded import Decoded
from fp8_dist.weight.stored import PackedFloat8, Stored, StoredFloat8, StoredScales


class StoredWeight(NamedTuple):
    """A weight that is stored in float8: its two parameters, and how they are distributed.

    Attributes:
        fqn: the name of the module.
        name, scales_name: the names of the parameters in the module.
        data, scales: the parameters, sharded or unsharded.
        layout: the layout of ``data``.
        scheme: the scheme of the data: that of the layer's config, or one for storage alone.
    """

    fqn: str
    name: str
    scales_name: str
    data: torch.Tensor
    scales: torch.Tensor
    layout: Layout | None
    scheme: Scheme

    @property
    def local_data(self) -> StoredFloat8:
        """The local tensor of the data."""
        local = local_tensor(self.data)
        assert isinstance(local, StoredFloat8)
        return local

    @property
    def is_packed(self) -> bool:
        """Whether two values of the data share a byte."""
        return isinstance(self.local_data, PackedFloat8)

    @property
    def local_scales(self) -> StoredScales:
        """The local tensor of the scales."""
        local = local_tensor(self.scales)
        assert isinstance(local, StoredScales)
        return local

    def quantized(self) -> Quantized:
        """Return the local data and scales, as GEMMs take them.

        Raises:
            ValueError: the weight was stored for another config than the layer's, or requires
                gradients.
        """
        if self.data.requires_grad:
            raise ValueError(
                f"{self.fqn}: {self.name} requires gradients, but is stored in float8, where no "
                "optimizer can update it; call unfreeze_from_float8 to train it, or "
                "requires_grad_(False)"
            )
        return self._quantized(self.local_scales.plain)

    def _quantized(self, scales: torch.Tensor) -> Quantized:
        """Combine the local data with its scales, or with those of the whole weight."""
        local, scheme, layout = self.local_data, self.scheme, self.layout
        if scheme.key != local.key:
            raise ValueError(
                f"{self.fqn}: {self.name} is stored as {local.key}, and the layer's config has "
                f"{scheme.key}; choose the config before freeze_to_float8"
            )
        start = scheme.start(layout)
        (shape,) = scheme.scale_shapes(local.shape, start)
        if not shape:
            scales = scales.view(shape)
        elif list(scales.shape) != shape:
            assert layout is not None
            (scales,) = scheme.local_part((scales,), layout)
        if scheme.levels[0].scale is torch.float32:
            scales = fp32_scales(scales)
        return Quantized(
            local.unpacked(scheme), (scales,), scheme, start, scheme.splits_blocks(layout)
        )

    def dequantized(self) -> torch.Tensor:
        """Return the weight in high precision; a DTensor if it is distributed.

        Collectives: if it is distributed, an all-gather of its scales.
        """
        plain = with_local(self.scales, self.local_scales.plain)
        whole = plain.full_tensor() if isinstance(plain, DTensor) else plain
        return with_local(self.data, operators.dequantize(self._quantized(whole), self.data.dtype))

    def read(self) -> torch.Tensor:
        """Return the local part of the weight in high precision."""
        return operators.dequantize(self.quantized(), self.data.dtype)

    @torch.no_grad()
    def add(self, func: Any, *args: Any, **kwargs: Any) -> None:
        """Run an in-place operator on the local part in high precision, and cast it again.

        ``args``, ``kwargs``: the other arguments of the operator.

        Collectives: those of :meth:`dequantized` and :meth:`write`.
        """
        total = self.dequantized()
        func(local_tensor(total), *args, **kwargs)
        self.write(total)
        key, known = "merged into float8", ""
        if self.is_packed:  # a cast that may cost accuracy is reported for each weight
            values, cast = (local_tensor(x).to(torch.float32) for x in (total, self.dequantized()))
            sqnr = 10 * torch.log10(values.square().sum() / (values - cast).square().sum())
            key = f"{key}: {self.fqn}.{self.name}"
            known = f" with an SQNR of {sqnr.item():.1f} dB (of {self.name}, on this rank)"
        warn_once(
            key,
            f"{self.fqn}: a sum with a weight that is stored in float8 is cast to float8 again"
            f"{known}, and so is the difference when it is taken back: merging and unmerging an "
            "adapter does not restore the weight's bits",
        )

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Cast high-precision values to float8, and write them to the weight in place.

        ``values`` has the shape of the weight; a DTensor, if the weight is one.

        Collectives: if the weight is distributed, those of
        :func:`fp8_dist.scaling.reduction.global_statistics`.
        """
        qdata, scales = self.cast(values)
        data = self.local_data
        data.plain.copy_(data.with_data(qdata, self.scheme).plain)
        self.local_scales.plain.copy_(scales)

    def cast(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast values to the local parts of the data and of the scales."""
        layout, scheme = self.layout, self.scheme
        local = local_tensor(values).detach().to(local_tensor(self.data).device)
        plan = CastPlan((scheme,)).on(layout)
        (whole,) = measured(local, plan, whole=True)
        statistics = whole if layout is None else scheme.local_part(whole, layout)
        (cast,), _ = cast_local(local, plan, [statistics])
        (scales,) = scheme.scales_from(whole)
        scales = as_stored(scales.view(self.scales.shape), scheme)
        if isinstance(self.scales, DTensor):
            scales = mesh.taken(scales, mesh.local_pieces(self.scales))
        return cast.qdata, scales

    def entries(self) -> dict[str, torch.Tensor]:
        """The entries of a state dict: tensors that share memory with the parameters, or write to
        them (:class:`fp8_dist.weight.decoded.Decoded`). They are DTensors if the parameters are.
        """
        data, scheme = self.local_data.plain, self.scheme
        if self.is_packed:
            encode = partial(_packed, scheme=scheme, name=f"{self.fqn}: {self.name}")
            data = Decoded.of(data, partial(operators.unpack, scheme=scheme), encode)
        return {self.name: _entry(self.data, data), self.scales_name: self.scales_entry()}

    def scales_entry(self) -> torch.Tensor:
        """The entry of the scales: in fp32, or in e8m0 for exponents that were loaded in it."""
        scales, e8m0 = self.local_scales.plain, torch.float8_e8m0fnu
        if scales.dtype is torch.uint8 and self.local_scales.saved_as is e8m0:
            scales = scales.view(e8m0)
        elif scales.dtype is torch.uint8:
            name = f"{self.fqn}: {self.scales_name}"
            encode = partial(as_stored, scheme=self.scheme, name=name)
            scales = Decoded.of(scales, fp32_scales, encode)
        return _entry(self.scales, scales)

    def load(self, state: dict[str, Any], prefix: str) -> None:
        """Replace the entries of a state dict by tensors of the types of the parameters.

        Entries in high precision are cast, those in float8 are not changed.

        Collectives: for a DTensor in high precision, those of :meth:`write`.

        Raises:
            ValueError: the data or the scales have another dtype, the scales are missing or do not
                fit the scheme, or the data has values that the scheme lacks.
        """
        data, stored_scales, scheme = self.local_data, self.local_scales, self.scheme
        key, scales_key = prefix + self.name, prefix + self.scales_name
        entry: Any = state.get(key)
        is_alike = isinstance(entry, DTensor) == isinstance(self.data, DTensor)
        if entry is None or not is_alike or isinstance(local_tensor(entry), Stored):
            return  # load_state_dict reports an entry of another form
        local = Decoded.copied(local_tensor(entry))
        if not is_float8(local.dtype):
            qdata, scales = self.cast(entry)
        elif scales_key not in state or local.dtype is not scheme.dtype:
            raise ValueError(
                f"{self.fqn}: the state dict has {key} in {local.dtype}, and a weight that is "
                f"stored in float8 needs {scheme.dtype} and the scales {scales_key}; load a "
                "checkpoint that has both, or one in high precision"
            )
        else:
            qdata, scales = local, Decoded.copied(local_tensor(state[scales_key]))
            check_values(qdata, scheme, f"{self.fqn}: {key}")
            saved_as, name = scales.dtype, f"{self.fqn}: {scales_key}"
            is_part = scales.shape == stored_scales.shape  # the local tensor of a DTensor
            convert = as_stored if is_part else partial(fitted, shape=local.shape)
            scales = convert(scales, scheme=scheme, name=name)
            stored_scales.saved_as = saved_as
        state[key] = with_local(self.data, data.with_data(qdata, scheme))
        state[scales_key] = with_local(self.scales, stored_scales.like(scales))


def store_in_float8(weight: Any, cast: Quantized, packs: bool) -> None:
    """Replace a ``Float8Weight`` by two new parameters, for the data and the scales of a cast.

    ``packs``: whether the data is packed.
    """
    (qdata, (scales,), scheme, *_), dtype = cast, weight.parameter().dtype
    held = as_stored(scales if scales.ndim else scales.view(1), scheme)
    data = StoredFloat8(qdata, dtype, scheme.key)
    if packs:
        data = PackedFloat8(scheme.pack(qdata).view(torch.uint8), dtype, scheme.key, False)
    stored_scales = StoredScales(held, torch.float32, torch.float32)
    parameters = [nn.Parameter(tensor, requires_grad=False) for tensor in (data, stored_scales)]
    share(weight, *parameters)


def share(weight: Any, data: torch.Tensor, scales: nn.Parameter) -> None:
    """Register the parameters of a stored weight, which another layer may share."""
    weight.module.register_parameter(weight.scales_name, scales)
    weight.replace(data)
    bind(weight, weight.parameter())


def bind(weight: Any, parameter: Any) -> None:
    """Let a stored parameter, and all that is made from it, know its weight, which sums need.

    Other parameters, and None, are left as they are.
    """
    if isinstance(local := local_tensor(parameter), StoredFloat8):
        local.weight = weakref.ref(weight)


def place_scales(weight: Any, scales: torch.Tensor) -> None:
    """Distribute the scales of a stored weight like its data, which is on a 1-D mesh.

    They are replicated if ranks share scales.
    """
    layout, scheme = weight.layout(), weight.held_scheme(weight.parameter())
    (placement,), (level,), ndim = layout.placements, scheme.levels, len(layout.shape)
    dim = mesh.sharded_dim(placement, ndim)
    block = None if dim is None or level.is_scalar else level.block(dim, ndim)
    # Ranks with several pieces have whole blocks (Scheme.start has checked them).
    has_pieces = mesh.has_strided_placements(layout.placements)
    if block is None or (block > 1 and scheme.splits_blocks(layout) and not has_pieces):
        placement = Replicate()
    placed = distribute_tensor(scales.detach(), layout.mesh, [placement])
    share(weight, weight.parameter(), nn.Parameter(placed, requires_grad=False))


def check_has_no_codes(state: dict[str, Any], key: str, fqn: str) -> None:
    """Check that a state dict has no float8 data for a weight in high precision.

    Raises:
        ValueError: it has such data, which torch would load as values, without the scales.
    """
    entry = state.get(key)
    if isinstance(entry, torch.Tensor) and is_float8(dtype := local_tensor(entry).dtype):
        raise ValueError(
            f"{fqn}: the state dict has {key} in {dtype}, which load_state_dict would convert to "
            "the layer's high precision without its scales; call freeze_to_float8 before, or load "
            "the files with load_float8_checkpoint"
        )


class StoredEntry(DTensor):
    """Float8 data or e8m0 scales in a state dict, which are gathered as bytes.

    Backends such as gloo do not support these dtypes.
    """

    # (It inherits __slots__, by which torch copies DTensors.)
    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach()
        plain.__class__ = DTensor  # so that files load without this library
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied: DTensor = memo.get(id(self), self.clone())
        copied.__class__ = type(self)
        memo[id(self)] = copied
        return copied

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        local = local_tensor(self)
        moved = with_local(self, local.view(torch.uint8))
        moved = moved.redistribute(*args, **kwargs)  # type: ignore[attr-defined]
        entry = with_local(moved, local_tensor(moved).view(local.dtype))
        assert isinstance(entry, DTensor)
        return entry


def _packed(values: torch.Tensor, scheme: Scheme, name: str) -> torch.Tensor:
    """Pack float8 data; the checks are those of :func:`check_values`."""
    check_values(values, scheme, name)
    return scheme.pack(values).view(torch.uint8)


def _entry(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The entry of a state dict for a parameter, with a plain local tensor."""
    entry = with_local(parameter, local).detach()
    if isinstance(entry, DTensor) and local.itemsize == 1:
        entry.__class__ = StoredEntry
    return entry


def counts(scales: Sequence[int], entry: Sequence[int]) -> list[int]:
    """Return how many scales an entry of a checkpoint has along each dim, given both shapes.

    The scale of a whole tensor has one element, with any number of dims, and scales of rows are
    ``[N]`` or ``[N, 1]``.
    """
    if math.prod(scales) == 1:
        return [1] * len(entry)
    is_by_row = len(entry) == 2 and list(scales) == [entry[0]]
    return [entry[0], 1] if is_by_row else list(scales)


def check_values(qdata: torch.Tensor, scheme: Scheme, name: str) -> None:
    """Check that float8 data of a checkpoint has no values that a scheme of four bits lacks.

    Raises:
        ValueError: it has such values.
    """
    if scheme.packed_dtype is None or qdata.is_meta:
        return
    values = round_to_e2m1(qdata.to(torch.float32)).to(qdata.dtype)
    if not torch.equal(values.view(torch.uint8), qdata.view(torch.uint8)):
        raise ValueError(
            f"{name} has float8 values that MXFP4 does not have; load a checkpoint in high "
            'precision, which is cast, or convert the model without weight_format="mxfp4"'
        )


def checked_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """Return scales of a checkpoint in fp32, or in e8m0.

    Raises:
        ValueError: they are of another kind, such as exponents in uint8, or negative.
    """
    if scales.dtype is torch.float8_e8m0fnu:
        return scales
    if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} has the dtype {scales.dtype}; scales are float32, bfloat16, float16 or "
            "float8_e8m0fnu. Save them as one of these"
        )
    if not scales.is_meta and (scales < 0).any():
        raise ValueError(f"{name} has negative scales; no cast makes them. Save them again")
    return scales.to(torch.float32)


def fitted(scales: torch.Tensor, shape: Sequence[int], scheme: Scheme, name: str) -> torch.Tensor:
    """Convert a checkpoint's scales of an entry of ``shape`` to the form that is stored.

    Raises:
        ValueError: the scales cover other rows or blocks; or as :func:`as_stored`.
    """
    (level,) = scheme.levels
    size = level.shape(shape)
    if counts(scales.shape, shape) != (size or [1] * len(shape)):
        raise ValueError(
            f"{name} is {list(scales.shape)}, and the layer's recipe has one scale per "
            f"{scheme.covers}, {size or [1]}; convert the model with the recipe of the checkpoint: "
            '"blockwise" for scales of blocks, as DeepSeek\'s and Qwen\'s, "rowwise_folded" for '
            'those of rows, "tensorwise" for one; for MXFP4, freeze_to_float8(model, '
            'format="mxfp4", block_size=(1, 32))'
        )
    return as_stored(scales.reshape(size or [1]), scheme, name)


def as_stored(scales: torch.Tensor, scheme: Scheme, name: str | None = None) -> torch.Tensor:
    """Convert scales to the dtype in which they are stored: fp32, or uint8 for exponents.

    ``name``: the name of the entry, for scales from a checkpoint.

    Raises:
        ValueError: a checkpoint's scales are refused by :func:`checked_scales`, or are not powers
            of two, but the scheme has exponents.
    """
    if name is not None:
        scales = checked_scales(scales, name)
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if not scheme.has_exponents:
        return fp32_scales(scales)
    if scales.dtype is torch.uint8:
        return scales
    stored = (scales.view(torch.int32) >> 23).to(torch.uint8)
    if name is None or scales.is_meta:
        return stored
    # The exponent of NaN also encodes infinity.
    if not torch.equal(fp32_scales(stored).nan_to_num(), scales.nan_to_num(posinf=0.0)):
        raise ValueError(
            f"{name} are not powers of two, and the layer's scheme has exponents; convert the "
            'model with Float8LinearConfig.from_recipe_name("blockwise", scale_format="fp32") if '
            "they are those of blocks, or leave the layer out of freeze_to_float8, and call "
            "load_float8_checkpoint"
        )
    return stored
