"""Saving and loading of amax histories in the metadata of a state_dict."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.linear.amax_history import AmaxHistory, load_histories, saved_rows
from fp8_dist.warn import warn_once

_KEY = "float8_amax_histories"


def save_to_metadata(histories: Mapping[str, AmaxHistory], metadata: dict[str, Any]) -> None:
    """Save copies of a layer's histories in the metadata of its ``state_dict``."""
    metadata[_KEY] = {name: history.amaxes() for name, history in histories.items()}


def load_from_metadata(
    histories: Mapping[str, AmaxHistory],
    metadata: Mapping[str, Any],
    meshes: Iterable[DeviceMesh],
    device: torch.device,
    fqn: str,
    is_own: bool,
) -> None:
    """Continue a layer's histories from the metadata of a ``state_dict``.

    Histories that ``Float8State`` has loaded are kept until they are used, because metadata may be
    older, as in the ``state_dict()`` that DCP reads into. A plain dict has no metadata, and leaves
    histories as they are. Warns once per process if the layer's histories are not those of the
    state_dict.

    Args:
        histories: the layer's histories, by name of the operand.
        metadata: the metadata that nn.Module passes to ``_load_from_state_dict``.
        meshes, device: see :func:`load_histories`.
        fqn: the layer's name, for messages.
        is_own: whether the loaded weight shares memory with the layer's weight. The metadata then
            has the histories of the time when ``state_dict()`` was called.

    Collectives, raises: as :func:`load_histories`.
    """
    saved = metadata.get(_KEY, {})
    if not histories:
        if _KEY in metadata:
            warn_once(
                "histories dropped",
                f"{fqn}: the state_dict has amax histories, and this layer's recipe keeps none: "
                "they are dropped, and the parameters loaded",
            )
        return
    has_metadata = "version" in metadata  # nn.Module writes it for every module
    before, restored = _amaxes(histories), all(h.restored for h in histories.values())
    told = load_histories(histories, saved if has_metadata else None, meshes, device, fqn)
    if restored:
        rows = saved_rows(saved, histories, fqn)
        others = {name: row[: histories[name].length].tolist() for name, row in rows.items()}
        if not is_own and any(row and row != before[name] for name, row in others.items()):
            warn_once(
                "histories of Float8State",
                f"{fqn}: the state_dict has other amax histories than those that Float8State has "
                "loaded, which are kept until a forward has used them. Load one of the two",
            )
    elif not told or (is_own and _amaxes(histories) == before):
        for history in histories.values():
            history.restored = False
    elif has_metadata and (message := difference(histories, saved)):
        warn_once("histories differ", f"{fqn}: {message}")


def warn_if_not_restored(histories: Mapping[str, AmaxHistory], fqn: str) -> None:
    """Warn once, at the end of a step, if parameters had been loaded without histories."""
    used = [history for history in histories.values() if history.current is not None]
    if any(history.restored is False for history in used):
        known = any(history.history is not None for history in used)
        state = "go on from before the load" if known else "start anew"
        warn_once(
            "histories not loaded",
            f"{fqn}: the parameters were loaded without amax histories, from a plain dict, a "
            f"distributed checkpoint, or the tensors of state_dict() themselves: they {state}. To "
            "continue a run with its histories, save fp8_dist.Float8State(model) with it, and load "
            "that too",
        )
        for history in histories.values():
            history.restored = None


def _amaxes(histories: Mapping[str, AmaxHistory]) -> dict[str, list[float]]:
    return {name: history.amaxes().tolist() for name, history in histories.items()}


def difference(own: Iterable[str], saved: Iterable[str]) -> str:
    """Message about a checkpoint with histories of other operands, or an empty string."""
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
