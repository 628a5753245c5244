"""Refusing, on all ranks alike, models that ranks have set up in different ways."""

import dataclasses
import weakref
from collections.abc import Iterable, Mapping

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.mesh import first_difference
from fp8_dist.torch_internals import STAND_INS, innermost

_compared: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def needs_comparison(module: nn.Module) -> bool:
    """Whether :func:`check_layers` has not compared the layers of a module yet."""
    return module not in _compared


def check_layers(module: nn.Module, caller: str) -> None:
    """Compare the float8 layers of a module between the ranks that share their weights, once.

    FSDP2's sharded parameters must be in place.

    Collectives: those of ``first_difference`` for each mesh that weights live on.

    Raises:
        ValueError: ranks differ in a layer, or in its config.
    """
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    layers: dict[tuple[int, ...], dict[str, Float8Linear]] = {}
    for name, layer in float8_layers(module).items():
        layout = layer.float8_weight.layout()
        if layout is not None and not has_stand_ins([layer]):
            ranks = tuple(layout.mesh.mesh.flatten().tolist())
            meshes.setdefault(ranks, layout.mesh)
            layers.setdefault(ranks, {})[name or layer.fqn] = layer
    # The largest mesh first: the others may depend on what differs.
    for ranks in sorted(meshes, key=lambda ranks: (-len(ranks), ranks)):
        check_facts(layer_facts(layers[ranks]), meshes[ranks], caller)
    _compared.add(module)


def layer_facts(layers: Mapping[str, Float8Linear]) -> dict[str, str]:
    """What all ranks must agree about, by name."""
    facts = {}
    for name, layer in layers.items():
        layout = layer.float8_weight.layout()
        shape = layer.weight.shape if layout is None else layout.shape
        facts[name] = f"a Float8Linear with a weight of shape {list(shape)}"
        facts[f"{name}.weight.dtype"] = str(layer.weight.dtype)
        facts[f"{name}.weight.requires_grad"] = str(layer.weight.requires_grad)
        if layer.reduce_transport is not None:
            facts[f"{name}.reduce_transport"] = layer.reduce_transport
        for field in dataclasses.fields(layer.config):
            facts[f"{name}.config.{field.name}"] = repr(getattr(layer.config, field.name))
    return facts


def check_facts(
    facts: Mapping[str, str],
    mesh: DeviceMesh,
    caller: str,
    *,
    fix: str = "Convert and parallelize it in the same way on all ranks",
) -> None:
    """Refuse facts that differ between the ranks of a mesh. Collectives: as first_difference."""
    try:
        difference = first_difference(facts, mesh)
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}: another rank of {mesh} has not called it, or has ended: all of them must. "
            f"The communication failed with: {error}"
        ) from error
    if difference is not None:
        raise ValueError(
            f"{caller}: the ranks of {mesh} have set up the model in different ways: {difference}. "
            f"{fix}"
        )


def has_stand_ins(modules: Iterable[nn.Module]) -> bool:
    """Whether parameters are fake tensors, which stand for those of other processes."""
    return any(isinstance(innermost(p), STAND_INS) for m in modules for p in m.parameters())
