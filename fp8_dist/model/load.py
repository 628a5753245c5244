"""Loading of FP8 checkpoints into models on any mesh. Each rank reads its part of the files.

The format is that of :mod:`fp8_dist.model.export`, and of the checkpoints of DeepSeek and Qwen.
Those of compressed-tensors and ModelOpt are read too. In all of them a weight is its float8 data
times its scales. In GPT-OSS's MXFP4 checkpoints, the data is ``NAME_blocks``, uint8 ``[..., N,
K / 32, 16]``, and the exponents are ``NAME_scales``, uint8 ``[..., N, K / 32]``. In those of
DeepSeek-V4 they are ``NAME.weight``, int8 ``[N, K / 2]``, and ``NAME.scale``, e8m0 ``[N, K / 32]``.
Entries that could mean something else raise an error that names them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8_dist.device import FLOAT8_DTYPES, is_float8, short_name
from fp8_dist.fsdp.gathers import reshard
from fp8_dist.kernels.e2m1 import unpack_e2m1
from fp8_dist.mesh import local_pieces, local_tensor, narrowed, regions, with_local
from fp8_dist.model.export import unwrapped, weights_by_key
from fp8_dist.moe.experts import ExpertWeight
from fp8_dist.text import without_wrappers
from fp8_dist.torch_internals import normal_tensors
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.stored import StoredScales
from fp8_dist.weight.stored_weight import check_values, checked_scales, counts, fitted
from fp8_dist.weight.weights import checked_module

# The names of dtypes in safetensors files: such as "F8_E5M2", and "F8_E4M3" for torch's e4m3fn.
_FLOAT8 = {f"F8_{short_name(dtype).removesuffix('fn').upper()}": dtype for dtype in FLOAT8_DTYPES}
# MXFP4 is read as e4m3. 32 values of a row share an exponent.
_MXFP4 = "MXFP4"
_GROUP = 32
_HALF = 16
_E4M3 = torch.float8_e4m3fn
_FLOAT8[_MXFP4] = _E4M3
_FLOAT = {"F64", "F32", "F16", "BF16", *_FLOAT8}
# Endings of the names of a weight's scales: DeepSeek's, and compressed-tensors' and ModelOpt's.
_SCALES = ("_scale_inv", "_scale")
_WEIGHT = re.compile(r"(?<=\.)weight$")  # "LAYER.scale" also has scales of "LAYER.weight"
# Names of the scales of activations and KV caches that were calibrated for inference.
_CALIBRATED = re.compile(r"(^|[._])(activation|input|output|prob|kv|[qkv])_scale(_ub)?$")
_BLOCKS = (128, 64, 32, 16)
_PROBE = 12
Index = tuple[slice, ...]


class Entry(NamedTuple):
    """An entry of a checkpoint, which has the values of (a part of) a model's tensor."""

    key: str
    offset: tuple[int, ...]  # of the part, with as many dims as the whole tensor
    size: tuple[int, ...]  # likewise; the entry in the file may lack leading dims of size 1


class _Mxfp4(NamedTuple):
    """The values of MXFP4 codes in a file, which are read as e4m3 ``[..., N, K]``."""

    key: str  # in the file
    codes: Any  # of safetensors, like the entries of other files
    is_transposed: bool = False  # read them as [..., K, N]

    def get_dtype(self) -> str:
        return _MXFP4

    @property
    def are_blocks(self) -> bool:
        """Whether the codes are ``[..., N, K / 32, 16]``, not ``[N, K / 2]``."""
        return self.codes.get_dtype() == "U8"

    def get_shape(self) -> list[int]:
        shape = self.codes.get_shape()
        if self.are_blocks:
            *others, n, groups, size = shape
            columns = 2 * groups * size
        else:
            *others, n, size = shape
            columns = 2 * size
        return [*others, columns, n] if self.is_transposed else [*others, n, columns]

    def __getitem__(self, index: Index) -> Tensor:
        *others, rows, columns = index
        if self.is_transposed:
            rows, columns = columns, rows
        first = columns.start // _GROUP
        end = -(-columns.stop // _GROUP)
        by = 1 if self.are_blocks else _HALF
        packed = self.codes[(*others, rows, slice(first * by, end * by))].flatten(len(others) + 1)
        data = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=_E4M3)
        unpack_e2m1(packed.view(torch.uint8).contiguous(), data)
        data = data[..., columns.start - first * _GROUP : columns.stop - first * _GROUP]
        return data.mT if self.is_transposed else data


