"""Amax histories in the metadata of a state_dict: what is saved, and what a load says of it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.linear.amax_history import AmaxHistory, load_histories
from fp8_dist.warn import warn_once

_KEY = "float8_amax_histories"


def save_to_metadata(histories: Mapping[str, AmaxHistory], metadata: dict[str, Any]) -> None:
    """Put copies of a layer's histories into its metadata of a ``state_dict``."""
    saved = {name: history.history for name, history in histories.items()}
    metadata[_KEY] = {
        name: torch.zeros(0) if amaxes is None else amaxes.detach().clone()
        for name, amaxes in saved.items()
    }


def load_from_metadata(
    histories: Mapping[str, AmaxHistory],
    metadata: Mapping[str, Any],
    meshes: Iterable[DeviceMesh],
    fqn: str,
) -> None:
    """Continue a layer's histories from its metadata of a ``state_dict``.

    A plain dict, or one that DCP has read, has no metadata: then histories stay as they are.
    Warns once in a process where histories are not those of what was loaded.

    Args:
        histories: of the layer, by name of the operand.
        metadata: that nn.Module gives to ``_load_from_state_dict``.
        meshes, Collectives: see :func:`load_histories`.
        fqn: the layer's name, for messages.
    """
    saved: Mapping[str, torch.Tensor] = metadata.get(_KEY, {})
    if not histories:
        if saved:
            warn_once(
                "histories dropped",
                f"{fqn}: the state_dict has amax histories, and this layer's recipe keeps none: "
                "they are dropped, and the parameters loaded",
            )
        return
    # nn.Module writes its version into all metadata.
    told = load_histories(histories, saved if "version" in metadata else None, meshes)
    if not told:
        if any(history.history is not None for history in histories.values()):
            warn_once(
                "histories kept",
                f"{fqn}: the state_dict is a plain dict, which says nothing of amax histories: "
                "those of the layer are kept. Load what state_dict() returned, or use "
                "fp8_dist.Float8State, to load histories too",
            )
    elif "version" in metadata and (message := difference(histories, saved)):
        warn_once("histories differ", f"{fqn}: {message}")


def difference(own: Iterable[str], saved: Iterable[str]) -> str:
    """What is said where a checkpoint has histories of other operands; "" if it has the same."""
    own, saved = set(own), set(saved)
    if own == saved:
        return ""
    if not saved:
        return (
            "the checkpoint has no amax histories (it is one of bf16 or of another recipe): they "
            "start anew, and the next step scales each operand by its own amax"
        )
    parts = {"kept": own & saved, "dropped": saved - own, "new": own - saved}
    named = [f"{what}: {', '.join(sorted(names))}" for what, names in parts.items() if names]
    return f"the checkpoint has amax histories of other operands ({'; '.join(named)})"
