"""Measures of a model's casts, combined over the ranks that each layer's operands live on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.debug.statistics.measuring import Measures, combine_, nothing
from fp8_dist.linear.module import float8_layers
from fp8_dist.linear.observing import Owner
from fp8_dist.mesh import GroupNames, first_difference, make_group
from fp8_dist.torch_internals import funcol, resolve_process_group


class RanksOfLayers:
    """Ranks of each layer whose measures are combined.

    Args:
        model: a model with converted layers.
        mesh: the ranks of all layers. None: a layer has the ranks of the largest mesh that its
            operands were seen on. Layers on no mesh have the ranks of the largest mesh of all
            layers, or all ranks if there is no mesh.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        self._model, self._given = model, mesh
        self._meshes: dict[str, DeviceMesh] = {}
        self._agrees = False
        self._groups_of: dict[str, GroupNames] = {}
        self.owners: set[Owner] = set()
        self.look()

    def look(self) -> None:
        """Update the meshes of the layers. FSDP2 may exchange a parameter for one on no mesh."""
        layers = float8_layers(self._model)
        self.owners = {layer.float8_weight for layer in layers.values()}
        for name, layer in layers.items():
            for mesh in layer.meshes():
                if name not in self._meshes or mesh.size() > self._meshes[name].size():
                    self._meshes[name] = mesh

    def combined(
        self, owners: Sequence[Owner], own: Sequence[torch.Tensor | None]
    ) -> list[Measures]:
        """Combine the measures of all ranks, for layers given by their ``owners``.

        All ranks call it with the same layers. ``own`` has this rank's measures; None: it has none.

        Collectives: an all-gather of 80 bytes per measure for each group of ranks.
        """
        self.look()
        groups = self._groups_of = self._groups()
        layers = float8_layers(self._model)
        by_owner: dict[Owner, GroupNames] = {
            layer.float8_weight: groups[name] for name, layer in layers.items()
        }
        # The weights are on the mesh's device, except with FSDP2's offload to the CPU.
        device = next(iter(layers.values())).weight.device
        for mesh in self._meshes.values():
            device = torch.device(mesh.device_type)
        alike: dict[GroupNames, list[int]] = {}
        for i, owner in enumerate(owners):
            alike.setdefault(by_owner[owner], []).append(i)
        found: dict[int, Measures] = {}
        for names, members in alike.items():
            none = nothing(device)
            rows = [none if (row := own[i]) is None else row.to(device) for i in members]
            found |= zip(members, _over(names, torch.stack(rows)), strict=True)
        return [found[i] for i in range(len(owners))]

    def is_first(self, name: str) -> bool:
        """Whether this is the first of the ranks whose measures of a layer were combined."""
        return all(resolve_process_group(group).rank() == 0 for group in self._groups_of[name])

    def _groups(self) -> dict[str, GroupNames]:
        """Return the process groups of each layer."""
        names = list(float8_layers(self._model))
        if self._given is not None:
            return dict.fromkeys(names, make_group([self._given]))
        meshes = dict.fromkeys(self._meshes.values())
        made = {mesh: make_group([mesh]) for mesh in meshes}
        others: GroupNames = ()
        if meshes:
            others = made[max(meshes, key=lambda mesh: mesh.size())]
        elif dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None
            others = (str(dist.group.WORLD.group_name),)
            self._check_world(names, dist.group.WORLD)
        return {
            name: made[self._meshes[name]] if name in self._meshes else others for name in names
        }

    def _check_world(self, names: list[str], world: dist.ProcessGroup) -> None:
        """Raise if ranks have different layers, once. Collectives: an all-reduce of 16 bytes."""
        if self._agrees:
            return
        layers = float8_layers(self._model)
        facts = {name: f"{layers[name].weight.shape} {layers[name].config}" for name in names}
        device = layers[names[0]].weight.device.type
        if (difference := first_difference(facts, [world], device)) is not None:
            raise ValueError(
                f"float8_stats: the ranks have different layers ({difference}), and weights on no "
                "mesh to tell which ranks belong together (pipeline stages?); give mesh=, the "
                "ranks that have the same layers"
            )
        self._agrees = True


def _over(groups: GroupNames, own: torch.Tensor) -> list[Measures]:
    """Combine measures ``[rows, 10]`` over all ranks of some groups."""
    for name in groups:
        size = resolve_process_group(name).size()
        parts = funcol.wait_tensor(funcol.all_gather_into_tensor(own, size, name))
        own, *others = parts.view(size, *own.shape)
        own = own.clone()
        for other in others:
            combine_(own, other)
    return [Measures(*row) for row in own.tolist()]
