"""State of a model's layers other than parameters, for distributed checkpoints (DCP)."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch.nn as nn

from fp8_dist.linear.amax_history import saved_rows
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.model.export import unwrapped
from fp8_dist.text import without_wrappers


class Float8State:
    """Amax histories of DELAYED operands, in a form that DCP saves.

    ``model.state_dict()`` keeps histories in its metadata, which ``torch.distributed.checkpoint``
    drops. Save this object together with the model, as a value of the outermost dict, and load it
    in the same way, before or after the model, on the same mesh or another one::

        state = {"model": ..., "optimizer": ..., "float8": Float8State(model)}
        dcp.save(state, checkpoint_id=folder)

    In a nested dict, use the result of ``state_dict()``.

    The state is small (one entry per operand of a layer), and empty for recipes without histories.

    If a checkpoint may lack keys (one in bf16, or of another recipe), load this object in a call of
    its own, with ``planner=DefaultLoadPlanner(allow_partial_load=True)``, which leaves the entries
    that are missing as they are; in a new model they are empty.

    Histories are the same on all ranks of a layer's mesh, and DCP saves them once. If weights are
    plain tensors, as in DDP, each data-parallel rank has its own histories; after loading, all
    ranks continue with the histories of one rank.

    Args:
        model: a model with or without converted layers. For a DDP model, the names don't contain
            the wrapper.

    Collectives: none, in ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the amaxes by layer name and operand.

        The newest amax of a history comes first. A history is empty before the first sync.
        """
        return {
            name: {operand: each.amaxes().tolist() for operand, each in layer.histories.items()}
            for name, layer in self._layers().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with saved histories.

        Each history is cut to the length that this model keeps. Histories that are not in
        ``state_dict`` start anew. Those of unknown layers and operands are ignored.
        ``load_state_dict`` of the model does not replace loaded histories that no forward has used.
        """
        saved = [
            (layer, saved_rows(state_dict.get(name, {}), layer.histories))
            for name, layer in self._layers().items()
        ]
        for layer, rows in saved:
            for operand, history in layer.histories.items():
                history.load(rows[operand].to(layer.weight.device))
                history.restored = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Float8State can't be pickled: DCP calls state_dict() for the values of the outermost "
            "dict alone, and pickles other objects. Put Float8State(model) there; elsewhere call "
            "its state_dict() and load_state_dict() yourself"
        )

    def _layers(self) -> dict[str, Float8Linear]:
        """Return the layers that have histories, by their names in ``state_dict`` keys."""
        return {
            without_wrappers(name): layer
            for name, layer in float8_layers(self.model).items()
            if layer.histories
        }
