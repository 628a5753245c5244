"""Comparison of what the ranks of a tensor-parallel group must have alike.

Styles take it on trust that a plain tensor with the placement Replicate has the same values on all
ranks, and that parameters without an entry do. If ranks read different batches, or were seeded
differently, their model is no model at all, and trains without an error.

The first forward compares, so that weights may be initialized or loaded after the plan is applied.
A difference is a warning, because a dry run may use any values.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from fp8_dist.device import current_capture
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel.lengths import layouts_read, styles_in
from fp8_dist.text import alike_names
from fp8_dist.torch_internals import has_functorch_transforms, innermost
from fp8_dist.weight import agreement

# Elements that are hashed at once; each takes a few times 8 bytes.
_CHUNK = 1 << 22
# The multipliers of splitmix64, as signed integers.
_OF_INDEX, _OF_BITS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_at_first_forward(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Any]) -> None:
    """Warn at the first forward if ranks differ in its input or in replicated parameters.

    The input is what the first module with an entry takes as Replicate. Compiled code compares
    nothing. The first forward with gradients compares, and the first one without. Call this before
    the styles are applied, so that hooks see inputs before the styles do.

    Collectives, in these forwards: an all-reduce of 16 bytes, which dispatch modes do not see.
    """
    root, compared = weakref.ref(model), set[bool]()

    def compare(name: str, layouts: Mapping[Any, Any], inputs: Mapping[Any, Any]) -> None:
        whole = root()
        plain = {p: x for p, x in inputs.items() if _is_plain(x)}
        tensors = [*plain.values(), *(() if whole is None else whole.parameters())]
        is_traced = agreement.has_stand_ins(tensors)
        if is_traced or current_capture() or has_functorch_transforms():
            return
        parameters = {} if whole is None else _replicated(whole, mesh)
        compared.add(torch.is_grad_enabled())
        shown = repr(name) if name else "the model"
        read = {place: x for place, x in plain.items() if layouts.get(place) == Replicate()}
        named = {f"input {place!r} of {shown}": x for place, x in read.items()}
        if _warn_of_differences(named, parameters, mesh):
            compared.update((False, True))

    def hook_of(name: str, layouts: Mapping[Any, Any]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or torch.is_grad_enabled() in compared:
                return
            compare(name, layouts, dict(enumerate(args)) | kwargs)

        return hook

    for name, style in styles.items() if mesh.size() > 1 else ():
        layouts = {
            p: layout for part in styles_in(style) for p, layout in layouts_read(part).items()
        }
        # It stays, because dynamo compiles a module again when one of its hooks is removed.
        hook = hook_of(name, layouts)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and _has_bits(x)


def _has_bits(x: Tensor) -> bool:
    """Whether a tensor has values that can be hashed, which is the same on all ranks."""
    return not is_lazy(x) and x.layout is torch.strided and not innermost(x).is_meta


def _replicated(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The parameters, or shards of them, that must be the same on all ranks of a mesh."""
    return {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, module in model.named_modules()
        if getattr(module, "local_placements", None) is None
        for name, parameter in module._parameters.items()
        if parameter is not None and _is_replicated(parameter, mesh)
    }


def _is_replicated(parameter: Tensor, mesh: DeviceMesh) -> bool:
    if not _has_bits(parameter):
        return False
    if not isinstance(parameter, DTensor):
        return True
    axes = _axes_between(mesh, parameter.device_mesh)
    return all(parameter.placements[axis].is_replicate() for axis in axes)


@lru_cache  # because it is called for each parameter
def _axes_between(mesh: DeviceMesh, other: DeviceMesh) -> list[int]:
    """The axes of another mesh along which ranks of a mesh differ."""
    ranks = set(mesh.mesh.flatten().tolist()).intersection(other.mesh.flatten().tolist())
    coordinates = [(other.mesh == rank).nonzero()[0].tolist() for rank in ranks]
    return [axis for axis, at in enumerate(zip(*coordinates, strict=True)) if len({*at}) > 1]


def _warn_of_differences(
    inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor], mesh: DeviceMesh
) -> bool:
    """Compare tensors between the ranks of a mesh; warn of those that differ."""
    tensors = {**inputs, **parameters}
    with agreement.unobserved(), torch.no_grad():
        hashes = {name: _hash(x).to(mesh.device_type) for name, x in tensors.items()}
    facts = {name: f"{x.dtype} {list(x.shape)}" for name, x in tensors.items()}
    by_rank = agreement.gathered_if_different(
        facts, [mesh.get_group()], mesh.device_type, hashes=hashes
    )
    if by_rank is None:
        return False
    found = {name: _groups(name, by_rank) for facts in by_rank.values() for name in facts}
    differing = {name: groups for name, groups in found.items() if len(groups) > 1}
    if wrong := [name for name in differing if name not in inputs]:
        warnings.warn(
            f"apply_tp_plan: {', '.join(alike_names(wrong))}: parameters that every rank of a "
            f"tensor-parallel group has whole differ between {_shown(differing[wrong[0]])}, so "
            "these ranks train different models. Seed them alike before the model is made, load "
            "the same weights, or broadcast these parameters",
            stacklevel=2,
        )
    elif differing:
        name = next(iter(differing))
        warnings.warn(
            f"apply_tp_plan: {name}, which the plan takes to be the same on every rank of a "
            f"tensor-parallel group, differs between {_shown(differing[name])}. Read the same "
            "batch on these ranks (give a sampler the data-parallel rank and size), and seed "
            "dropout alike",
            stacklevel=2,
        )
    return bool(differing)


def _groups(name: str, by_rank: Mapping[int, Mapping[str, str]]) -> list[list[int]]:
    """The ranks that have the same value of a fact."""
    groups: dict[str | None, list[int]] = {}
    for rank, facts in by_rank.items():
        groups.setdefault(facts.get(name), []).append(rank)
    return list(groups.values())


def _shown(groups: list[list[int]]) -> str:
    return " and ".join(
        f"rank {group[0]}" if len(group) == 1 else f"ranks {', '.join(map(str, group))}"
        for group in groups
    )


def _hash(x: Tensor) -> Tensor:
    """A number, int64 and 0-dim, that depends on the bits of a tensor and on their order."""
    x = innermost(local_tensor(x)).detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    bits = x.contiguous().flatten().view(_INTEGERS[x.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first, chunk in _chunks(bits):
        index = torch.arange(first, first + len(chunk), device=x.device)
        mixed = chunk.long() ^ (index * _OF_INDEX)
        mixed = (mixed ^ (mixed >> 30)) * _OF_BITS
        total += (mixed ^ (mixed >> 27)).sum()
    return total


def _chunks(bits: Tensor) -> Iterator[tuple[int, Tensor]]:
    for number, chunk in enumerate(bits.split(_CHUNK)):
        yield number * _CHUNK, chunk
