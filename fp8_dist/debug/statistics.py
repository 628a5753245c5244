"""``float8_stats``: statistics of the float8 casts of a model, by layer and operand.

A layer is a Float8Linear, or one weight of a module of experts.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.debug import rows
from fp8_dist.debug.measures import Measures, combine_, measure_casts, measure_gemm, nothing, set_
from fp8_dist.debug.rows import Anomaly, AnomalyLimits, CastStats, Row
from fp8_dist.debug.slots import Patterns, Slot, matching, slots_of
from fp8_dist.mesh import GroupNames, make_group, this_rank
from fp8_dist.operand.observers import Casts, Observer, Original, Owner, Product, observed_by
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.torch_internals import funcol, resolve_process_group
from fp8_dist.weight.agreement import first_difference
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.weights import weights_by_layer

OnAnomaly = Callable[[Anomaly], None] | Literal["warn"] | None
# The owner, the operand and the GEMMs of a cast. The operand is None for the result of a GEMM.
_Key = tuple[Owner, Operand | None, tuple[Gemm, ...]]


class StepObserver(Observer):
    """An observer that, at the end of a step, combines the measures of the ranks."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None,
        limits: AnomalyLimits,
        every: int = 1,
        gemms: bool = False,
        on_anomaly: OnAnomaly = None,
    ) -> None:
        self.step = -1  # the last step that was entered
        self.rows: list[Row] = []
        self.anomalies: list[Anomaly] = []
        self.limits = limits
        self._last: list[Row] = []  # the rows of the last recorded step
        self._model = model
        self._every = every
        self._gemms = gemms
        self._on_anomaly = on_anomaly
        self._block: ExitStack | None = None
        self._first = rows.FirstAnomalies(limits)
        self._measured: dict[_Key, torch.Tensor] = {}
        self._ranks = _Ranks(mesh)
        self._look()

    def _look(self) -> None:
        """Find the casts and GEMMs that the model makes now."""
        weights = weights_by_layer(self._model)
        for name, weight in weights.items():
            if self._gemms and weight.meshes():
                raise ValueError(
                    f"float8_stats: gemms=True compares GEMMs on one device, and {name} is on a "
                    "mesh; compare them in a model that is not distributed, or record and replay"
                )
        self._ranks.update(weights)
        self._slots = {slot.key: slot for slot in slots_of(weights, self._gemms)}
        self._names = {slot.owner: slot.fqn for slot in self._slots.values()}

    def at(self, step: int) -> Self:
        """Set the number of the step that the next block begins, and return this object."""
        self.step = step - 1
        return self

    def __enter__(self) -> Self:
        if self._block is not None:
            kind = type(self).__name__
            raise RuntimeError(f"this {kind} is already recording; leave its block first")
        self.step += 1
        self._block = ExitStack()
        self._measured = {}
        if self.step % self._every == 0:
            self._look()
            if self._slots:
                # On all ranks, so that all run eagerly: graphs may order collectives differently.
                self._block.enter_context(observed_by(self, self._gemms))
        return self

    def __exit__(self, error: Any, *others: Any) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.close()
        if error is None and self.step % self._every == 0 and self._slots:
            self._end_step()

    def _end_step(self) -> None:
        """Combine the measures of the ranks, and look for anomalies."""
        measures = self._ranks.combined([*self._slots.values()], self._measured)
        # A slot without a scale was measured on no rank.
        self._last = [row_of(s, m, self.step) for s, m in measures.items() if m.scale != -math.inf]
        self.rows += self._last
        # Report anomalies in the order of the casts, so that causes come before effects.
        ordered = sorted(self._last, key=lambda row: row.position)
        new = [anomaly for row in ordered for anomaly in self._first.of(row)]
        self.anomalies += new
        if callable(self._on_anomaly):
            for anomaly in new:
                self._on_anomaly(anomaly)  # on all ranks
        elif new and self._on_anomaly == "warn" and self._ranks.is_first():
            warnings.warn(f"float8_stats: {rows.summarized(new)}", stacklevel=3)


