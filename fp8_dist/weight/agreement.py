"""Checks that all ranks have set up a model in the same way; all ranks raise if one differs.

Layers are compared once, before the first collective that depends on them. Every rank takes part,
even if it has converted no layer. The comparison happens when a layer is placed on a mesh
(``apply_tp_plan``, the parallel styles, ``declare_placements``), or when a model first runs or is
first updated (FSDP2's lazy initialization, precompute, sync). A layer that other code has placed is
compared in its first forward.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist.config_text import CUSTOM, field_texts, recipe_of
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import STAND_INS, innermost, normal_tensors, without_dispatch_modes

# Modules whose parameters and layers were compared, including their submodules.
_compared: "WeakSet[nn.Module]" = WeakSet()
# Models that were converted. A submodule may have converted layers on other ranks only.
CONVERTED: "WeakSet[nn.Module]" = WeakSet()

# Modules with float8 parameters, by name. (Any, because Float8Linear imports this module.)
Layers = Mapping[str, Any]

_PASSED_ON = ""  # the name of the fact that passes on a difference found on a smaller mesh
_CALL = "the function that compares"  # the name of the fact that says it
_RECIPE = ": recipe"  # the end of the name of the fact that says the recipe of a weight


class Facts:
    """The facts about which the ranks of each mesh must agree."""

    def __init__(self) -> None:
        self._by_ranks: dict[tuple[int, ...], tuple[DeviceMesh, dict[str, str]]] = {}

    def of(self, mesh: DeviceMesh) -> dict[str, str]:
        """Return the facts for the ranks of a mesh, a dict by name to which callers add."""
        return self._by_ranks.setdefault(_mesh_ranks(mesh), (mesh, {}))[1]

    def check(
        self,
        caller: str,
        *,
        found: str = "have set up the model in different ways",
        fix: str = "Convert and parallelize it in the same way on all ranks",
    ) -> None:
        """Raise if facts differ between the ranks of a mesh.

        Args:
            caller: the function that checks, for the error.
            found: what the ranks did, for the error.
            fix: what to do, for the error.

        Collectives: those of ``first_difference`` for each mesh.

        Raises:
            ValueError: a fact differs. All ranks of the mesh raise it.
            RuntimeError: the communication failed.
        """
        failed_mesh, difference = None, ""
        # Compare the smallest mesh first, and pass its difference on to larger meshes, so that all
        # of their ranks raise.
        for ranks in sorted(self._by_ranks, key=lambda ranks: (len(ranks), ranks)):
            mesh, facts = self._by_ranks[ranks]
            if mesh.get_coordinate() is None:
                continue
            groups = [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
            passed_on = {_PASSED_ON: difference} | facts
            call = caller.partition(" of ")[0]  # without the name of a layer
            with expecting_all_ranks(caller):
                new = first_difference(passed_on, groups, mesh.device_type, call)
            if new is not None:
                failed_mesh, difference = mesh, new
        if difference.startswith(_CALL):
            found, fix = "made different calls", "Make the same calls, in the same order"
            difference = difference.removeprefix(f"{_CALL}: ")
        if difference:
            raise ValueError(f"{caller}: the ranks of {failed_mesh} {found}: {difference}. {fix}")


@contextmanager
def expecting_all_ranks(caller: str) -> Iterator[None]:
    """Say which call other ranks have left out, if the communication within the block fails."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}: another rank did not make this call, or has exited: all ranks must make "
            "it, on a model that was converted in the same way. The communication failed with: "
            f"{error}"
        ) from error


