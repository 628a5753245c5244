"""Refusing, on all ranks alike, models that ranks have set up in different ways.

Layers are compared once, before the first collective that depends on them, where all ranks come
whatever they have converted: where a layer is placed on a mesh (``apply_tp_plan``, the parallel
styles, ``declare_placements``), and where a model first runs or is first updated (FSDP2's lazy
initialization, precompute, sync). A layer that other code has placed is compared in its first
forward.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist.mesh import first_difference
from fp8_dist.torch_internals import STAND_INS, innermost

# Modules whose parameters and layers were compared, with all that they contain.
_compared: "WeakSet[nn.Module]" = WeakSet()
# Models that were converted: a part of one may have converted layers on other ranks only.
_converted: "WeakSet[nn.Module]" = WeakSet()

Layers = Mapping[str, Any]  # of Float8Linear (which is made on top of this module), by name


class Facts:
    """The facts about which the ranks of each mesh must agree."""

    def __init__(self) -> None:
        self._by_ranks: dict[tuple[int, ...], tuple[DeviceMesh, dict[str, str]]] = {}
        self._by_mesh: dict[int, tuple[DeviceMesh, dict[str, str]]] = {}

    def of(self, mesh: DeviceMesh) -> dict[str, str]:
        """The facts of the ranks of a mesh, by name; to be added to."""
        if id(mesh) not in self._by_mesh:  # (to list the ranks of a large mesh takes long)
            ranks = tuple(mesh.mesh.flatten().tolist())
            self._by_mesh[id(mesh)] = mesh, self._by_ranks.setdefault(ranks, (mesh, {}))[1]
        return self._by_mesh[id(mesh)][1]

    def check(
        self, caller: str, *, fix: str = "Convert and parallelize it in the same way on all ranks"
    ) -> None:
        """Refuse facts that differ between the ranks of a mesh.

        Collectives: those of ``first_difference`` for each mesh.
        """
        found: tuple[DeviceMesh, str] | None = None
        # The smallest mesh first. Ranks of a larger one are told what was found there, so that none
        # goes on alone.
        for ranks in sorted(self._by_ranks, key=lambda ranks: (len(ranks), ranks)):
            mesh, facts = self._by_ranks[ranks]
            if mesh.get_coordinate() is None:
                continue
            try:
                groups = [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
                difference = first_difference(facts, groups, mesh.device_type, found and found[1])
            except RuntimeError as error:
                raise RuntimeError(
                    f"{caller}: another rank of {mesh} did not come here, or has ended: all of "
                    "them must, with a model that was converted in the same way. The communication "
                    f"failed with: {error}"
                ) from error
            found = found if difference is None else (mesh, difference)
        if found is not None:
            raise ValueError(
                f"{caller}: the ranks of {found[0]} have set up the model in different ways: "
                f"{found[1]}. {fix}"
            )


def note_converted(model: nn.Module) -> None:
    """Remember a model as one whose parts are compared, converted layers or not."""
    _converted.add(model)


def is_part_of_converted(module: nn.Module) -> bool:
    """Whether a module belongs to a model that was converted."""
    return any(part is module for model in _converted for part in model.modules())


def needs_comparison(module: nn.Module) -> bool:
    """Whether a module was neither compared (:func:`check_layers`) nor marked."""
    return module not in _compared


def mark_compared(module: nn.Module) -> None:
    """Let the comparison leave out a module and all that it contains."""
    _compared.update(module.modules())


def check_layers(module: nn.Module, layers: Layers, caller: str) -> None:
    """Compare the layers in a module between the ranks that share its parameters, once.

    FSDP2's sharded parameters must be in place. Ranks agree about the meshes whatever they have
    converted, because these are the meshes of all parameters.

    Args:
        layers: all converted ones in the module, by name.

    Collectives: those of ``first_difference`` for each mesh.

    Raises:
        ValueError: ranks differ in a layer, or in its config.
    """
    parts = dict.fromkeys(part for part in module.modules() if part not in _compared)
    parameters = [p for part in parts for p in part._parameters.values() if p is not None]
    new = {name: layer for name, layer in _by_fqn(layers).items() if layer in parts}
    if not has_stand_ins(parameters):
        facts = Facts()
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                facts.of(parameter.device_mesh)
        for name, layer in new.items():
            layout = layer.float8_weight.layout()
            if layout is not None:
                facts.of(layout.mesh).update(_facts_of(layer, name))
        facts.check(caller)
    _mark(new.values())
    mark_compared(module)


def check_placed(
    layers: Layers,
    mesh: DeviceMesh,
    caller: str,
    others: Mapping[str, str] | None = None,
) -> None:
    """Compare layers that are being placed on a mesh, and what else ranks must agree about.

    All ranks of the mesh call it; where a layer was not converted, without that layer.

    Collectives, raises: as :func:`check_layers`.
    """
    if not has_stand_ins(layer.weight for layer in layers.values()):
        facts = Facts()
        for name, layer in _by_fqn(layers).items():
            facts.of(mesh).update(_facts_of(layer, name))
        facts.of(mesh).update(others or {})
        facts.check(caller)
    _mark(layers.values())


def _mark(layers: Iterable[Any]) -> None:
    for layer in layers:
        layer.float8_weight.is_compared = True


def _by_fqn(layers: Layers) -> Layers:
    """Layers by their name in the model that was converted, where that tells them apart."""
    by_fqn = {layer.fqn: layer for layer in layers.values()}
    return by_fqn if len(by_fqn) == len(layers) else layers


def _facts_of(layer: Any, name: str) -> dict[str, str]:
    layout = layer.float8_weight.layout()
    shape = layer.weight.shape if layout is None else layout.shape
    facts = {
        name: f"a Float8Linear with a weight of shape {list(shape)}",
        f"{name}.weight.dtype": str(layer.weight.dtype),
        f"{name}.weight.requires_grad": str(layer.weight.requires_grad),
    }
    if layer.reduce_transport is not None:
        facts[f"{name}.reduce_transport"] = layer.reduce_transport
    for field in dataclasses.fields(layer.config):
        facts[f"{name}.config.{field.name}"] = repr(getattr(layer.config, field.name))
    return facts


def has_stand_ins(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters are fake tensors, which stand for those of other processes."""
    return any(isinstance(innermost(parameter), STAND_INS) for parameter in parameters)