class Float8Stats(StepObserver):
    """The context manager that :func:`float8_stats` returns, with the rows that it recorded.

    Attributes:
        rows: the rows of all recorded steps, in the order of the model's layers. They are the same
            on all ranks.
        anomalies: the first anomaly of each kind in each layer, in the order of the casts.
        step: the number of the last step that was entered.
        limits: the limits beyond which statistics are anomalous.
    """

    def on_casts(self, owner: Owner, operand: Operand, original: Original, lows: Casts) -> None:
        if owner in self._names:
            all_measures = measure_casts(original.product(), [*lows.values()], this_rank())
            for gemms, measures in zip(lows, all_measures, strict=True):
                self._add((owner, operand, gemms), measures)

    def on_multiply(self, owner: Owner, product: Product) -> None:
        left, right, result = product.high_left, product.high_right, product.result
        if owner not in self._names or left is None or right is None:
            return
        gemms: list[Any] = [(left, right, result)]
        if product.groups is not None:
            gemms = [
                [x[expert] if x.ndim == 3 else x.narrow(0, begin, count) for x in gemms[0]]
                for expert, begin, count in product.groups.slices()
            ]
        for tensors in gemms:
            if (measures := measure_gemm(product.gemm, *tensors)) is not None:
                self._add((owner, None, (product.gemm,)), measures)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain Python values. ``kind`` is ``"cast"`` or ``"gemm"``."""
        return [rows.as_dict(row) for row in self.rows]

    def append_jsonl(self, path: str | Path) -> None:
        """Append the rows to a file, one JSON object per line, and remove them from ``rows``.

        Numbers that JSON can't represent become the strings ``"NaN"``, ``"Infinity"`` and
        ``"-Infinity"``. Call this method on one rank only.
        """
        written = self.to_dicts()
        self.rows = []
        rows.append_jsonl(written, Path(path))

    def to_tensorboard(self, writer: Any, *, layers: Patterns | None = None) -> None:
        """Write the rows to a ``torch.utils.tensorboard.SummaryWriter``, and remove them.

        Without rows, as after a step that is not recorded, nothing is written.

        The tags are ``float8/OPERAND_for_GEMMS/LAYER/amax`` and so on, with the names of the GEMMs
        that multiply the float8 copy. The tag of a GEMM's SQNR is ``float8/GEMM/LAYER/sqnr``.

        Args:
            writer: the writer. Call this method on one rank only.
            layers: fnmatch patterns of the layers whose rows are written. Default: all. The rows of
                other layers are removed too.

        Raises:
            TypeError: the patterns are neither a string nor several strings.
            ValueError: a pattern matches no layer.
        """
        for step, scalars in self._take_scalars("to_tensorboard", layers).items():
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)

    def to_wandb(self, run: Any, *, layers: Patterns | None = None) -> None:
        """Log the rows to a W&B run (the result of ``wandb.init()``), and remove them.

        Names, arguments and errors are as in :meth:`to_tensorboard`. The numbers of a step become
        one ``run.log(..., step=step)``. Log other metrics of a step before those of later steps.
        """
        for step, scalars in self._take_scalars("to_wandb", layers).items():
            run.log(scalars, step=step)

    def _take_scalars(self, caller: str, layers: Patterns | None) -> dict[int, dict[str, float]]:
        """Remove all rows, and return the numbers of the chosen layers by step and name."""
        names = [*dict.fromkeys(self._names.values())]
        chosen = set(names)
        if layers is not None and names:
            chosen = matching(caller, layers, names)
        taken = [row for row in self.rows if row.fqn in chosen]
        self.rows = []
        scalars: dict[int, dict[str, float]] = defaultdict(dict)
        for row in taken:
            if isinstance(row, CastStats):
                tag = f"float8/{row.operand}_for_{'_'.join(row.gemms)}/{row.fqn}"
                for name in ("amax", "scale", "underflow", "saturation", "nonfinite", "sqnr"):
                    scalars[row.step][f"{tag}/{name}"] = getattr(row, name)
            else:
                scalars[row.step][f"float8/{row.gemm}/{row.fqn}/sqnr"] = row.sqnr
        return scalars

    def table(self) -> str:
        """Return the rows of the last recorded step as text, even if they were removed."""
        if not self._slots:
            return "no casts: the model has no converted layer"
        return rows.table(self._last)

    def __repr__(self) -> str:
        return f"Float8Stats({len(self.rows)} rows, {len(self.anomalies)} anomalies)"

    def _add(self, key: _Key, measures: torch.Tensor) -> None:
        total = self._measured.setdefault(key, nothing(measures.device))
        combine_(total, measures.to(total.device))


def row_of(slot: Slot, measures: Measures, step: int) -> Row:
    """Return the row of a cast or a GEMM."""
    if slot.operand is None or slot.scheme is None:
        sqnr = rows.decibels(measures.signal, measures.noise)
        return rows.GemmStats(step, slot.fqn, slot.gemms[0], sqnr, int(-measures.minus_position))
    return CastStats.of(
        measures,
        slot.scheme,
        step=step,
        fqn=slot.fqn,
        operand=slot.operand,
        gemms=slot.gemms,
        delayed=slot.delayed,
        folded=slot.folded,
    )


class _Ranks:
    """The ranks whose measures are combined.

    These are the ranks of ``mesh`` if it is given, otherwise of the largest mesh that was seen on
    an operand of any layer. They are all ranks if there is no mesh.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self._is_given = mesh is not None
        self._groups: GroupNames = ()  # those of the last measures that were combined

    def update(self, weights: Mapping[str, Float8Weight]) -> None:
        """Update the layers and the mesh, which is kept while FSDP2 unshards parameters."""
        self._weights = weights
        if not self._is_given:
            seen = [mesh for weight in weights.values() for mesh in weight.meshes()]
            known = [] if self._mesh is None else [self._mesh]
            self._mesh = max(known + seen, key=DeviceMesh.size, default=None)

    def combined(self, slots: list[Slot], local: dict[_Key, torch.Tensor]) -> dict[Slot, Measures]:
        """Combine the measures of all ranks. All ranks call this method for the same slots.

        Args:
            local: this rank's measures, fp64 ``[11]``, in the order of the casts and GEMMs. The
                method fills in ``minus_position``.

        Collectives: an all-gather of 88 bytes for each slot (or one for each mesh axis, if no group
        spans the mesh). The first time, if no layer is on a mesh, also an all-reduce of 16 bytes.
        """
        self.update(self._weights)
        self._groups = self._find_groups()
        none = nothing(self._device())
        totals = torch.stack([local.get(slot.key, none).to(none.device) for slot in slots])
        positions = {key: -float(position) for position, key in enumerate(local)}
        minus_positions = [positions.get(slot.key, -math.inf) for slot in slots]
        set_(totals, minus_position=totals.new_tensor(minus_positions))
        for name in self._groups:
            size = resolve_process_group(name).size()
            gathered = funcol.wait_tensor(funcol.all_gather_into_tensor(totals, size, name))
            totals, *others = gathered.view(size, *totals.shape).clone()
            for other in others:
                combine_(totals, other)
        return dict(zip(slots, (Measures(*total) for total in totals.tolist()), strict=True))

    def is_first(self) -> bool:
        """Return whether this rank is the first one whose measures were combined."""
        return all(resolve_process_group(group).rank() == 0 for group in self._groups)

    def _device(self) -> torch.device:
        # A mesh comes first, because FSDP2 may offload weights to the CPU.
        if self._mesh is not None:
            return torch.device(self._mesh.device_type)
        weights = self._weights.values()
        registered = (weight.parameter() for weight in weights if weight.is_registered)
        # Reading a computed weight may run a parametrization.
        others = (parameter for weight in weights for parameter in weight.module.parameters())
        computed = (weight.parameter() for weight in weights)
        return next(chain(registered, others, computed)).device

    def _find_groups(self) -> GroupNames:
        if self._mesh is not None:
            return make_group([self._mesh])
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ()
        world = dist.group.WORLD
        assert world is not None
        if not self._groups:  # the first time
            facts = {}
            for name, weight in self._weights.items():
                shape = weight.parameter().shape if weight.is_registered else "computed"
                facts[name] = f"{shape} {weight.config}"
            if difference := first_difference(facts, [world], self._device().type):
                raise ValueError(
                    f"float8_stats: the ranks have different layers ({difference}), and weights on "
                    "no mesh to tell which ranks belong together (pipeline stages?); give mesh=, "
                    "the ranks that have the same layers"
                )
        return (str(world.group_name),)


