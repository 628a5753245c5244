"""State of a model's layers other than parameters, for distributed checkpoints (DCP)."""

from collections.abc import Mapping
from typing import Any, NoReturn, get_args

import torch
import torch.nn as nn

from fp8_dist.linear.module import Float8Linear
from fp8_dist.model.export import unwrapped
from fp8_dist.operand.history import PREPARED_INPUT, AmaxHistory, saved_rows
from fp8_dist.recipe import Operand
from fp8_dist.text import without_wrappers
from fp8_dist.weight.weights import checked_module


class Float8State:
    """Amax histories of DELAYED operands, in a form that DCP saves.

    ``model.state_dict()`` keeps histories in its metadata, which ``torch.distributed.checkpoint``
    drops. Save this object together with the model, as a value of the outermost dict, and load it
    in the same way, before or after the model, on the same mesh or another one::

        state = {"model": ..., "optimizer": ..., "float8": Float8State(model)}
        dcp.save(state, checkpoint_id=folder)

    In a nested dict, use the result of ``state_dict()``.

    The state is small: one entry per operand of a linear layer. Every model has all of them, with
    empty histories where it keeps none, because DCP refuses to load an entry that a checkpoint
    lacks. So a run can continue with another recipe, in bf16, or on another mesh.

    If a checkpoint was saved without this object, load this object in a separate call, with
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``. Missing entries then stay as they are;
    in a new model they are empty.

    Histories are the same on all ranks of a layer's mesh, and DCP saves them once. The history of
    an input that ``PrepareFloat8ModuleInput`` casts is saved as the first layer's input history, so
    that it continues on other meshes. If weights are plain tensors, as in DDP, each data-parallel
    rank has its own histories; after loading, all ranks continue with the histories of one rank.

    Args:
        model: a model with or without converted layers. For a DDP model, the names don't contain
            the wrapper.

    Collectives: none, in ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the amaxes by layer name and operand.

        The newest amax of a history comes first. A history is empty before the first sync, and for
        an operand whose scale is not DELAYED.
        """
        state = {}
        for name, layer in self._layers().items():
            histories = _by_operand(layer) if isinstance(layer, Float8Linear) else {}
            state[name] = {
                operand: histories[operand].amaxes().tolist() if operand in histories else []
                for operand in get_args(Operand)
            }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with saved histories.

        Each history is cut to the length that this model keeps. Histories that are not in
        ``state_dict`` start anew. Entries of unknown layers and operands are ignored. Until a
        forward uses the loaded histories, the model's ``load_state_dict`` does not replace them.
        """
        saved = [
            (layer, saved_rows(state_dict.get(name, {}), _by_operand(layer)))
            for name, layer in self._layers().items()
            if isinstance(layer, Float8Linear)
        ]
        for layer, rows in saved:
            for history in layer.histories.values():
                history.load(torch.zeros(0))
            for operand, history in _by_operand(layer).items():
                history.load(rows[operand].to(layer.weight.device))
            for history in layer.histories.values():
                history.restored = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Float8State can't be pickled: DCP calls state_dict() for the values of the outermost "
            "dict alone, and pickles other objects. Put Float8State(model) there; elsewhere call "
            "its state_dict() and load_state_dict() yourself"
        )

    def _layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers by their names in ``state_dict`` keys."""
        return {
            without_wrappers(name): layer
            for name, layer in checked_module(self.model).named_modules()
            if isinstance(layer, nn.Linear)
        }


def _by_operand(layer: Float8Linear) -> dict[str, AmaxHistory]:
    """The histories of a layer, by operand. The history of a shared cast is that of "input"."""
    histories = dict(layer.histories)
    if PREPARED_INPUT in histories:
        histories["input"] = histories.pop(PREPARED_INPUT)
    return histories
