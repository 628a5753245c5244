"""Loading of FP8 checkpoints into models on any mesh, each rank its own part of the files.

The format is that of :mod:`fp8_dist.model.export`, and of the checkpoints of DeepSeek and Qwen.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from fp8_dist.fsdp.gathers import reshard
from fp8_dist.linear.stored import as_stored
from fp8_dist.linear.weight import Float8Weight, checked_module
from fp8_dist.linear.weight_cache import Change
from fp8_dist.mesh import local_tensor, own_pieces, regions, with_local
from fp8_dist.model.export import unwrapped, weights_by_key
from fp8_dist.moe.experts import ExpertWeight
from fp8_dist.tensor.stored import Stored, StoredScales
from fp8_dist.text import without_wrappers

_SCALE = "_scale_inv"
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # safetensors' names
_BLOCKS = (128, 64, 32, 16)
_PROBE = 12
Index = tuple[slice, ...]
# The entries of safetensors files, which are read when they are indexed.
_Files = Mapping[str, Any]


class LoadedKeys(NamedTuple):
    """The names that :func:`load_float8_checkpoint` did not find, or did not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Entry(NamedTuple):
    """An entry of a checkpoint, and the part of a model's tensor that it has the values of."""

    key: str
    offset: tuple[int, ...]  # of the part, with as many dims as the whole tensor
    size: tuple[int, ...]  # likewise; the entry itself may lack leading dims of size 1


@torch.no_grad()
def load_float8_checkpoint(
    model: nn.Module, files: str | Path | Sequence[str | Path], *, strict: bool = True
) -> LoadedKeys:
    """Load an FP8 checkpoint from safetensors into a model, in place.

    Each rank reads the parts of the files that it has on its mesh. A weight that is stored in
    float8 (:func:`fp8_dist.freeze_to_float8`) gets the bytes of the files, or the cast of an entry
    in high precision. Saved again, the bytes are the same. Other parameters get the values, rounded
    to their dtype; those of float8 entries are dequantized in fp32.

    A large model is made on the meta device, converted, frozen and distributed there, and given
    memory by ``model.to_empty(device="cuda")`` before this call (``docs/frozen.md``).

    Args:
        model: a model with or without converted layers. For a DDP model, names lack the wrapper.
        files: a directory with ``*.safetensors`` files (and perhaps an index), one file, or several
            files. Needs the package ``safetensors``.
        strict: raise for names of the model that the files lack, and for others that they have.

    Returns:
        The missing and unexpected names.

    Collectives: for each weight that is distributed and stored in float8, and whose entry is in
    high precision, those of :func:`fp8_dist.scaling.whole_statistics`. No others.

    Raises:
        ValueError: there is no such file; with ``strict``, names differ; an entry has another shape
            than the model's tensor, or other scales than the layer's recipe; an expert's entry is
            not a part of a weight; or a tensor is on the meta device. Nothing has been changed.
        ImportError: ``safetensors`` is not installed.
    """
    module = unwrapped(checked_module(model))
    reshard(module, "load_float8_checkpoint")
    opened = _opened(_listed(files))
    parts, missing = _plan(module, opened)
    used = {entry.key for part in parts for entry in part.entries}
    used |= {key + _SCALE for key in used if _float8(opened[key])}
    unexpected = [key for key in opened if key not in used]
    if strict and (missing or unexpected):
        raise ValueError(
            "load_float8_checkpoint: the checkpoint and the model have other names: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}. Pass strict=False to load "
            "the rest"
        )
    for part in parts:
        _check(part, opened)
    for part in parts:
        _load(part, opened)
    return LoadedKeys(missing, unexpected)


class _Part(NamedTuple):
    """A parameter or buffer of the model, and the entries that have its values."""

    name: str
    tensor: torch.Tensor
    weight: Float8Weight | None
    entries: list[Entry]


def _opened(paths: list[Path]) -> _Files:
    try:
        safe_open = import_module("safetensors").safe_open
    except ImportError as error:
        raise ImportError(
            "load_float8_checkpoint reads safetensors files: pip install safetensors"
        ) from error
    files = [safe_open(str(path), framework="pt") for path in paths]
    return {key: file.get_slice(key) for file in files for key in list(file.keys())}


def _float8(entry: Any) -> torch.dtype | None:
    """The dtype of an entry in float8; ``None`` for others."""
    return _FLOAT8.get(str(entry.get_dtype()))


def float8_entries(files: Sequence[str]) -> list[str]:
    """Return the names of the weights in float8 of safetensors files."""
    opened = _opened([Path(each) for each in files if each.endswith(".safetensors")])
    return [key for key in opened if key + _SCALE in opened]


