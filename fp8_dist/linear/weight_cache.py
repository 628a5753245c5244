"""Cache of a weight's scales, and its invalidation when the weight changes.

Precompute and FSDP2's gather store scales; a forward stores none, because ranks without tokens for
an expert skip it. A scale may be used only for the values that it was computed from. Changes of a
weight are noticed as follows. The table of docs/state.md also lists the writes that are not
noticed, because Python sees no trace of them, and what happens then:

* Any ``torch.optim`` step: a global post-step hook invalidates the optimizer's parameters, because
  foreach and fused steps change a DTensor without raising version counters. For other
  parameters the hook drops the scales that a forward or a gather has found: mixed-precision
  optimizers copy master weights back through ``.data``, which no counter sees.
* FSDP2 exchanges sharded and unsharded parameters: the layer notices each exchange. Scales that
  precompute found for what FSDP2 gathers in high precision hold as long as the version of neither
  parameter shows a write.
* In-place ops: version counters show them, from the moment when the amax is computed. A weight that
  FSDP2 gathers in float8 also counts writes that torch does not count. For other frozen weights
  nothing is kept, because no optimizer step invalidates them (PEFT merges adapters through
  ``.data``).
* ``parameter.data = tensor``, unless the parameter is a DTensor (torch leaves those unchanged), and
  ``swap_tensors``: the storage is another one.
* ``load_state_dict``, ``module.to()``, a replaced parameter: the layer clears the cache, or the
  identity of the parameter differs.

Every change, noticed or not, must be made on all ranks: if only one rank drops its scales, it waits
for an all-reduce that the other ranks do not join.

The state depends only on the sequence of calls, which is the same on all ranks, so ranks agree
about which weights need a collective. A compiled graph queries it when it runs, by an operator.
"""

from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8_dist.linear.optimizer_steps import watch_steps
from fp8_dist.mesh import local_tensor
from fp8_dist.scaling import Scales, Scheme, Statistics
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import innermost, storage_address, version_of

# The statistics of a weight for each scheme.
Known = dict[Scheme, Statistics]
# A parameter, its version, and the version of its local tensor: they identify its values.
_Values = tuple[torch.Tensor, int | None, int | None]


class ScaleState(Enum):
    """State of a weight's scales."""

    UNKNOWN = auto()  # the next use computes them
    PRECOMPUTED = auto()
    STALE = auto()  # precomputed, but the weight has changed since: the next use warns
    FROM_GATHER = auto()  # computed when FSDP2 gathered the sharded parameter


# Tuples instead of sets, because the hash of an enum member is computed in Python.
_OF_PRECOMPUTE = (ScaleState.PRECOMPUTED, ScaleState.STALE)
_WITHOUT_SCALES = (ScaleState.UNKNOWN, ScaleState.STALE)


