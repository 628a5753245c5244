"""Checks that all ranks have set up a model in the same way; all ranks raise if one differs.

Layers are compared once, before the first collective that depends on them, at points that every
rank reaches whatever it has converted: where a layer is placed on a mesh (``apply_tp_plan``, the
parallel styles, ``declare_placements``), and where a model first runs or is first updated (FSDP2's
lazy initialization, precompute, sync). A layer that other code has placed is compared in its first
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

# Modules whose parameters and layers were compared, including their submodules.
_compared: "WeakSet[nn.Module]" = WeakSet()
# Models that were converted. A part of one may have converted layers on other ranks only.
_converted: "WeakSet[nn.Module]" = WeakSet()

# Modules with float8 parameters, by name. (Any, because Float8Linear imports this module.)
Layers = Mapping[str, Any]


class Facts:
    """The facts about which the ranks of each mesh must agree."""

    def __init__(self) -> None:
        self._by_ranks: dict[tuple[int, ...], tuple[DeviceMesh, dict[str, str]]] = {}
        self._by_mesh: dict[int, tuple[DeviceMesh, dict[str, str]]] = {}

    def of(self, mesh: DeviceMesh) -> dict[str, str]:
        """The mutable dict of facts, by name, for the ranks of a mesh."""
        if id(mesh) not in self._by_mesh:  # listing the ranks of a large mesh is slow
            ranks = tuple(mesh.mesh.flatten().tolist())
            self._by_mesh[id(mesh)] = mesh, self._by_ranks.setdefault(ranks, (mesh, {}))[1]
        return self._by_mesh[id(mesh)][1]

    def check(
        self, caller: str, *, fix: str = "Convert and parallelize it in the same way on all ranks"
    ) -> None:
        """Raise if facts differ between the ranks of a mesh.

        Collectives: those of ``first_difference`` for each mesh.

        Raises:
            ValueError: a fact differs; on all ranks of the mesh.
            RuntimeError: the communication failed.
        """
        found: tuple[DeviceMesh, str] | None = None
        # The smallest mesh first. A difference found there is passed on to larger meshes, so that
        # all of their ranks raise.
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
    """Remember a converted model, whose parts are compared even if they have no float8 layers."""
    _converted.add(model)


def is_part_of_converted(module: nn.Module) -> bool:
    """Whether a module belongs to a model that was converted."""
    return any(part is module for model in _converted for part in model.modules())


def needs_comparison(module: nn.Module) -> bool:
    """Whether a module has neither been compared by :func:`check_layers` nor marked as compared."""
    return module not in _compared


def mark_compared(module: nn.Module) -> None:
    """Exclude a module and its submodules from further comparisons."""
    _compared.update(module.modules())


def check_layers(module: nn.Module, layers: Layers, caller: str) -> None:
    """Compare the layers in a module, once, between the ranks that share its parameters.

    FSDP2's sharded parameters must be in place. Ranks are compared on the meshes of all parameters,
    so they agree about these meshes whatever they have converted.

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
            layout = weight.layout()
            if layout is not None:
                facts.of(layout.mesh).update(_facts_of(weight, name))
        facts.check(caller)
    for _, weight in new:
        weight.is_compared = True
    mark_compared(module)


def check_placed(
    layers: Layers,
    mesh: DeviceMesh,
    caller: str,
    others: Mapping[str, str] | None = None,
) -> None:
    """Compare layers that are being placed on a mesh, and other facts that must agree.

    All ranks of the mesh must call it. A rank that has not converted a layer leaves it out.

    Collectives, raises: as :func:`check_layers`.
    """
    weights = _weights(layers)
    if not has_stand_ins(weight.parameter() for _, weight in weights):
        facts = Facts()
        for name, weight in weights:
            facts.of(mesh).update(_facts_of(weight, name))
        facts.of(mesh).update(others or {})
        facts.check(caller)
    for _, weight in weights:
        weight.is_compared = True


def _weights(layers: Layers) -> list[tuple[str, Any]]:
    """The weights of layers, by the FQN in the converted model if unique; else as in ``layers``."""
    by_fqn = {w.fqn: layer for layer in layers.values() for w in layer.float8_weights.values()}
    named = by_fqn if len(by_fqn) == len(layers) else layers
    return [(name, w) for name, layer in named.items() for w in layer.float8_weights.values()]


def _facts_of(weight: Any, module: str) -> dict[str, str]:
    """The facts about a float8 parameter of a module of that name."""
    layout, parameter = weight.layout(), weight.parameter()
    shape = parameter.shape if layout is None else layout.shape
    fqn, kind = f"{module}.{weight.name}", type(weight.module).__name__
    name = module if weight.name == "weight" else fqn
    facts = {
        name: f"a {kind} with a {weight.name} of shape {list(shape)}",
        f"{fqn}.dtype": str(parameter.dtype),
        f"{fqn}.requires_grad": str(parameter.requires_grad),
        f"{fqn} stored in float8": str(weight.is_stored),
    }
    for option in ("reduce_transport", "float8_experts_config"):
        if (value := getattr(weight.module, option, None)) is not None:
            facts[f"{module}.{option}"] = str(value)
    for field in dataclasses.fields(weight.config):
        facts[f"{name}.config.{field.name}"] = repr(getattr(weight.config, field.name))
    return facts


def has_stand_ins(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters include fake tensors, which stand for those of other processes."""
    return any(isinstance(innermost(parameter), STAND_INS) for parameter in parameters)