def _listed(files: str | Path | Sequence[str | Path]) -> list[Path]:
    given = [Path(files)] if isinstance(files, str | Path) else [Path(each) for each in files]
    found: list[Path] = []
    for path in given:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"].values()
            found += [path / name for name in dict.fromkeys(names)]
        else:
            found += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if lacking := [str(path) for path in found or given if not path.is_file()]:
        raise ValueError(
            f"load_float8_checkpoint: no safetensors file at {_some(lacking)}; pass a directory "
            "with *.safetensors, or the files"
        )
    return found


def _plan(module: nn.Module, files: _Files) -> tuple[list[_Part], list[str]]:
    """Assign entries to the tensors of a model; return the names that the files lack, too."""
    weights = weights_by_key(module)
    # The checkpoints of a library's models with experts have other names for routers, too.
    experts = next((each for each in weights.values() if isinstance(each, ExpertWeight)), None)
    parts: dict[int, _Part] = {}
    missing: dict[str, int] = {}
    for fqn, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or isinstance(local_tensor(tensor), StoredScales):
            continue
        name = without_wrappers(fqn)
        weight = weights.get(name)
        if experts is not None and name not in files and not isinstance(weight, ExpertWeight):
            whole = torch.empty(tensor.shape, device="meta")
            name, *_ = experts.kind.entries(module, name, whole)
        entries = _entries_of(module, weight, name, tensor)
        lacking = [entry.key for entry in entries if entry.key not in files]
        missing |= dict.fromkeys(lacking, id(tensor))
        if not lacking:
            parts.setdefault(id(tensor), _Part(name, tensor, weight, entries))
    # One of the names of a tied parameter is enough.
    return list(parts.values()), [key for key, owner in missing.items() if owner not in parts]


