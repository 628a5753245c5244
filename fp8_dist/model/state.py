"""State of a model's layers other than parameters, for distributed checkpoints (DCP)."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from fp8_dist.fsdp.ddp_hook import ddp_gradient_errors
from fp8_dist.fsdp.gradient_transport import gradient_errors
from fp8_dist.linear.amax_history import saved_rows
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.text import warn_once, without_wrappers

_ERRORS = "gradient_errors"


class Float8State:
    """Amax histories of DELAYED operands, and errors of gradients, in a form that DCP saves.

    ``model.state_dict()`` keeps histories in its metadata, which ``torch.distributed.checkpoint``
    drops. Save this object together with the model, as a value of the outermost dict, and load it
    in the same way, before or after the model, on the same mesh or another one::

        state = {"model": ..., "optimizer": ..., "float8": Float8State(model)}
        dcp.save(state, checkpoint_id=folder)

    In a nested dict, use the result of ``state_dict()``.

    The state is small (one entry per operand of a layer), and empty for recipes without histories.
    With the error feedback of ``set_gradient_transport`` or ``float8_ddp_hook``, it also contains
    each rank's errors, with 1 byte per element of the unsharded gradients. A checkpoint from
    another mesh has none of them. Load the state after the call of ``set_gradient_transport`` or
    ``register_comm_hook``.

    If a checkpoint may lack keys (one in bf16, or of another recipe or mesh), load this object in a
    call of its own, with ``planner=DefaultLoadPlanner(allow_partial_load=True)``, which leaves the
    entries that are missing as they are; in a new model they are empty.

    Histories are the same on all ranks of a layer's mesh, and DCP saves them once. If weights are
    plain tensors, as in DDP, each data-parallel rank has its own histories; after loading, all
    ranks continue with the histories of one rank.

    Args:
        model: a model with or without converted layers. For a DDP model, the names don't contain
            the wrapper. Without the wrapper, errors of its hook are not found.

    Collectives: none, in ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = getattr(model, "_orig_mod", model)  # torch.compile may wrap DDP
        self.ddp = inner if isinstance(inner, DistributedDataParallel) else None
        self.model = model if self.ddp is None else self.ddp.module

    def state_dict(self) -> dict[str, Any]:
        """Return the amaxes by layer name and operand, and the errors of gradients.

        The newest amax of a history comes first. A history is empty before the first sync. The
        errors are under ``"gradient_errors"``, by name; this key is absent if no errors are kept.
        They are the tensors in use, which the next step changes: clone them to keep them in memory.
        """
        errors = self._errors()
        kept: dict[str, Any] = {_ERRORS: errors} if errors else {}
        return kept | {
            name: {
                operand: [] if each.history is None else [a for a in each.history.tolist() if a]
                for operand, each in layer.histories.items()
            }
            for name, layer in self._layers().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with saved histories and errors of gradients.

        Each history is cut to the length that this model keeps. Histories and errors that are not
        in ``state_dict`` start anew. Histories of unknown layers and operands, and errors of other
        ranks, are ignored. ``load_state_dict`` of the model does not replace loaded histories that
        no forward has used.

        Raises:
            ValueError: a history or an error is damaged. Then nothing is changed.
        """
        layers, own_errors = self._layers(), self._errors()
        rows = {
            name: saved_rows(state_dict.get(name, {}), layer.histories)
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

    def _errors(self) -> dict[str, torch.Tensor]:
        of_hook = {} if self.ddp is None else ddp_gradient_errors(self.ddp)
        return gradient_errors(self.model) | of_hook

    def _layers(self) -> dict[str, Float8Linear]:
        """Return the layers that have histories, by their names in ``state_dict`` keys."""
        return {
            without_wrappers(name): layer
            for name, layer in float8_layers(self.model).items()
            if layer.histories
        }


def _matching_errors(saved: Any, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the saved values of this rank's gradient errors; warn once if some are missing."""
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
            "set_gradient_transport(..., error_feedback=True) before the state is loaded, or "
            "register float8_ddp_hook with error feedback and pass the DDP model",
        )
    elif len(found) < len(own):
        warn_once(
            "gradient errors missing",
            f"Float8State: {len(own) - len(found)} of this rank's {len(own)} errors of gradients "
            "are not in the state, which is of another rank or mesh, or of a run without error "
            "feedback: they start at zero",
        )
    return found