@lru_cache  # because it is called for each layer of a model
def _mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def first_difference(
    facts: Mapping[str, str],
    groups: Sequence[dist.ProcessGroup],
    device: str,
    caller: str | None = None,
) -> str | None:
    """Describe the first fact that differs between ranks, and the ranks on which it differs.

    Returns None if there is no difference. All ranks get the same result.

    Args:
        facts: values by name. Their order is compared, too. If any rank passes an earlier
            difference under the name ``_PASSED_ON``, all ranks return that difference.
        groups: this rank's process group for each axis of a mesh, or one group of all ranks.
        device: the type of the devices that communicate.
        caller: the function that compares. It may differ between ranks whose facts agree. If facts
            differ, another caller is the first difference: the ranks then compare different things.

    Collectives: one all-reduce of 16 bytes over each group. If there is a difference, also those of
    ``all_gather_object`` of the facts over each group. Dispatch modes, such as ``comm_audit``, do
    not see these collectives.
    """
    told = {} if caller is None else {_CALL: caller}
    by_rank = gathered_if_different(facts, groups, device, told=told)
    return None if by_rank is None else _describe_difference(by_rank)


def gathered_if_different(
    facts: Mapping[str, str],
    groups: Sequence[dist.ProcessGroup],
    device: str,
    *,
    hashes: Mapping[str, torch.Tensor] | None = None,
    told: Mapping[str, str] | None = None,
) -> dict[int, dict[str, str]] | None:
    """Return the facts of all ranks, by rank, if any differs between them; else None.

    Args:
        facts, groups, device: as in :func:`first_difference`.
        hashes: numbers that must agree, too, int64 and 0-dim on the device, by the names of facts,
            to which they are added as text. The host does not wait for each.
        told: further facts, which come first in the result and may differ.

    Collectives: those of :func:`first_difference`.
    """
    if not groups:
        return None
    text = "".join(f"\n{name}\t{value}" for name, value in facts.items())
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    with unobserved():
        bounds = torch.tensor([digest, -digest], device=device)
        if hashes:
            numbers = torch.stack([*hashes.values()])
            odd = torch.arange(1, 2 * len(numbers), 2, device=device)
            number = ((numbers ^ (numbers >> 31)) * odd).sum() >> 8  # so that -number exists
            bounds += torch.stack([number, -number])
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
        largest, negative_smallest = bounds.tolist()
        if largest == -negative_smallest:
            return None
        shown = {
            name: f" with the hash {number.item():x}" for name, number in (hashes or {}).items()
        }
        own = {name: value + shown.get(name, "") for name, value in facts.items()}
        by_rank = {dist.get_rank(): {**(told or {}), **own}}
        for group in groups:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, by_rank, group)
            by_rank = {rank: facts for part in parts for rank, facts in part.items()}
    return dict(sorted(by_rank.items()))


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide what is run from dispatch modes, such as ``comm_audit``, and make normal tensors."""
    with without_dispatch_modes(), normal_tensors():
        yield


def _describe_difference(by_rank: Mapping[int, Mapping[str, str]]) -> str:
    for facts in by_rank.values():
        if facts.get(_PASSED_ON):
            return facts[_PASSED_ON]
    for name in dict.fromkeys(name for facts in by_rank.values() for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in by_rank.items():
            ranks.setdefault(facts.get(name, "missing"), []).append(rank)
        # The casts of no recipe are described by the fields that differ, which follow.
        if len(ranks) > 1 and CUSTOM not in ranks:
            values = [f"{value} on {_format_ranks(some)}" for value, some in ranks.items()]
            if name.endswith(_RECIPE):
                return f"{name} {', '.join(values)}"
            return f"{name}: {'; '.join(values)}"
    return "the order of layers differs"


def _format_ranks(ranks: Iterable[int]) -> str:
    numbers = list(map(str, ranks))
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def note_converted(model: nn.Module) -> None:
    """Remember a converted model, whose parts are compared even if they have no float8 layers."""
    CONVERTED.add(model)
    _compared.difference_update(model.modules())


def is_part_of_converted(module: nn.Module) -> bool:
    """Whether a module belongs to a model that was converted."""
    return any(part is module for model in CONVERTED for part in model.modules())


def needs_comparison(module: nn.Module) -> bool:
    """Whether a module has neither been compared by :func:`check_layers` nor marked as compared."""
    return module not in _compared


def mark_compared(module: nn.Module) -> None:
    """Exclude a module and its submodules from further comparisons."""
    _compared.update(module.modules())


def check_layers(module: nn.Module, layers: Layers, caller: str) -> None:
    """Compare the layers in a module, once, between the ranks that share its parameters.

    FSDP2 must have sharded the parameters. The comparison runs on the meshes of all parameters, not
    only of float8 ones, so that ranks that have converted different layers run the same
    collectives.

    Args:
        layers: all modules with float8 parameters in the module, by name.

    Collectives: those of ``first_difference`` for each mesh.

    Raises:
        ValueError: ranks differ in a layer or its config.
    """
    parts = dict.fromkeys(part for part in module.modules() if part not in _compared)
    parameters = [p for part in parts for p in part._parameters.values() if p is not None]
    new = [(name, weight) for name, weight in _weights(layers) if weight.module in parts]
    if not has_stand_ins(parameters):
        facts = Facts()
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                facts.of(parameter.device_mesh)
        for name, weight in new:
            layout = weight.layout() if weight.is_registered else None
            if layout is not None:
                facts.of(layout.mesh).update(_weight_facts(weight, name))
        facts.check(caller)
    for _, weight in new:
        weight.is_compared = True
    mark_compared(module)


def check_placed(
    layers: Layers, mesh: DeviceMesh, caller: str, others: Mapping[str, str] | None = None
) -> None:
    """Compare layers that are being placed on a mesh, and other facts that must agree.

    All ranks of the mesh must call this, each with the layers that it has converted.

    Collectives, raises: as :func:`check_layers`.
    """
    weights = _weights(layers)
    if not has_stand_ins(weight.parameter() for _, weight in weights):
        facts = Facts()
        for name, weight in weights:
            facts.of(mesh).update(_weight_facts(weight, name))
        facts.of(mesh).update(others or {})
        facts.check(caller)
    for _, weight in weights:
        weight.is_compared = True


def _weights(layers: Layers) -> list[tuple[str, Any]]:
    """Return the weights with their modules' FQNs if these are unique, else names in ``layers``."""
    by_fqn = {w.fqn: layer for layer in layers.values() for w in layer.float8_weights.values()}
    named = by_fqn if len(by_fqn) == len(layers) else layers
    return [(name, w) for name, layer in named.items() for w in layer.float8_weights.values()]