def _entries_of(
    module: nn.Module, weight: Float8Weight | None, name: str, tensor: torch.Tensor
) -> list[Entry]:
    """Return the entries of a checkpoint that have the values of a tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(weight, ExpertWeight):
        return [Entry(name, (0,) * len(shape), shape)]
    # The entries of a small tensor of distinct numbers show which parts they are.
    numbers = torch.arange(shape[0] * _PROBE**2).view(shape[0], _PROBE, _PROBE)
    found = []
    for key, part in weight.kind.entries(module, name, numbers).items():
        size = (*(1,) * (3 - part.ndim), *part.shape)
        first = int(part.flatten()[0])
        offset = (first // _PROBE**2, first // _PROBE % _PROBE, first % _PROBE)
        taken = numbers[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        each = list(zip(shape[1:], offset[1:], size[1:], strict=True))
        is_cut = any(o * n % _PROBE or m * n % _PROBE for n, o, m in each)
        if is_cut or not torch.equal(taken.reshape(part.shape), part):
            raise ValueError(
                f"load_float8_checkpoint: {key} is not a part of a weight as it is stored; load "
                "the model with from_pretrained"
            )
        rows, columns = [(o * n // _PROBE, m * n // _PROBE) for n, o, m in each]
        found.append(Entry(key, (offset[0], rows[0], columns[0]), (size[0], rows[1], columns[1])))
    return found


def _check(part: _Part, files: _Files) -> None:
    """Check the entries of a tensor, by the headers of the files and by all scales."""
    name, tensor, weight, entries = part
    if local_tensor(tensor).is_meta:
        raise ValueError(
            f"load_float8_checkpoint: {name} is on the meta device; call model.to_empty first"
        )
    for entry in entries:
        shape = tuple(files[entry.key].get_shape())
        if (*(1,) * (len(entry.size) - len(shape)), *shape) != entry.size:
            raise ValueError(
                f"load_float8_checkpoint: {entry.key} is {list(shape)} in the checkpoint, and "
                f"{list(entry.size)} in the model"
            )
        if _float8(files[entry.key]):
            if entry.key + _SCALE not in files:
                raise ValueError(
                    f"load_float8_checkpoint: {entry.key} is in float8, and the checkpoint has no "
                    f"{entry.key + _SCALE}"
                )
            if weight is not None and weight.is_stored:
                _stored_scales(weight, entry, files)
            else:
                _blocks_of(entry, files)


def _load(part: _Part, files: _Files) -> None:
    _, tensor, weight, entries = part
    is_stored = weight is not None and weight.is_stored
    local = Float8Weight.gather_type.unwrap(local_tensor(tensor))
    is_cast = is_stored and not _float8(files[entries[0].key])
    if is_cast:
        to = torch.empty(local.shape, dtype=tensor.dtype)
    else:
        to = local.stored if isinstance(local, Stored) else local.detach()
    for entry in entries:
        dequantizes = _float8(files[entry.key]) and not is_stored
        read = _dequantized if dequantizes else _read
        _fill(to, tensor, entry, partial(read, entry, files))
    if weight is None:
        return
    if is_cast:
        weight.write(with_local(tensor, to.to(local.device)))
    elif is_stored:
        held = weight.local_scales()
        for entry in entries:
            of_scales, values, held.saved_as = _stored_scales(weight, entry, files)
            _fill(held.stored, weight.scales(), of_scales, values.__getitem__)
    else:
        weight.cache.drop(Change.LOAD)


def _fill(
    to: torch.Tensor, tensor: torch.Tensor, entry: Entry, read: Callable[[Index], torch.Tensor]
) -> None:
    """Copy this rank's parts of an entry of ``tensor`` to the plain local tensor ``to``.

    ``read``: reads a part of the entry. Its index has all dims of the whole tensor.
    """
    for region in regions(own_pieces(tensor)):
        here, there = [], []
        for at, local, n, first, m in zip(*region, entry.offset, entry.size, strict=True):
            low, high = max(at, first), min(at + n, first + m)
            here.append(slice(local + low - at, local + high - at))
            there.append(slice(low - first, high - first))
        if all(each.start < each.stop for each in here):
            to[tuple(here)].copy_(read(tuple(there)))


def _read(entry: Entry, files: _Files, index: Index) -> torch.Tensor:
    data = files[entry.key]
    lacking = len(index) - len(data.get_shape())
    values = data[index[lacking:]]
    return values.view((1,) * lacking + values.shape)


def _dequantized(entry: Entry, files: _Files, index: Index) -> torch.Tensor:
    """Read a part of an entry in float8, times its scales, fp32."""
    rows, columns = _blocks_of(entry, files)
    scales = files[entry.key + _SCALE][...].to(torch.float32)
    counts = [-(-n // block) for n, block in zip(entry.size[-2:], (rows, columns), strict=True)]
    shape = (*entry.size[:-2], *counts)
    scales = scales.expand(shape) if scales.numel() == 1 else scales.view(shape)
    row, column = (
        torch.arange(each.start, each.stop) // block
        for each, block in zip(index[-2:], (rows, columns), strict=True)
    )
    values = _read(entry, files, index).to(torch.float32)
    return values * scales[index[:-2]][..., row, :][..., column]


def _blocks_of(entry: Entry, files: _Files) -> tuple[int, int]:
    """Return the size of the blocks of an entry that have one scale, by the number of scales."""
    shape, size = tuple(files[entry.key + _SCALE].get_shape()), entry.size[-2:]
    if math.prod(shape) == 1:
        return size[0], size[1]
    stacked = tuple(files[entry.key].get_shape())[:-2]
    if shape == (*stacked, size[0], 1):
        return 1, size[1]
    for block in _BLOCKS:
        if shape == (*stacked, *(-(-n // block) for n in size)):
            return block, block
    raise ValueError(
        f"load_float8_checkpoint: {entry.key + _SCALE} is {list(shape)}, which is neither one "
        f"scale for {list(size)}, nor one per row or per square block of {_BLOCKS}"
    )


def _stored_scales(
    weight: Float8Weight, entry: Entry, files: _Files
) -> tuple[Entry, torch.Tensor, torch.dtype]:
    """Return an entry's scales as the weight stores them, if they fit, and the file's dtype."""
    (scheme,), key = weight.schemes, entry.key + _SCALE
    (level,), found, dtype = scheme.levels, files[key][...], _float8(files[entry.key])
    size = level.shape(entry.size) or [1]
    blocks = [level.block(dim, len(entry.size)) for dim in range(len(entry.size))]
    begins = [divmod(o, b) if b else (0, 0) for o, b in zip(entry.offset, blocks, strict=True)]
    if dtype is not scheme.dtype:
        raise ValueError(
            f"load_float8_checkpoint: {entry.key} is in {dtype}, and the layer's recipe stores "
            f"{scheme.dtype}; leave the layer out of freeze_to_float8"
        )
    if found.numel() != math.prod(size) or any(within for _, within in begins):
        raise ValueError(
            f"load_float8_checkpoint: {key} is {list(found.shape)}, and the layer's recipe has one "
            f"scale per {scheme.covers}, {size}; convert the model with the recipe of the "
            "checkpoint: \"blockwise\" for DeepSeek's and Qwen's"
        )
    own = as_stored(found.reshape(size), scheme, f"load_float8_checkpoint: {key}")
    offset = (0,) if level.is_scalar else tuple(block for block, _ in begins)
    return Entry(key, offset, tuple(size)), own, found.dtype


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return shown or "none"
