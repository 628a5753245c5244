"""Delayed scaling: the scale of an operand is computed from the amaxes of earlier steps.

A cast then needs no all-reduce. Each rank records the amaxes of a step.
:func:`fp8_dist.sync_float8_amax_and_scale_history` reduces the amaxes of all operands of a model at
once and computes the next scales from the histories.

Until a history holds a value (before the first sync, and as long as an operand is all zeros) each
tensor is scaled by its own amax. Between two syncs an operand's scale does not change. The recorded
amax is the maximum over all micro-batches of a step.

Note [Passes that count]
~~~~~~~~~~~~~~~~~~~~~~~~
A history must contain the amaxes of passes whose gradients an optimizer uses, and of no others.
Other passes run with gradients enabled, too: torch's pipelines infer shapes by a forward
and a backward over uninitialized memory, and users warm up, measure memory, or evaluate without
``no_grad``. Such a pass must leave no trace, or its amax decides the scales of the next ``length``
steps. Therefore:

* A cast records nothing. Its amax belongs to the pass, as one of the tensors that autograd saves
  for it. The backward that gives the weight its gradient records the amaxes
  (``Float8Weight.record_amaxes``). If the weight is frozen, any backward that accumulates
  gradients does; if the layer has no backward, because its input needs no gradient either, the
  forward does, unless the model is in evaluation mode (``eval()``) and was not at its last update.
  Nothing is recorded for a forward whose backward does not run, or by a backward that
  computes gradients of inputs alone.
* A gradient may be thrown away after the backward (``zero_grad``). So when a backward finds that
  the weight has no gradient, earlier amaxes are dropped: they belong to gradients that are gone. If
  the weight is frozen or computed, the gradients of the pass's parameters decide.

Gradients that are set to zero instead of None or taken by hooks, and passes of layers without a
backward, are not noticed: :func:`fp8_dist.invalidate_float8_scales` drops what was recorded since
the last sync. Code that takes gradients from ``.grad`` itself, or asks ``torch.autograd.grad`` for
them, begins a step per pass. A compiled graph sees neither which gradients a backward was asked
for nor those of other parameters than its weights.
"""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from fp8_dist.device import current_capture
from fp8_dist.kernels.scale import amax
from fp8_dist.mesh import all_reduce_max, groups_over
from fp8_dist.operand.state import State, owner_of, query, register_handle
from fp8_dist.scaling import Scheme, Statistics
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import normal_tensors

# The name of the history of an input that PrepareFloat8ModuleInput casts.
PREPARED_INPUT = "prepared_input"
AMAXES_KEY = "float8_amax_histories"  # in the metadata of a state_dict


