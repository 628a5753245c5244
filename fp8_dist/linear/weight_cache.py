"""Whether a weight's scale still belongs to the weight's values.

A scale, and the float8 copy made with it, may be used only for the values it was computed from.
What can change a weight, and how it is noticed:

* Any ``torch.optim`` step: a global post-step hook drops what is known of the optimizer's
  parameters. Version counters alone would not do: foreach and fused steps change a DTensor without
  raising them. The hook also drops what a forward or a gather found out about parameters that no
  optimizer was seen to update. They may be copies of such parameters: mixed-precision optimizers
  that own the masters copy them back through ``.data``.
* FSDP2 replaces sharded parameters by unsharded ones and back: the layer notices each exchange.
  The values of an unsharded parameter are unknown the next time, except in the backward. There
  they are what the forward gathered, unless the versions of the two tell of a write since.
* In-place ops on the parameter, on its ``to_local()`` or on what ``state_dict()`` gave out: version
  counters, from the moment when the amax is taken. A weight that FSDP2 gathers in float8 counts
  what torch does not: in-place foreach ops, writes into ``.data``, collectives into it. Of other
  frozen weights a forward leaves nothing to later ones, as no optimizer step ends what is known
  (PEFT merges adapters through ``.data``).
* ``parameter.data = tensor``, if the parameter is no DTensor (torch lets those be as they were),
  and ``swap_tensors``: another storage.
* ``load_state_dict``, ``module.to()``, a replaced parameter: the layer drops what is known, or the
  identity of the parameter differs.

What is not noticed is in the table of docs/state.md: the writes of which Python can read no trace.
For these there is :func:`fp8_dist.invalidate_float8_scales`. Without it a training forward uses the
old scale, and the old float8 copy if there is one, until the next optimizer step or precompute. An
evaluation uses neither, but for a precomputed or a DELAYED scale. (FSDP2 gathers without gradients
in training too: there ``model.eval()`` tells.) Every change, noticed or not, must be made on all
ranks: a rank that drops its scales alone waits alone for the all-reduce of new ones.

All of it depends on the sequence of calls alone, which is the same on all ranks, so ranks agree
about which of them need a collective. A compiled graph asks when it runs, by an operator.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8_dist.cast import Copies, Scalings
from fp8_dist.linear.optimizer_steps import watch_steps
from fp8_dist.mesh import local_tensor
from fp8_dist.torch_internals import in_backward, innermost, storage_address
from fp8_dist.warn import warn_once

# A parameter, its version and that of its local tensor stand for its values.
_Values = tuple[torch.Tensor, int | None, int | None]


class ScaleState(Enum):
    """What is known of a weight's scales.

    * ``UNKNOWN``: nothing. The next use computes them.
    * ``PENDING``: precompute's all-reduce is under way and will tell.
    * ``PRECOMPUTED``: precompute found them.
    * ``STALE``: precompute found them, and the weight has changed since: the next use warns.
    * ``FROM_GATHER``: found when FSDP2 gathered the sharded parameter.
    * ``FROM_FORWARD``: found by a forward, of whatever was the layer's parameter then.
    """

    UNKNOWN = auto()
    PENDING = auto()
    PRECOMPUTED = auto()
    STALE = auto()
    FROM_GATHER = auto()
    FROM_FORWARD = auto()


class Change(Enum):
    """How a weight has changed, in the words of the warning about its precomputed scale."""

    STEP = "an optimizer has taken a step"
    LOAD = "a state_dict was loaded"
    WRITE = "the weight was written to"


# (Not sets: the hash of an enum's member is computed in Python.)
_OF_PRECOMPUTE = (ScaleState.PENDING, ScaleState.PRECOMPUTED, ScaleState.STALE)
_WITHOUT_SCALES = (ScaleState.UNKNOWN, ScaleState.STALE)


class PendingScales:
    """Scales of several weights that a collective under way will make known.

    Args:
        find: waits for the collective; for each cache: its scaling by cast, and ``all_scales``.
    """

    def __init__(self, find: Callable[[], list[tuple["WeightCache", Scalings, Any]]]) -> None:
        self._find: Callable[[], Any] | None = find

    def wait(self) -> None:
        """Wait for the scales, and hand them to the caches that are still PENDING on them."""
        if self._find is not None:
            find, self._find = self._find, None
            # Autograd can't save inference tensors, and an evaluation may be the first to ask.
            with torch.inference_mode(False), torch.no_grad():
                found = find()
            for cache, scaling, all_scales in found:
                cache.resolve(self, scaling, all_scales)


class WeightCache:
    """What is known about the current values of one weight.

    =========================  =============  =============  ===========  =========================
    event                      UNKNOWN        PENDING,       STALE        FROM_GATHER, FROM_FORWARD
                                              PRECOMPUTED
    =========================  =============  =============  ===========  =========================
    ``store_pending``          PENDING        PENDING        PENDING      PENDING
    ``resolve``                               PRECOMPUTED
    ``store``                  FROM_...       FROM_... (a)   FROM_...     FROM_...
    ``drop``; a step of its                   STALE                       UNKNOWN
    optimizer; a new version
    step of another optimizer                                             UNKNOWN (b)
    ``parameter_replaced``                                                UNKNOWN (c)
    ``begin_evaluation``                      UNKNOWN (d)                 UNKNOWN
    ``end_of_evaluation``                                                 UNKNOWN (e)
    ``requires_grad_``                                                    UNKNOWN
    ``warn_if_stale``                                        UNKNOWN
    ``reset``                  UNKNOWN        UNKNOWN        UNKNOWN      UNKNOWN
    =========================  =============  =============  ===========  =========================

    An empty cell: the state stays. (a) The layer used another tensor than the parameter that the
    scales were precomputed for. (b) Unless an optimizer was seen to update the parameter. (c)
    FROM_FORWARD alone, and not where a backward gathers again what the forward gathered. (d) If it
    is asked to forget it. (e) When it is next asked for, if not by a backward.

    Attributes:
        state: see the table.
        float8: the local shard as float8, in each copy that was taken, where they are kept.
        all_scales: those of the global weight, where FSDP2's gather can't carry them (0 for those
            of parts that it does not gather).
        is_cast_ahead: the evaluation under way has begun for this weight, whose cast is made with
            those of other layers, but FSDP2 has not gathered it yet.
    """

    def __init__(self) -> None:
        self.state = ScaleState.UNKNOWN
        self.float8: Copies | None = None
        self.all_scales: torch.Tensor | None = None
        self.is_cast_ahead = False
        self._scaling: Scalings | PendingScales | Callable[[], Scalings] | None = None
        # The parameter, with its version and that of its local tensor. (A strong reference: tensors
        # with weak ones can't be swapped, as module.to() does.)
        self._param: torch.Tensor | None = None
        self._version: int | None = None
        self._local_version: int | None = None
        self._storage: StorageWeakRef | None = None
        self._was_frozen = False
        self._is_noted = False  # not after a load, when FSDP2 replaces local tensors that it pads
        self._of_evaluation = False  # a pass without gradients has ended: see end_of_evaluation
        # What FSDP2 gathered, and into what.
        self._origin: _Values | None = None
        self._gathered: _Values | None = None
        self._optimized = False  # an optimizer was seen to update the parameter
        self._change = Change.WRITE  # the one that made the scale STALE
        self._steps_since_sync = 0

    @property
    def scaling(self) -> Scalings | None:
        """The scaling of the local shard for each cast. One that is PENDING is waited for."""
        scaling = self._scaling  # another thread may drop it
        if isinstance(scaling, PendingScales):
            scaling.wait()
            scaling = self._scaling
        if callable(scaling):
            # Autograd can't save inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                self._scaling = scaling = scaling()
        return None if isinstance(scaling, PendingScales) else scaling

    def resolve(
        self, pending: PendingScales, scaling: Scalings, all_scales: torch.Tensor | None
    ) -> None:
        """Take the scales that were waited for, unless they were dropped in the meantime."""
        if self._scaling is pending:
            self.state = ScaleState.PRECOMPUTED
            self._scaling, self.all_scales = scaling, all_scales

    def store_pending(self, param: torch.Tensor, pending: PendingScales) -> None:
        """The scaling of the values that ``param`` has now is being precomputed."""
        self.store(param, pending, ScaleState.PENDING)

    def store(
        self,
        param: torch.Tensor,
        scaling: Scalings | PendingScales | Callable[[], Scalings],
        state: ScaleState,
        all_scales: torch.Tensor | None = None,
    ) -> None:
        """Remember the scaling of the values that ``param`` has now, as it is used.

        ``state`` says who found it: FROM_GATHER or FROM_FORWARD. A scaling that may not be asked
        for again can be given as a function that makes it.
        """
        origin = self._origin
        self.drop()
        self._origin = origin
        self.state, self._scaling, self.all_scales = state, scaling, all_scales
        self._note_values(param)
        if self._param is not param:
            self._param = param
            self._optimized = False
            watch_steps(self)

    def is_fresh(self, param: torch.Tensor) -> bool:
        """True if scales are known (or PENDING) for ``param``, and for the values it has now."""
        if self._param is not param:
            return False
        if self._is_noted and not self._has_same_values(param):
            self.drop(Change.WRITE)
            self._note_values(param)
        elif self._is_for_others(param):
            self._forget_found()
        return self.state not in _WITHOUT_SCALES

    def state_of(self, param: torch.Tensor) -> ScaleState:
        """The state that a use of ``param`` would find now; it is left as it is."""
        if self._param is not param:
            return ScaleState.UNKNOWN
        if self._has_same_values(param) and not self._is_for_others(param):
            return self.state
        return ScaleState.STALE if self.state in _OF_PRECOMPUTE else ScaleState.UNKNOWN

    def _is_for_others(self, param: torch.Tensor) -> bool:
        """True if what was found is for an evaluation that has ended, or for the trained weight.

        (A frozen weight may have another scale: see AmaxHistory.forget_scale.)
        """
        if self.state in _OF_PRECOMPUTE:
            return False
        is_other = self._was_frozen is param.requires_grad
        return is_other or (self._of_evaluation and not in_backward())

    def _has_same_values(self, param: torch.Tensor) -> bool:
        return (
            self._version == _version(param)
            and self._local_version == _version(local_tensor(param))
            and self._has_same_storage(param)
        )

    def _has_same_storage(self, param: torch.Tensor) -> bool:
        storage = self._storage
        return storage is None or storage.cdata == storage_address(innermost(param))

    def _note_values(self, param: torch.Tensor) -> None:
        self._is_noted, self._was_frozen = True, not param.requires_grad
        self._version, self._local_version = _version(param), _version(local_tensor(param))
        if self._storage is None or not self._has_same_storage(param):
            # (The weak reference keeps the storage's address from being given to another.)
            self._storage = StorageWeakRef(innermost(param).untyped_storage())

    def precomputed_for_another(self, param: torch.Tensor) -> bool:
        """True if a scale was precomputed for a parameter, and ``param`` is another."""
        return self.state in _OF_PRECOMPUTE and self._param is not param

    def begin_evaluation(self, forget_precomputed: bool = False) -> None:
        """Forget, before a pass without gradients, what others have found out.

        A model may be changed by means that go unnoticed before it is evaluated (an EMA by foreach
        ops). A precomputed scale stays by default: all ranks would have to ask for another one.
        """
        self.float8 = None
        if self.state not in _OF_PRECOMPUTE:
            self._forget_found()
        elif forget_precomputed and self.state is not ScaleState.STALE:
            self.drop()
            self.state = ScaleState.UNKNOWN

    def end_of_evaluation(self) -> None:
        """Forget, after a pass without gradients, what it has found out.

        A backward may still use the scale: the pass may have been the first half of reentrant
        activation checkpointing.
        """
        self.float8 = None
        self._of_evaluation = self.state not in _OF_PRECOMPUTE

    def _forget_found(self) -> None:
        """Forget the scale that a forward or a gather has found out."""
        self.state, self._of_evaluation = ScaleState.UNKNOWN, False
        self._scaling = self.float8 = self.all_scales = None

    def parameter_replaced(self, by: torch.Tensor | None, gathered: torch.Tensor | None) -> None:
        """The layer's parameter becomes another tensor, perhaps to come back with other values.

        (A sharded parameter that FSDP2 replaces doesn't change in the meantime.)

        Args:
            by: the other tensor.
            gathered: the sharded parameter, if FSDP2 gathered ``by`` from it. What a forward found
                out about ``by`` holds again in the backward, where a checkpointed block asks once
                more, unless it was dropped in between or one of the two was written to.
        """
        if self.state in (ScaleState.UNKNOWN, ScaleState.FROM_FORWARD):
            if self._origin is not None and self._origin[0] is by:
                return  # sharded again
            same = _is_same(gathered, self._origin) and _is_same(by, self._gathered)
            if same and in_backward():
                return
            self.drop()
        self._origin, self._gathered = _values(gathered), _values(by)

    def optimizer_stepped(self, updated: set[int]) -> None:
        """An optimizer took a step, which updated the parameters of these ids."""
        is_own = id(self._param) in updated
        self._optimized |= is_own
        self._steps_since_sync += is_own
        if is_own or not (self._optimized or self.state in _OF_PRECOMPUTE):
            self.drop(Change.STEP)
        if is_own and self._param is not None:
            self._note_values(self._param)

    def drop(self, change: Change | None = None) -> None:
        """Forget everything but that there once was a precomputed scale, and what changed since.

        ``change``: what has changed the values, if anything has.
        """
        if isinstance(self._scaling, PendingScales):
            self._scaling.wait()  # torch wants every collective waited for
        of_precompute = self.state in _OF_PRECOMPUTE
        self.state = ScaleState.STALE if of_precompute else ScaleState.UNKNOWN
        self._change = change or self._change
        self._is_noted &= change is not Change.LOAD
        self._scaling = self.float8 = self.all_scales = self._origin = None
        self._of_evaluation = False

    def reset(self) -> None:
        """Forget everything: the parameter is about to become another."""
        self.drop()
        self.state = ScaleState.UNKNOWN
        self._param = self._gathered = None

    def warn_if_stale(self, param: torch.Tensor, name: str) -> None:
        """Warn once if the precomputed scale of ``param`` was dropped and none followed."""
        if self.state is ScaleState.STALE and self._param is param:
            self.state = ScaleState.UNKNOWN
            call = "update_float8_scales(model) after such a change"
            if self._change is Change.STEP:
                call = (
                    "precompute_float8_dynamic_scale(model) after every optimizer.step(), or "
                    "attach_update(optimizer, model) once"
                )
            warn_once(
                "stale scale",
                f"{name}: {self._change.value} after the scales were precomputed, so they are "
                f"computed again in this step, with one all-reduce per sharded weight. Call {call}",
            )

    def synced(self) -> None:
        """The amax histories of the layer have been updated."""
        self._steps_since_sync = 0

    def warn_if_not_synced(self, name: str) -> None:
        """Warn once if optimizer steps pass by without a sync of the delayed scale."""
        if self._steps_since_sync > 1:
            warn_once(
                "stale history",
                f"{name}: {self._steps_since_sync} optimizer steps were taken since the amax "
                "histories of DELAYED scales were last updated; call "
                "sync_float8_amax_and_scale_history(model) once per step",
            )


def _version(tensor: torch.Tensor) -> int | None:
    """The version counter of a tensor; None if it keeps none."""
    return None if tensor.is_inference() else tensor._version


def _values(param: torch.Tensor | None) -> _Values | None:
    return None if param is None else (param, _version(param), _version(local_tensor(param)))


def _is_same(param: torch.Tensor | None, values: _Values | None) -> bool:
    """Whether a parameter is the one of ``values``, and has kept them."""
    return values is not None and values[0] is param and values == _values(param)