class _Exponents(NamedTuple):
    """The exponents of MXFP4 blocks in a file, which are read as e8m0."""

    exponents: Any
    is_transposed: bool = False

    def get_dtype(self) -> str:
        return "F8_E8M0"

    def get_shape(self) -> list[int]:
        *others, n, groups = self.exponents.get_shape()
        return [*others, *([groups, n] if self.is_transposed else [n, groups])]

    def __getitem__(self, index: Any) -> Tensor:
        exponents = self.exponents[index]
        if self.is_transposed:
            exponents = exponents.mT
        return exponents.contiguous().view(torch.float8_e8m0fnu)


class _Files(dict[str, Any]):
    """The entries of safetensors files, which are read when they are indexed.

    Attributes:
        companions: for each entry, those that belong to it by their names: scales, offsets.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.companions: dict[str, list[str]] = {}
        for key in entries:
            self._find_mxfp4(key)
        owners = {key: key for key in self} | {self.named(key): key for key in self}
        for key in entries:
            for separator in re.finditer("[._]", key):
                name = key[: separator.start()]
                ending = key[separator.start() :]
                owner = owners.get(name)
                if ending.startswith(".zero_point"):  # "LAYER.zero_point" is of "LAYER.weight"
                    owner = owner or owners.get(f"{name}.weight")
                is_companion = "scal" in ending or "zero_point" in ending
                if owner is None or not is_companion:
                    continue
                if ending not in _SCALES and _CALIBRATED.search(key):
                    continue
                companions = self.companions.setdefault(owner, [])
                if key not in companions:
                    companions.append(key)

    def _find_mxfp4(self, key: str) -> None:
        """Join an entry and its scales by their names, if they are in MXFP4 or DeepSeek's."""
        if key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            is_mxfp4 = self.dtype(key) == "U8" and len(self.shape(key)) > 2
            if is_mxfp4 or f"{name}_scales" in self:
                self._join(key, name, f"{name}_scales")
                return
        scales = _WEIGHT.sub("scale", key)
        if scales != key and scales in self and self.dtype(scales) == "F8_E8M0":
            self.companions[key] = [scales]
            if self.dtype(key) == "I8":
                self._join(key, key, scales)

    def _join(self, key: str, name: str, scales_key: str) -> None:
        """Replace MXFP4 codes ``key`` by an entry ``name``, and their scales by exponents."""
        codes = self.pop(key)
        scales = self.get(scales_key)
        kind = codes.get_dtype()
        shape = list(codes.get_shape())
        of_scales = scales.get_dtype() if scales else "missing"
        size = list(scales.get_shape()) if scales else []
        if name == key:
            needed = ("I8", "F8_E8M0", [*size[:-1], *(_HALF * groups for groups in size[-1:])])
        else:
            needed = ("U8", "U8", [*size, _HALF])
        if name in self or len(size) < 2 or (kind, of_scales, shape) != needed:
            raise ValueError(
                f"load_float8_checkpoint: {key} is {kind} {shape}, and {scales_key} is {of_scales} "
                f"{size}. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] "
                "in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; "
                "save the checkpoint in the layout of GPT-OSS or DeepSeek-V4"
            )
        self[name] = _Mxfp4(key, codes)
        self[scales_key] = _Exponents(scales)
        self.companions[name] = [scales_key]

    def transpose(self, key: str) -> None:
        """Read an entry in MXFP4 as ``[..., K, N]``."""
        for name in (key, self.scales(key)):
            self[name] = self[name]._replace(is_transposed=True)

    def named(self, key: str) -> str:
        """The name of an entry in the files, for messages."""
        return self[key].key if self.dtype(key) == _MXFP4 else key

    def dtype(self, key: str) -> str:
        return str(self[key].get_dtype())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self[key].get_shape())

    def matrices(self, entry: Entry) -> tuple[int, ...]:
        """The shape of an entry. A 1-D entry of a matrix gets the leading dim of size 1."""
        return entry.size[-max(2, len(self.shape(entry.key))) :]

    def float8(self, key: str) -> torch.dtype | None:
        """The float8 dtype of an entry; ``None`` if it is not in float8."""
        return _FLOAT8.get(self.dtype(key))

    def scales(self, key: str) -> str:
        """The name of the scales of an entry in float8.

        Raises:
            ValueError: there are none, or several, or they have another name.
        """
        companions = self.companions.get(key, [])
        if self.dtype(key) == _MXFP4:
            if len(companions) == 1:
                return companions[0]
            raise ValueError(
                f"{self.named(key)} is in MXFP4, which has one tensor of exponents and no zero "
                f"points, but the checkpoint has {_some(companions)}; dequantize the checkpoint "
                "with the library that wrote it"
            )
        known = [key + ending for ending in _SCALES]
        if len(companions) != 1 or companions[0] not in (*known, _WEIGHT.sub("scale", key)):
            raise ValueError(
                f"{key} is in float8, and its scales in the checkpoint are {_some(companions)}. "
                f"It needs one tensor, {' or '.join(known)}; rename its scales, or dequantize the "
                "checkpoint with the library that wrote it"
            )
        return companions[0]