class WeightCache:
    """Scales for the current values of one weight.

    =========================  ===========  ===========  ===========  ===========
    event                      UNKNOWN      PRECOMPUTED  STALE        FROM_GATHER
    =========================  ===========  ===========  ===========  ===========
    ``store`` PRECOMPUTED      PRECOMPUTED  PRECOMPUTED  PRECOMPUTED  PRECOMPUTED
    ``store`` FROM_GATHER      FROM_GATHER  FROM_GATHER  FROM_GATHER  FROM_GATHER
    ``drop``; a step of its                 STALE                     UNKNOWN
    optimizer; a new version
    step of another optimizer                                         UNKNOWN
    ``warn_if_stale``                                    UNKNOWN
    ``reset``                  UNKNOWN      UNKNOWN      UNKNOWN      UNKNOWN
    =========================  ===========  ===========  ===========  ===========

    In an empty cell the state does not change.

    Attributes:
        state: see the table.
        known: the statistics of the local shard for each scheme; or, of what FSDP2 gathers in high
            precision, those that precompute found because a forward would need other ranks.
        whole_scales: the scales of the global weight, if FSDP2's gather can't carry scales.
        steps_since_sync: optimizer steps since the amax histories of the layer were updated.
    """

    def __init__(self) -> None:
        self.state = ScaleState.UNKNOWN
        self.whole_scales: Scales | None = None
        self.known: Known | None = None
        # The reference is strong, because swap_tensors, which module.to() may use, refuses tensors
        # with weak references.
        self._param: torch.Tensor | None = None
        self._values: _Values | None = None
        self._storage: StorageWeakRef | None = None
        # The sharded parameter that FSDP2 gathered, and the unsharded one.
        self._origin: _Values | None = None
        self._gathered: _Values | None = None
        self._is_of_gathered = False  # ``known`` is of what FSDP2 gathers from the parameter
        self.steps_since_sync = 0

    def store(
        self,
        param: torch.Tensor,
        known: Known,
        state: ScaleState,
        whole_scales: Scales | None = None,
        is_of_gathered: bool = False,
    ) -> None:
        """Store the statistics for the current values of ``param``.

        Args:
            state: FROM_GATHER or PRECOMPUTED.
            is_of_gathered: whether they are those of what FSDP2 gathers from ``param``.
        """
        self.state, self.known, self.whole_scales = state, known, whole_scales
        self._is_of_gathered = is_of_gathered
        self._values = _values(param)
        if not self._has_same_storage(param):
            # A weak reference to the storage keeps its address from being reused.
            self._storage = StorageWeakRef(innermost(param).untyped_storage())
        self.watch(param)

    def watch(self, param: torch.Tensor) -> None:
        """Be notified of the steps of optimizers that update ``param``."""
        if self._param is not param:
            self._param = param
            watch_steps(self)

    def is_fresh(self, param: torch.Tensor) -> bool:
        """Whether scales are known for the current values of ``param``."""
        source = self._source_of(param)
        if self._param is not source or source is None or self.state in _WITHOUT_SCALES:
            return False
        if not self._has_same_values(source):
            self.drop()
        return self.state not in _WITHOUT_SCALES

    def _source_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The parameter whose values decide whether the scales that are known fit ``param``.

        It is ``param`` itself; or the sharded parameter that FSDP2 gathered it from, if nothing was
        written to ``param`` since, and the sharded one was not frozen: then it may have changed
        unnoticed. (FSDP2's unsharded parameter does not follow when the sharded one is frozen.)
        """
        if not self._is_of_gathered:
            return param
        source = self._origin[0] if self._origin is not None else None
        if source is None or not source.requires_grad or not _is_same(param, self._gathered):
            return None
        return source

    def _has_same_values(self, param: torch.Tensor) -> bool:
        return _is_same(param, self._values) and self._has_same_storage(param)

    def _has_same_storage(self, param: torch.Tensor) -> bool:
        storage = self._storage
        return storage is not None and storage.cdata == storage_address(innermost(param))

    def parameter_replaced(self, by: torch.Tensor | None, gathered: torch.Tensor | None) -> None:
        """Called when the layer's parameter is replaced.

        Args:
            by: the new parameter.
            gathered: the sharded parameter, if FSDP2 gathered ``by`` from it.
        """
        self._origin, self._gathered = _values(gathered), _values(by)

    def optimizer_stepped(self, updated: set[int]) -> None:
        """Invalidate the cache after an optimizer step that updated parameters with these ids."""
        is_own = id(self._param) in updated
        self.steps_since_sync += is_own
        if is_own or self.state not in _OF_PRECOMPUTE:
            self.drop()

    def drop(self) -> None:
        """Drop scales. Precomputed ones become STALE."""
        of_precompute = self.state in _OF_PRECOMPUTE
        self.state = ScaleState.STALE if of_precompute else ScaleState.UNKNOWN
        self.known = self.whole_scales = None

    def reset(self) -> None:
        """Forget everything, because the parameter is about to be replaced."""
        self.drop()
        self.state = ScaleState.UNKNOWN
        self._param = self._values = self._origin = self._gathered = None

    def warn_if_stale(self, param: torch.Tensor, name: str) -> None:
        """Warn once if the precomputed scale of ``param`` is STALE."""
        if self.state is ScaleState.STALE and (self._param is param or self._is_of_gathered):
            self.state = ScaleState.UNKNOWN
            warn_once(
                "stale scale",
                f"{name}: the weight was written to after the scales were precomputed, so they are "
                "computed again in this step, with one all-reduce per sharded weight. Call "
                "update_float8_scales(model) after such a change, or attach_update(optimizer, "
                "model) once, if an optimizer made it",
            )

    def warn_if_not_synced(self, name: str) -> None:
        """Warn once if several optimizer steps were taken without a sync of the delayed scales."""
        if self.steps_since_sync > 1:
            warn_once(
                "stale history",
                f"{name}: {self.steps_since_sync} optimizer steps were taken since the amax "
                "histories of DELAYED scales were last updated; call "
                "sync_float8_amax_and_scale_history(model) once per step",
            )


def _values(param: torch.Tensor | None) -> _Values | None:
    return None if param is None else (param, version_of(param), version_of(local_tensor(param)))


def _is_same(param: torch.Tensor | None, values: _Values | None) -> bool:
    """Whether a parameter is the one of ``values`` and has not changed since."""
    return values is not None and values[0] is param and values == _values(param)