def float8_stats(
    model: nn.Module,
    *,
    every: int = 1,
    gemms: bool = False,
    mesh: DeviceMesh | None = None,
    on_anomaly: OnAnomaly = None,
    limits: AnomalyLimits | None = None,
) -> Float8Stats:
    """Record statistics of the float8 casts of a model's layers.

    ::

        stats = float8_stats(model, every=100, on_anomaly="warn")
        for step in range(steps):
            with stats:
                loss = model(x); loss.backward()
            optimizer.step()
        print(stats.table())

    Entering the block begins a step; ``with stats.at(step):`` sets the number of the step. Steps
    are counted from 0, or from the ``first`` of a :class:`fp8_dist.report.RunWriter`. The
    statistics cover all casts in the block, over all micro-batches, but not the forwards that
    activation checkpointing repeats. They describe global tensors: one device would measure the
    same numbers if the batches of all data-parallel ranks were its micro-batches.

    This works with every recipe and every parallelism. In recorded blocks, all code runs eagerly,
    even if ``torch.compile`` has compiled it. Outside of them, there is no overhead. A model
    without converted layers, such as a baseline in bf16, is not observed and has no rows.

    Args:
        model: a model that is already converted and parallelized.
        every: record only steps whose numbers are multiples of this.
        gemms: also multiply the operands in high precision (fp32), and report the SQNR of each
            float8 GEMM's result. No layer may be on a mesh: for such layers, :func:`record` and its
            replay check each GEMM. Inputs, including those of checkpointed blocks, are kept in high
            precision until the backward.
        mesh: the mesh whose ranks' measures are combined. Default: the largest mesh of a weight; if
            no layer is on a mesh (DDP), all ranks, which must have the same layers. Pass a mesh if
            the weights do not show the parallelism: tensor parallelism inside DDP, layers that are
            each on one of several axes, pipeline stages without FSDP2. Ranks without converted
            layers take no part, so every rank needs one where no layer is on a mesh.
        on_anomaly: a function that is called on all ranks when a block ends, with the first
            :class:`Anomaly` of each kind in each layer. ``"warn"``: issue one warning for all
            anomalies of a block instead, on the first of the ranks whose measures are combined.
        limits: the limits beyond which statistics are anomalous.

    Returns:
        A context manager with ``rows``, which grows with each recorded step, and ``anomalies``.

    Collectives: when a recorded block ends without an error, one all-gather of 88 bytes per layer
    and cast (or one for each mesh axis, if no group spans the mesh). If no layer is on a mesh, also
    an all-reduce of 16 bytes before the first all-gather. None without converted layers.

    Raises:
        TypeError: ``model`` is not a module, ``on_anomaly`` is not callable, ``limits`` is not an
            AnomalyLimits, or ``mesh`` is not a DeviceMesh.
        ValueError: ``every`` is not a positive integer, or with ``gemms`` a layer is on a mesh.
            When the first recorded block ends: no layer is on a mesh, and the ranks have different
            layers.
        RuntimeError: the context manager is entered again inside its own block.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"float8_stats: every={every!r} must be a positive integer")
    if not (on_anomaly in (None, "warn") or callable(on_anomaly)):
        raise TypeError(f"float8_stats: on_anomaly={on_anomaly!r}: use 'warn', a function or None")
    for name, value, kind in (("limits", limits, AnomalyLimits), ("mesh", mesh, DeviceMesh)):
        if not isinstance(value, kind | None):
            raise TypeError(f"float8_stats: {name}={value!r} must be of type {kind.__name__}")
    return Float8Stats(model, mesh, limits or AnomalyLimits(), every, gemms, on_anomaly)