class LoadedKeys(NamedTuple):
    """The names that :func:`load_float8_checkpoint` did not find, or did not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@normal_tensors()
def load_float8_checkpoint(
    model: nn.Module, files: str | Path | Sequence[str | Path], *, strict: bool = True
) -> LoadedKeys:
    """Load an FP8 checkpoint from safetensors into a model, in place.

    Each rank reads the parts of the files that it has on its mesh. A weight that is stored in
    float8 (:func:`fp8_dist.freeze_to_float8`) gets the bytes of the files, or the cast of an entry
    in high precision. Saved again, the bytes are the same, but scales in 16 bits are saved in fp32.
    Other parameters get the values, rounded to their dtype. Float8 entries are dequantized in fp32
    first.

    The scales of ``NAME`` are ``NAME_scale_inv``, or ``NAME_scale`` as compressed-tensors and
    ModelOpt write them; those of ``LAYER.weight`` may also be ``LAYER.scale``, as DeepSeek writes
    them. One scale is ``[]``, ``[1]`` or ``[1, 1]``, those of rows are ``[N]`` or ``[N, 1]``, and
    those of square blocks of 128, 64, 32 or 16 values ``[ceil(N / 128), ceil(K / 128)]``. Scales of
    activations and of KV caches (``input_scale``, ``activation_scale``, ``k_scale``), which serve
    static inference, are not read: training has no use for them. They are not among the unexpected
    names.

    A large model is made on the meta device, converted, frozen and distributed there, and given
    memory by ``model.to_empty(device="cuda")`` before this call (``docs/frozen.md``).

    In MXFP4 checkpoints of GPT-OSS, ``NAME_blocks`` and ``NAME_scales`` are the weight ``NAME``; in
    those of DeepSeek-V4, ``NAME.weight`` in int8 and ``NAME.scale`` are. Weights that are stored in
    blocks of 1 x 32 get their codes and exponents, and others their values.

    Args:
        model: a model with or without converted layers. For a DDP model, names lack the wrapper.
            For one with PEFT's adapters, pass ``get_base_model()``; names lack ``base_layer``, and
            the adapters are missing (``strict=False``). For one of transformers, they may lack the
            prefix of the base model.
        files: a directory with ``*.safetensors`` files (and perhaps an index), one file, or several
            files that have different names. Needs the package ``safetensors``.
        strict: raise for names of the model that the files lack, and for names that only they have.

    Returns:
        The missing and unexpected names.

    Collectives: for each weight that is distributed and stored in float8, and whose entry is in
    high precision, those of :func:`fp8_dist.scaling.reduction.global_statistics`. No others.

    Raises:
        ValueError: there is no such file, or it is damaged; with ``strict``, names differ; an entry
            has another shape or kind than the model's tensor; an entry in float8 has no scales, or
            scales of another form than above or than in the layer's recipe; an expert's entry is
            not a part of a weight; an entry in float8, of a weight in four bits, has values that
            MXFP4 lacks; or a tensor is on the meta device. Nothing has been changed.
        TypeError: ``files`` is not a path or a list of paths.
        ImportError: ``safetensors`` is not installed.
    """
    module = unwrapped(checked_module(model))
    reshard(module, "load_float8_checkpoint")
    opened = _opened(_listed(files))
    parts, missing = _plan(module, opened)
    values = {entry.key for part in parts for entry in part.entries}
    used = values.union(*(opened.companions.get(key, ()) for key in values if opened.float8(key)))
    unexpected = [opened.named(k) for k in opened if k not in used and not _CALIBRATED.search(k)]
    if strict and (missing or unexpected):
        raise ValueError(
            "load_float8_checkpoint: the checkpoint and the model have other names: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}. Pass strict=False to load "
            "the rest"
        )
    for part in parts:
        _check(part, opened, values)
    for part in parts:
        _load(part, opened)
    return LoadedKeys(missing, unexpected)


class _Part(NamedTuple):
    """A parameter or buffer of the model, and the entries that have its values."""

    name: str
    tensor: Tensor
    weight: Float8Weight | None
    entries: list[Entry]


def _opened(paths: list[Path]) -> _Files:
    try:
        safe_open = import_module("safetensors").safe_open
    except ImportError as error:
        raise ImportError(
            "load_float8_checkpoint reads safetensors files: pip install safetensors"
        ) from error
    entries: dict[str, Any] = {}
    for path in paths:
        try:
            file = safe_open(str(path), framework="pt")
        except Exception as error:  # safetensors has its own class for damaged files
            raise _damaged(path, error) from error
        slices = {key: file.get_slice(key) for key in list(file.keys())}
        if twice := sorted(slices.keys() & entries.keys()):
            raise ValueError(
                f"load_float8_checkpoint: {path} has {_some(twice)}, which another file has too; "
                "pass the files of one checkpoint"
            )
        entries |= slices
    return _Files(entries)


def _damaged(path: Path, error: object) -> ValueError:
    return ValueError(
        f"load_float8_checkpoint: {path} can't be read ({error}); it is incomplete or damaged: "
        "download it, or save it, again"
    )


def float8_keys(files: Sequence[str]) -> list[str]:
    """Return the names of the float8 entries in the safetensors files among ``files``."""
    opened = _opened([Path(path) for path in files if path.endswith(".safetensors")])
    return [key for key in opened if opened.float8(key)]


def _listed(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the paths of the safetensors files."""
    given = [files] if isinstance(files, str | Path) else files
    if not (isinstance(given, Sequence) and all(isinstance(path, str | Path) for path in given)):
        raise TypeError(
            f"load_float8_checkpoint: expected a directory with *.safetensors, or files, got "
            f"{files!r}; pass a path, or a list of paths"
        )
    paths: list[Path] = []
    for path in map(Path, given):
        index = path / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = dict(json.loads(index.read_text())["weight_map"]).values()
                paths += [path / name for name in dict.fromkeys(names)]
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(index, repr(error)) from error
        else:
            paths += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if lacking := [str(path) for path in paths or map(Path, given) if not path.is_file()]:
        raise ValueError(
            f"load_float8_checkpoint: no safetensors file at {_some(lacking)}; pass a directory "
            "with *.safetensors, or the files"
        )
    return paths