class AmaxHistory(State):
    """Amax history of one operand of one layer, and the statistic that follows from it.

    Attributes:
        scheme: the scheme of the operand, with one scale per tensor.
        length: the number of amaxes that are kept.
        history: fp32 ``[length]``, newest amax first, padded with zeros; ``None`` before the first.
        statistic: the amax with which the operand is cast, fp32, 0-dim: the largest in the history.
            ``None`` if there is no history.
        current: fp32, 0-dim, the largest local amax of the passes since the last sync that count
            (Note [Passes that count]); ``None`` if there was none.
        last: fp32, 0-dim, the local amax of the last cast of a weight in eager code, since the last
            sync. ``None`` for other operands.
        mesh: the mesh of an operand that is a DTensor even if the layer's weight is not; otherwise
            ``None``.
        steps: how often passes have begun to accumulate gradients since the last sync.
        restored: whether ``Float8State.load_state_dict`` was called and no cast has followed.
        frozen: the state that decides a frozen weight's statistics.
        is_replaced: whether the layer takes an input that layers share, so that this history is not
            advanced. It is saved as empty, because its amaxes are outdated when it is used again.
    """

    amax_from = "cast"
    restored = False
    is_replaced = False

    def __init__(self, scheme: Scheme, length: int, mesh: DeviceMesh | None = None) -> None:
        self.scheme = scheme
        self.length = length
        self.history: torch.Tensor | None = None
        self.current: torch.Tensor | None = None
        self.statistic: torch.Tensor | None = None
        self.mesh = mesh
        self.last: torch.Tensor | None = None
        self.steps = 0
        self._recorded_in: int | None = None  # the last backward whose ``begins`` was known
        self.handle, self.frozen = register_handle(self), Frozen(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "frozen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A copy needs handles of its own.
        self.handle, self.frozen = register_handle(self), Frozen(self)
        self._recorded_in = None

    def look_up(
        self, x: torch.Tensor, schemes: Sequence[Scheme], groups: Sequence[str], *_: Any
    ) -> list[Statistics]:
        """The statistic of the history; without one, the amax of the global tensor.

        Collectives: none if there is a history, otherwise those of a dynamic cast.
        """
        if current_capture():
            raise NotImplementedError(
                "a CUDA graph is being captured, and would replay one step of a DELAYED scale: its "
                "amax history is kept by Python. Use ScalingType.DYNAMIC, or torch.compile"
            )
        self.restored = False
        if self.statistic is None:
            return [(all_reduce_max(amax(x), groups),)]
        return [(self.statistic.to(x.device),)]

    def record(self, value: torch.Tensor, backward: int | None, begins: bool) -> None:
        """Record the amax of a pass that counts.

        Args:
            backward: the number of the backward; ``None`` if ``begins`` is not known.
            begins: whether the pass begins to accumulate gradients.
        """
        self.is_replaced = False
        if backward not in (None, self._recorded_in):
            # A layer that is called several times has no gradient before the last of its backwards.
            self._recorded_in = backward
            self.steps += begins
            self.current = None if begins else self.current
        if not value.is_meta:
            current = value if self.current is None else self.current.to(value.device)
            # Layers that share an input record one amax.
            self.current = value if current is value else torch.maximum(current, value)

    def amaxes(self) -> torch.Tensor:
        """The amaxes to save, fp32, on the CPU."""
        if self.history is None or self.is_replaced:
            return torch.zeros(0, device="cpu")
        row = self.history.cpu()
        return row[row > 0]

    @normal_tensors()
    def load(self, history: torch.Tensor) -> None:
        """Continue from a saved history, cut to ``length``. An empty one starts a new history."""
        self.current = self.history = self.statistic = self.last = None
        self.restored = self.is_replaced = False
        history = history.detach()[: self.length]
        if len(history):
            row = pad(history.to(torch.float32), (0, self.length - len(history)))
            advance_to([self], row.clone().unsqueeze(0))


class HistoryInGraph(AmaxHistory):
    """An amax history, as far as a graph knows it: by the handles that operators take.

    It has no amaxes, so it is not initialized as its base class is.
    """

    def __init__(self, handle: torch.Tensor, of_frozen: torch.Tensor) -> None:
        self.handle = handle
        self.frozen = Frozen(self, of_frozen)


class Frozen(State):
    """The own amax of a frozen weight, which is recorded in its history.

    An optimizer step changes a weight only little, so the scale from its history still fits.
    Merging adapters may change a frozen weight a lot. So the statistic of the history is dropped.
    """

    amax_from = "statistic"

    def __init__(self, history: AmaxHistory, handle: torch.Tensor | None = None) -> None:
        self._history = weakref.proxy(history)  # which has this object
        self.handle = register_handle(self) if handle is None else handle

    def look_up(
        self, x: torch.Tensor, schemes: Sequence[Scheme], groups: Sequence[str], *_: Any
    ) -> list[Statistics]:
        self._history.statistic = None
        return self._history.look_up(x, schemes, groups)


@query("record_amaxes(Tensor after, Tensor handle, str[] names, Tensor[] amaxes) -> Tensor")
def record_amaxes(
    after: torch.Tensor, handle: torch.Tensor, names: list[str], amaxes: list[torch.Tensor]
) -> torch.Tensor:
    """Operator of ``Float8Weight.record_amaxes``; returns a copy of ``after``."""
    # Copy the amaxes, because a graph may reuse the memory of its tensors.
    owner_of(handle).record_amaxes({n: amax.clone() for n, amax in zip(names, amaxes, strict=True)})
    return after.clone()


record_amaxes.register_fake(lambda after, *_: torch.empty_like(after))


def warn_if_not_synced(histories: Mapping[str, AmaxHistory], fqn: str) -> None:
    """Warn once if histories have recorded several steps without a sync."""
    steps = max(history.steps for history in histories.values())
    if steps > 1:
        warn_once(
            "stale history",
            f"{fqn}: {steps} steps have run since the amax histories of DELAYED scales were last "
            "updated; call update_float8_scales(model) after each optimizer step, or "
            "attach_update(optimizer, model) once",
        )


def saved_rows(saved: Mapping[str, Any], histories: Iterable[str]) -> dict[str, torch.Tensor]:
    """The saved amaxes of histories, fp32 ``[amaxes]``, or empty tensors.

    Zeros, negative and non-finite values, which no history has, are left out.
    """
    rows = {name: torch.as_tensor(saved.get(name, ()), dtype=torch.float32) for name in histories}
    return {name: row[(row > 0) & row.isfinite()].detach() for name, row in rows.items()}


def load_histories(
    histories: Mapping[str, AmaxHistory],
    saved: Mapping[str, Any],
    meshes: Iterable[DeviceMesh],
    device: torch.device,
) -> None:
    """Continue the histories of a layer from saved ones. Those that were not saved start anew.

    Histories that are ``restored`` keep their values, and other ranks take them over. The metadata
    of a ``state_dict`` may be older than what ``Float8State`` has loaded: DCP, for instance, reads
    into a ``state_dict()`` that was made before.

    Args:
        saved: the saved amaxes by name, the newest first.
        meshes: the meshes that the layer's operands are distributed over. Ranks that were given no
            histories take those of other ranks. (Ranks that receive a broadcast have none.)
        device: the device of the histories if there are no meshes.

    Collectives: an all-reduce over each mesh, of 4 bytes per amax that the histories can hold.
    """
    restored = all(history.restored for history in histories.values())
    rows = list(saved_rows(saved, histories).values())
    if restored:
        rows = [history.amaxes() for history in histories.values()]
    meshes = list(dict.fromkeys(meshes))
    if meshes:
        length = max(history.length for history in histories.values())
        cut = [row[:length].cpu() for row in rows]
        merged = torch.stack([pad(row, (0, length - len(row))) for row in cut])
        for mesh in meshes:
            groups = groups_over(mesh, range(mesh.ndim))
            merged = all_reduce_max(merged.to(mesh.device_type), groups)
        rows = [row[row > 0] for row in merged]  # padding is 0; an amax in a history is positive
    for history, row in zip(histories.values(), rows, strict=True):
        history.load(row if meshes else row.to(device))
        history.restored = restored


def advance(histories: Sequence[AmaxHistory], values: torch.Tensor, is_local: bool = False) -> None:
    """Push the global amaxes of a step (fp32, one per operand) onto the histories.

    A non-finite amax is left out: it has poisoned the step itself, whose update may have been
    skipped. Also left out are an amax of 0, as ranks without a cast report, and a negative one,
    of a weight that no rank has used.

    ``is_local``: no other rank has cast the operands.
    """
    by_length: dict[int, list[int]] = {}
    on_host: list[float] = []
    for i, history in enumerate(histories):
        was_cast, history.steps = history.current is not None, 0
        history.current = history.last = None
        if history.history is None:
            if is_local and not was_cast:
                continue
            # Only here does the host read values. They are the same on all ranks.
            on_host = on_host or values.tolist()
            if not 0 < on_host[i] < math.inf:
                continue
        by_length.setdefault(history.length, []).append(i)
    # A tensor of indices would be copied to the GPU, and the host would wait for the copy.
    amaxes = values.nan_to_num(nan=0.0, posinf=0.0).unbind()
    for length, members in by_length.items():
        new = torch.stack([amaxes[i] for i in members]).unsqueeze(1)
        empty = new.new_zeros(length)
        before = [histories[i].history for i in members]
        old = torch.stack([empty if row is None else row.to(new.device) for row in before])
        # A row whose amax is left out stays. The device decides, so the host reads no values.
        rows = torch.where(new > 0, torch.cat([new, old[:, :-1]], dim=1), old)
        advance_to([histories[i] for i in members], rows)


def advance_to(histories: Sequence[AmaxHistory], rows: torch.Tensor) -> None:
    """Set the amaxes of histories to ``rows``, ``[histories, length]``, and their statistics."""
    largest = rows.amax(dim=1)
    for i, history in enumerate(histories):
        history.history, history.statistic = rows[i], largest[i]
