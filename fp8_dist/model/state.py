"""State of a model's layers other than its parameters, for distributed checkpoints (DCP)."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from fp8_dist.fsdp.gradient_transport import gradient_errors
from fp8_dist.linear.amax_history import saved_rows
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.names import without_wrappers
from fp8_dist.warn import warn_once

_ERRORS = "gradient_errors"


class Float8State:
    """Amax histories of DELAYED operands, and errors of gradients, as an object that DCP saves.

    ``model.state_dict()`` has only the keys of nn.Linear, and keeps histories in its metadata,
    which ``torch.distributed.checkpoint`` drops. Save this object with the model, and load it in
    the same way, on the same or another mesh, under any key, before the model or after it::

        state = {"model": ..., "optimizer": ..., "float8": Float8State(model)}
        dcp.save(state, checkpoint_id=folder)

    DCP accepts it only as a value of the outermost dict. In a nested dict use the result of
    ``state_dict()``.

    It is small (an entry per operand of a layer), and empty for recipes without histories. With
    the error feedback of ``set_gradient_transport`` it also holds each rank's errors, 1 byte per
    element of the unsharded gradients. Their keys contain the rank, its place among those that
    shard, and the shape, so a checkpoint of another mesh has none of them. Load it after
    ``set_gradient_transport``.

    DCP requires that a checkpoint has every key that is requested. For a checkpoint that may lack
    them (one of bf16, of another recipe or mesh), load it in a call of its own, with
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``. Entries that the checkpoint lacks stay
    as they are, which is empty in a new model.

    Histories are the same on all ranks that share a layer's mesh, and DCP saves them once. Data-
    parallel ranks of plain weights, as in DDP, have histories of their own: all of them continue
    with those of one rank.

    Args:
        model: a model with or without converted layers; DDP's wrapper is left out of the names.

    Collectives: none, in ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model

    def state_dict(self) -> dict[str, Any]:
        """Amaxes by name of layer and operand, the newest first; empty before the first sync.

        Errors of gradients are under ``"gradient_errors"``, by name; the key is absent if none are
        kept. They are the tensors themselves, which the next step changes: clone them to keep them
        in memory.
        """
        layers = self._layers()
        histories = [h for layer in layers.values() for h in layer.histories.values()]
        filled = [h.history for h in histories if h.history is not None]
        lengths = [len(amaxes) for amaxes in filled]
        if filled:  # one copy to the host, because each copy from a GPU waits for it
            filled = (
                torch.cat([amaxes.to(filled[0].device) for amaxes in filled]).cpu().split(lengths)
            )
        on_host = iter(filled)
        errors = gradient_errors(self.model)
        kept: dict[str, Any] = {_ERRORS: errors} if errors else {}
        return kept | {
            name: {
                operand: [] if history.history is None else [a for a in next(on_host).tolist() if a]
                for operand, history in layer.histories.items()
            }
            for name, layer in layers.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with saved histories, each cut to the length that this model keeps, and errors.

        Histories and errors that are not in ``state_dict`` start anew. Histories of unknown layers
        and operands are ignored, as are errors of other ranks. Loaded histories stay until a
        forward uses them: no ``load_state_dict`` of the model replaces them before.

        Raises:
            ValueError: a history or an error is damaged. Nothing is changed then.
        """
        layers, own_errors = self._layers(), gradient_errors(self.model)
        rows = {
            name: saved_rows(state_dict.get(name, {}), layer.histories, layer.fqn)
            for name, layer in layers.items()
        }
        saved_errors = _matching_errors(state_dict.get(_ERRORS, {}), own_errors)
        for key, errors in own_errors.items():
            if key in saved_errors:
                errors.copy_(saved_errors[key])
            else:
                errors.zero_()
        for name, layer in layers.items():
            for operand, history in layer.histories.items():
                history.load(rows[name][operand].to(layer.weight.device))
                history.restored = True
            layer.float8_weight.cache.drop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Float8State can't be pickled: DCP calls state_dict() for the values of the outermost "
            "dict alone, and pickles other objects. Put Float8State(model) there; elsewhere call "
            "its state_dict() and load_state_dict() yourself"
        )

    def _layers(self) -> dict[str, Float8Linear]:
        """The layers that have histories, by the names of their ``state_dict`` keys."""
        return {
            without_wrappers(name): layer
            for name, layer in float8_layers(self.model).items()
            if layer.histories
        }


def _matching_errors(saved: Any, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The saved values of this rank's errors of gradients; warns once if some are missing.

    Raises:
        ValueError: an error is not a tensor of the same shape and dtype.
    """
    saved = saved if isinstance(saved, Mapping) else dict.fromkeys(own, saved)
    found = {key: saved[key] for key in own if key in saved}
    for key, errors in found.items():
        expected, shown = own[key], f"a {type(errors).__name__}"
        if isinstance(errors, torch.Tensor):
            if (errors.shape, errors.dtype) == (expected.shape, expected.dtype):
                continue
            shown = f"{list(errors.shape)} of {errors.dtype}"
        raise ValueError(
            f"Float8State: the saved gradient errors {key} are damaged: expected a tensor "
            f"{list(expected.shape)} of {expected.dtype}, found {shown}; load an undamaged "
            "checkpoint, or leave them out"
        )
    if saved and not own:
        warn_once(
            "gradient errors dropped",
            "Float8State: the state has errors of gradients, and the model keeps none; call "
            "set_gradient_transport(..., error_feedback=True) before the state is loaded",
        )
    elif len(found) < len(own):
        warn_once(
            "gradient errors missing",
            f"Float8State: {len(own) - len(found)} of this rank's {len(own)} errors of gradients "
            "are not in the state, which is of another rank or mesh, or of a run without error "
            "feedback: they start at zero",
        )
    return found