def _plan(module: nn.Module, files: _Files) -> tuple[list[_Part], list[str]]:
    """Return the tensors of a model with their entries, and the names that the files lack."""
    prefix = f"{getattr(module, 'base_model_prefix', '')}."  # of transformers' models
    base = "" if any(key.startswith(prefix) for key in files) else prefix
    weights = {_own_name(k, files, base): weight for k, weight in weights_by_key(module).items()}
    # If checkpoints have other names for experts, they may have other names for routers, too.
    experts = next((w for w in weights.values() if isinstance(w, ExpertWeight)), None)
    parts: dict[int, _Part] = {}
    missing: dict[str, int] = {}
    for fqn, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or isinstance(local_tensor(tensor), StoredScales):
            continue
        name = _own_name(without_wrappers(fqn), files, base)
        weight = weights.get(name)
        if experts is not None and name not in files and not isinstance(weight, ExpertWeight):
            empty = torch.empty(tensor.shape, device="meta")
            name, *_ = experts.adapter.entries(module, name, empty)
        entries = _entries_of(module, weight, name, tensor)
        for key in [entry.key for entry in entries]:
            if key not in files or files.dtype(key) != _MXFP4:
                continue
            if isinstance(weight, ExpertWeight) and weight.is_transposed:
                files.transpose(key)
            if weight is None and tensor.ndim > 2:
                raise ValueError(
                    f"load_float8_checkpoint: {files.named(key)} is in MXFP4, and whether the "
                    "model has its matrices transposed is not known; call "
                    "convert_experts_to_float8_training"
                )
        lacking = [entry.key for entry in entries if entry.key not in files]
        missing |= dict.fromkeys(lacking, id(tensor))
        if not lacking:
            parts.setdefault(id(tensor), _Part(name, tensor, weight, entries))
    # One of the names of a tied parameter is enough.
    return list(parts.values()), [key for key, owner in missing.items() if owner not in parts]