def _weight_facts(weight: Any, module: str) -> dict[str, str]:
    """Return the facts about a float8 parameter. ``module`` is the name of its module."""
    layout, parameter = weight.layout(), weight.parameter()
    shape = parameter.shape if layout is None else layout.shape
    fqn, kind = f"{module}.{weight.name}", kind_of(weight.module)
    name = module if weight.name == "weight" else fqn
    facts = {
        name: f"{kind} with a {weight.name} of shape {list(shape)}",
        f"{fqn}.dtype": str(parameter.dtype),
        f"{fqn}.requires_grad": str(parameter.requires_grad),
        f"{fqn} stored in float8": str(weight.is_stored),
    }
    experts = getattr(weight.module, "float8_experts_config", None)
    recipe = experts and (experts.recipe or "bf16")
    facts[f"{name}{_RECIPE}"] = recipe or recipe_of(weight.config)
    if (transport := getattr(weight.module, "reduce_transport", None)) is not None:
        facts[f"{module}.reduce_transport"] = str(transport)
    configs = {f"{name}.config": weight.config, f"{module}.float8_experts_config": experts}
    for config_name, config in configs.items():
        texts = {} if config is None else field_texts(config)
        facts |= {f"{config_name}.{field}": text for field, text in texts.items()}
    return facts


def has_stand_ins(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any parameter is a fake tensor, or another one that is used for tracing."""
    return any(isinstance(innermost(parameter), STAND_INS) for parameter in parameters)