def _own_name(key: str, files: _Files, base: str) -> str:
    """The name of a parameter before PEFT put adapters around its module, unless files have it.

    ``base``: the prefix of names that files of the base model lack.
    """
    name = key.removeprefix(base)
    return key if key in files else ".".join(p for p in name.split(".") if p != "base_layer")


def _entries_of(
    module: nn.Module, weight: Float8Weight | None, name: str, tensor: Tensor
) -> list[Entry]:
    """Return the entries of a checkpoint that have the values of a tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(weight, ExpertWeight):
        return [Entry(name, (0,) * len(shape), shape)]
    # A small tensor of distinct numbers shows which parts become entries.
    numbers = torch.arange(shape[0] * _PROBE**2).view(shape[0], _PROBE, _PROBE)
    entries = []
    for key, part in weight.adapter.entries(module, name, numbers).items():
        size = (*(1,) * (3 - part.ndim), *part.shape)
        first = [int(i) for i in torch.unravel_index(part.flatten()[0], numbers.shape)]
        dims = list(zip(shape, numbers.shape, first, size, strict=True))
        is_divided = any(o * n % p or m * n % p for n, p, o, m in dims)
        if is_divided or not torch.equal(narrowed(numbers, first, size).reshape(part.shape), part):
            raise ValueError(
                f"load_float8_checkpoint: {key} is not a part of a weight as it is stored; load "
                "the model with from_pretrained"
            )
        offset, sizes = zip(*[(o * n // p, m * n // p) for n, p, o, m in dims], strict=True)
        entries.append(Entry(key, offset, sizes))
    return entries


def _check(part: _Part, files: _Files, values: set[str]) -> None:
    """Check the entries of a tensor, by the headers of the files and by all scales.

    If a weight in four bits has entries in float8, they are read as a whole, so that all ranks
    raise the same errors.

    ``values``: the entries that are tensors of the model.
    """
    name, tensor, weight, entries = part
    dtype = tensor.dtype
    if local_tensor(tensor).is_meta:
        raise ValueError(
            f"load_float8_checkpoint: {name} is on the meta device; call model.to_empty first"
        )
    holds_codes = is_float8(dtype)  # of a layer of other code
    are_coded = not holds_codes and any(files.float8(entry.key) for entry in entries)
    for entry in entries:
        key = entry.key
        shape = files.shape(key)
        kind = files.dtype(key)
        if (*(1,) * (len(entry.size) - len(shape)), *shape) != entry.size:
            raise ValueError(
                f"load_float8_checkpoint: {files.named(key)} has values of shape {list(shape)}, "
                f"and the model has {list(entry.size)}"
            )
        is_same_kind = (kind in _FLOAT) == dtype.is_floating_point
        if not (files.float8(key) is dtype if holds_codes else is_same_kind):
            raise ValueError(
                f"{key} is in {kind} in the checkpoint, and in {dtype} in the model; codes and "
                "integers are not read as values. Dequantize the checkpoint with the library that "
                "wrote it"
            )
        scales = [name for name in files.companions.get(key, ()) if name not in values]
        if scales and (holds_codes or not files.float8(key)):
            raise ValueError(
                f"{key} is in {kind}, and the checkpoint has {_some(scales)} too; whether its "
                "values are to be multiplied is not known. Remove the scales from the checkpoint"
            )
        if are_coded and weight is not None and weight.is_stored:
            _first_block(weight, entry)
            if files.float8(key):
                _stored_scales(weight, entry, files)
                scheme = weight.held_scheme(weight.parameter())
                if kind != _MXFP4 and scheme.packed_dtype:
                    check_values(files[key][...], scheme, f"load_float8_checkpoint: {key}")
        elif are_coded and files.float8(key):
            _scales_of(entry, files)
        if kind == _MXFP4 and (files[files.scales(key)][...].view(torch.uint8) == 255).any():
            raise ValueError(
                f"load_float8_checkpoint: {files.scales(key)} has the exponent 255, NaN; download "
                "the checkpoint, or save it, again"
            )


def _load(part: _Part, files: _Files) -> None:
    _, tensor, weight, entries = part
    local = KnownWeight.unwrap(local_tensor(tensor))
    if weight is not None and (stored := weight.stored()) is not None:
        coded = [entry for entry in entries if files.float8(entry.key)]
        if plain := [entry for entry in entries if entry not in coded]:
            # Cast first, because entries in float8 replace their blocks of the cast.
            values = torch.zeros(local.shape, dtype=tensor.dtype)
            for entry in plain:
                _fill(values, tensor, entry, partial(_read, entry, files))
            stored.write(with_local(tensor, values.to(local.device)))
        local_scales, data = stored.local_scales, stored.local_data
        codes = data.unpacked(stored.scheme)
        for entry in coded:
            _fill(codes, tensor, entry, partial(_read, entry, files))
            scales_entry, scales, local_scales.saved_as = _stored_scales(weight, entry, files)
            _fill(local_scales.plain, stored.scales, scales_entry, scales.__getitem__)
        data.plain.copy_(data.with_data(codes, stored.scheme).plain)
        return
    for entry in entries:
        read = _dequantized if files.float8(entry.key) and not is_float8(tensor.dtype) else _read
        _fill(local.detach(), tensor, entry, partial(read, entry, files))


def _fill(to: Tensor, tensor: Tensor, entry: Entry, read: Callable[[Index], Tensor]) -> None:
    """Copy this rank's parts of an entry of ``tensor`` to the plain local tensor ``to``.

    ``read``: reads a part of the entry. Its index has all dims of the whole tensor.
    """
    for region in regions(local_pieces(tensor)):
        local_index = []
        index = []
        for at, local, n, first, m in zip(*region, entry.offset, entry.size, strict=True):
            begin = max(at, first)
            end = min(at + n, first + m)
            local_index.append(slice(local + begin - at, local + end - at))
            index.append(slice(begin - first, end - first))
        if all(part.start < part.stop for part in local_index):
            to[tuple(local_index)].copy_(read(tuple(index)))


def _read(entry: Entry, files: _Files, index: Index) -> Tensor:
    data = files[entry.key]
    lacking = len(index) - len(data.get_shape())
    values: Tensor = data[index[lacking:]][(None,) * lacking]
    return values


def _dequantized(entry: Entry, files: _Files, index: Index) -> Tensor:
    """Read a part of an entry in float8, times its scales, fp32."""
    scales, blocks = _scales_of(entry, files)
    row, column = (
        torch.arange(part.start, part.stop) // block
        for part, block in zip(index[-2:], blocks, strict=True)
    )
    values = _read(entry, files, index).to(torch.float32)
    return values * scales[index[:-2]][..., row, :][..., column]


def _scales_of(entry: Entry, files: _Files) -> tuple[Tensor, tuple[int, ...]]:
    """Return the scales of an entry, fp32, by block, and the size of a block.

    Raises:
        ValueError: the shape has no meaning or several, or :func:`checked_scales` refuses them.
    """
    key = files.scales(entry.key)
    shape = files.matrices(entry)
    scales = checked_scales(files[key][...], f"load_float8_checkpoint: {key}").to(torch.float32)
    numbers = counts(files.shape(key), shape)
    size = shape[-2:]
    blocks = [size, (1, size[-1]), *((block, block) for block in _BLOCKS)]
    if files.dtype(entry.key) == _MXFP4:
        blocks = [(_GROUP, 1) if files[entry.key].is_transposed else (1, _GROUP)]
    for block in blocks if len(size) == 2 else ():
        counted = [-(-n // b) for n, b in zip(size, block, strict=True)]
        if numbers in ([1] * len(shape), [*shape[:-2], *counted]):
            by_block = (*entry.size[:-2], *counted)
            return scales.view(() if scales.numel() == 1 else by_block).expand(by_block), block
    raise ValueError(
        f"load_float8_checkpoint: {key} is {list(files.shape(key))}, which is neither one scale "
        f"for {list(shape)}, nor one per row or per square block of {_BLOCKS}; dequantize the "
        "checkpoint with the library that wrote it"
    )


def _stored_scales(
    weight: Float8Weight, entry: Entry, files: _Files
) -> tuple[Entry, Tensor, torch.dtype]:
    """Return the entry of the scales, the scales as the weight stores them, and their dtype."""
    key = files.scales(entry.key)
    dtype = files.float8(entry.key)
    scheme = weight.held_scheme(weight.parameter())
    if dtype is not scheme.dtype:
        raise ValueError(
            f"load_float8_checkpoint: {files.named(entry.key)} is in {dtype}, and the layer's "
            f"recipe stores {scheme.dtype}; leave the layer out of freeze_to_float8"
        )
    scales = files[key][...]
    size = tuple(scheme.levels[0].shape(entry.size) or [1])
    stored = fitted(scales, files.matrices(entry), scheme, f"load_float8_checkpoint: {key}")
    return Entry(key, _first_block(weight, entry), size), stored.view(size), scales.dtype


def _first_block(weight: Float8Weight, entry: Entry) -> tuple[int, ...]:
    """Return where the scales of an entry begin among those of the weight.

    Raises:
        ValueError: the entry shares a scale with other entries of the weight.
    """
    scheme = weight.held_scheme(weight.parameter())
    shape = weight.parameter().shape
    (level,) = scheme.levels
    offset = []
    for dim, (n, at, size) in enumerate(zip(shape, entry.offset, entry.size, strict=True)):
        block = level.block(dim, len(shape)) or n
        end = at + size
        if at % block or (end % block and end != n):
            raise ValueError(
                f"load_float8_checkpoint: {entry.key} is a part of {weight.fqn}.{weight.name} that "
                f"shares a scale with other parts (one per {scheme.covers}); leave the "
                'experts out of freeze_to_float8, or convert them with "mxfp8" or "rowwise_folded"'
            )
        offset.append(at // block)
    return (0,) if level.is_scalar else tuple(offset)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return shown or "none"
