"""Comparison of a model under a tensor-parallel plan with the model on one device.

The comparison needs a tolerance, because a sum over ranks is rounded in another order, and a float8
cast or a deep model enlarges such differences. A second run on one device measures the tolerance:
it adds rounding errors to the output of each module, and to its gradient.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fp8_dist.mesh import Layout, local_pieces, taken
from fp8_dist.tensor_parallel.diagnosis import (
    CallKey,
    Diagnosis,
    SeenCall,
    part_of,
    positive,
    unwrapped_modules,
)
from fp8_dist.tensor_parallel.plan import (
    Plan,
    apply_tp_plan,
    check_plan_arguments,
    mark_checked,
    styles_by_name,
)
from fp8_dist.text import without_wrappers
from fp8_dist.torch_internals import tree_map
from fp8_dist.weight.agreement import Facts

# A difference counts above this multiple of the effect of rounding. Right plans reached 1.3, wrong
# ones 6 or more (2 and 4 ranks, 2 to 12 layers, fp32 and bf16, all recipes).
_MARGIN = 3.0
# The minimum relative size of rounding errors. In fp32 one amax in a new binade may change all
# values of a cast, so the errors of fp32 itself would be too small.
_ROUNDING = 2.0**-12

# With fewer elements, as in a scalar loss, one draw of rounding errors may be almost zero. Outputs
# then get more draws, and a wider margin, because few numbers may differ by chance. Gradients are
# measured against their values.
_FEW = 64
_DRAWS = 8
_WIDER = 3.0

# Tensors by the name of what has them; None for one that is missing.
_Tensors = Mapping[Any, Sequence[Any]]


def check_tp_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    output_layouts: Placement | None = None,
) -> None:
    """Check that ``model`` computes the same under ``plan`` as on one device.

    Run it once for a model and its plan. A few layers and a small batch are enough. Every rank
    holds up to four copies of the whole model, and copies of all outputs of modules. The model and
    the state of random numbers are not changed. The copies are in eval mode, without dropout.

    The floating-point outputs of modules are compared, and then the gradients of parameters, by the
    root mean square of the difference. A difference counts if it is more than three times as large
    as the change on one device when the output of each module, and its gradient, are rounded. A
    plain tensor is compared with the tensor of one device, or with this rank's part of that along
    one dim if it is the output of a module of the plan. It also agrees if its sum over ranks does.
    Other outputs of another shape are not compared. For outputs of fewer than 64 elements, such as
    a loss, the effect of rounding is measured eight times, and nine times as much counts. Gradients
    of fewer than 64 elements are compared roughly, and between ranks. Trained parameters that are
    zero, which would hide errors in what they multiply, have random values in the copies.

    What the model returns must be whole on every rank, because a loss takes a plain tensor for the
    whole. A DTensor is whole, however it is sharded, as for ``loss_parallel``. If code outside the
    model takes parts, such as a loss of this rank's part of the sequence, declare it with
    ``output_layouts``. Tensors are found in tuples, lists, dicts, dataclasses, and what is
    registered as a pytree.

    Args:
        model: the model before ``apply_tp_plan``, ``fully_shard`` and ``torch.compile``, converted
            or not. It has the same weights on all ranks.
        mesh, plan: as for :func:`apply_tp_plan`.
        batch: the arguments of the forward: a tuple or list of them, a dict of keyword arguments,
            or else the only argument. Tensors are whole, and the same on all ranks.
        loss: a function of the model's output that returns a scalar. None: the sum of all outputs
            with random weights.
        output_layouts: the placement of plain tensors that the model returns as parts on purpose,
            such as ``Shard(1)``. Others may be whole.

    Afterwards ``apply_tp_plan`` does not warn about layers of ``model`` that look fused under
    ``plan``.

    Collectives: two all-reduces of 16 bytes, which ``comm_audit`` does not count, to compare the
    weights and the batch between ranks. Those of ``apply_tp_plan``, and of a forward and a
    backward. An all-gather or all-reduce of each output and gradient that is a DTensor, and an
    all-reduce of each plain output that differs. Two all-reduces of 16 bytes per module call and
    per parameter. An all-reduce of the plain gradients of fewer than 64 elements.

    Raises:
        ValueError: on all ranks: the output of a module or the gradient of a parameter differs (the
            first one and its size are named), the model returns a part, the plan does not fit (see
            ``apply_tp_plan``), the model is sharded already or on the meta device, or ranks have
            different weights or batches. On the ranks where it happens: the forward or the backward
            fails (the module is named). The error also names the layer whose entry does not fit its
            inputs or the module around it, and asks for the style that does, if the shapes of
            tensors tell.
    """
    check_plan_arguments("check_tp_plan(model, mesh, plan, batch)", model, mesh, plan)
    if mesh.size() == 1:
        warnings.warn("check_tp_plan: on a mesh of one rank every plan passes", stacklevel=2)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta:
            state = "on the meta device" if parameter.is_meta else "sharded already"
            raise ValueError(
                f"check_tp_plan: {name!r} is {state}. Check a model with its values, before "
                "apply_tp_plan and fully_shard"
            )
    weights, inputs = Facts(), Facts()
    weights.of(mesh).update(
        {f"the values of {name!r}": _digest(x) for name, x in model.state_dict().items()}
    )
    inputs.of(mesh).update({f"tensor {i}": _digest(x) for i, x in enumerate(_leaves(batch))})
    weights.check("check_tp_plan", fix="Give the same weights to all ranks")
    inputs.check(
        "check_tp_plan", found="were given different batches", fix="Give the same one to all ranks"
    )
    devices = [] if mesh.device_type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=mesh.device_type), torch.enable_grad():
        one, rounded, parallel = runs = [_Run(_copy_of(model), mesh) for _ in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about layers that look fused, which are compared here
            apply_tp_plan(parallel.model, mesh, plan)
        found = styles_by_name(model, plan)
        styles = {without_wrappers(name): style for name, style in found.items()}
        parallel.diagnosis = lambda: Diagnosis(model, mesh, styles, one.calls, parallel.calls)
        for run in runs:
            run.forward(batch, rounds=run is rounded)
        draws = [rounded.outputs, *_more_draws(model, batch, one)]
        _compare_outputs({*styles}, output_layouts, one, draws, parallel)
        for run in runs:
            run.backward(loss, [*one.outputs.values()][-1])
        expected, noisy, actual = (run.gradients() for run in runs)
        for name, error in _errors(mesh, expected, [noisy], actual).items():
            if error.counts:
                raise ValueError(
                    f"check_tp_plan: under the plan, the gradient of {name!r} differs from that on "
                    f"one device {error}. All outputs agree, and so do the gradients of the layers "
                    f"that run after it. {_about_gradient(parallel.diagnosis(), name)}"
                )
        for name, spread in _spreads(mesh, expected, noisy, parallel).items():
            raise ValueError(
                f"check_tp_plan: under the plan, the gradient of {name!r} differs between the "
                f"ranks, by up to {spread:.2g} (values: {_rms(expected[name][0]):.2g}), so its "
                f"copies would train apart. {_about_gradient(parallel.diagnosis(), name)}"
            )
    mark_checked(model, mesh, plan)


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy in eval mode, with random values in place of trained parameters that are zero.

    A zero hides errors in what it multiplies, and models begin with zeros on purpose: in the last
    weight of a residual branch, in adaLN's modulations, in LoRA's B. All copies get the same ones.
    """
    model = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                values = torch.randn(parameter.shape, generator=generator, device="cpu")
                inputs = max(1, *parameter.shape[1:]) if parameter.ndim > 1 else 16
                parameter.copy_(values / inputs**0.5)
    return model


class _Error(NamedTuple):
    """The ratio of a difference to the effect of rounding, and root mean squares."""

    ratio: float = 0.0
    difference: float = 0.0
    size: float = 0.0
    rounding: float = 0.0

    @property
    def counts(self) -> bool:
        return self.ratio > _MARGIN

    def __str__(self) -> str:
        by = f"by {self.difference:.2g}" if self.difference < torch.inf else "in shape, or by NaN"
        return (
            f"{by} (values: {self.size:.2g}, effect of rounding: {self.rounding:.2g}, all as root "
            "mean squares)"
        )


class _Run:
    """A forward and a backward of a model.

    Attributes:
        outputs: copies of the outputs of modules, whole or local, by the name of the module and the
            number of its call, in the order in which calls end. The last ones are the model's.
        output: what the model returned, unless the forward still runs.
        within: the calls of modules that have not ended.
        calls: the shapes that modules took and returned, in the order in which calls begin.
        diagnosis: makes a diagnosis of the run, if it is under the plan.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.outputs: dict[CallKey, list[torch.Tensor]] = {}
        self.output: Any = None
        self.within: list[CallKey] = []
        self.calls: dict[CallKey, SeenCall] = {}
        self.diagnosis: Callable[[], Diagnosis] | None = None

    def forward(self, batch: Any, *, rounds: bool) -> None:
        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            key = name, sum(called == name for called, _ in self.calls)
            self.within.append(key)
            if self.output is None:  # not for what a backward computes again
                self.calls[key] = SeenCall(dict(enumerate(args)) | kwargs)

        def leave(name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
            key = self.within.pop()
            if rounds:
                output = _mapped(_rounded, output)
            if self.output is None:
                floating = _floating(output)
                self.calls[key].ended(floating)
                self.outputs[key] = [_whole(x.detach()).clone() for x in floating]
            return output

        # The hooks stay for the backward, where activation checkpointing calls modules again.
        for name, module in unwrapped_modules(self.model).items():
            module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(leave, name))
        batch = _mapped(_cloned, batch)
        with self._named_failure():
            if isinstance(batch, Mapping):
                self.output = self.model(**batch)
            else:
                self.output = self.model(*(batch if isinstance(batch, tuple | list) else (batch,)))

    def backward(self, loss: Callable[[Any], Any] | None, outputs: list[torch.Tensor]) -> None:
        """Compute the gradients; ``outputs``: the whole outputs of the run on one device."""
        torch.manual_seed(0)
        weights = [torch.randn_like(output) for output in outputs]
        if loss is not None:
            with self._named_failure("the loss"):
                value = loss(self.output)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise TypeError(f"it must return a tensor of one element, got {value!r}")
        with self._named_failure():
            if loss is not None:
                value.backward()
            elif self.trained() and not outputs:
                raise ValueError("the output has no floating-point tensors, so give a loss")
            elif self.trained():
                local = [_whole(x) for x in _floating(self.output)]
                parts = [_part(w, x.shape, self.mesh) for w, x in zip(weights, local, strict=True)]
                terms = [(x * w).sum() for x, w in zip(local, parts, strict=True)]
                torch.stack(terms).sum().backward()

    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters, in about the order in which a backward reaches them."""
        parameters = self.model.named_parameters()
        named = [(without_wrappers(name), p) for name, p in parameters if p.requires_grad]
        # Parameters that no call of their own module uses come last.
        order = {name: i for i, (name, _) in enumerate(reversed(self.outputs))}
        named.sort(key=lambda pair: order.get(pair[0].rpartition(".")[0], len(order)))
        return dict(named)

    def gradients(self) -> dict[str, list[torch.Tensor]]:
        return {
            name: [_whole(torch.zeros_like(p) if p.grad is None else p.grad)]
            for name, p in self.trained().items()
        }

    @contextmanager
    def _named_failure(self, at: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            parallel = any(isinstance(p, DTensor) for p in self.model.parameters())
            unset = (f"the gradient of {n!r}" for n, p in self.trained().items() if p.grad is None)
            cause = ""
            if self.within:
                name, _ = self.within[-1]
                at = f"the forward of {_named(name)}"
                cause = "" if self.diagnosis is None else self.diagnosis().cause(name)
            elif "loss_backward" in str(error) and "DTensor" in str(error):
                cause = (
                    "Does the loss use loss_parallel()? Its backward must run there, too: call "
                    "check_tp_plan within loss_parallel()"
                )
            raise ValueError(
                f"check_tp_plan: {'under the plan' if parallel else 'on one device'}, "
                f"{at or next(unset, 'the backward')} fails: {type(error).__name__}: {error}"
                f"{_on_a_line(cause)}"
            ) from error


def _more_draws(model: nn.Module, batch: Any, one: _Run) -> Iterator[_Tensors]:
    """Run the model on one device with other rounding errors, for its outputs of few elements."""
    few = [key for key, outputs in one.outputs.items() if any(x.numel() < _FEW for x in outputs)]
    for _ in range(_DRAWS - 1 if few else 0):
        run = _Run(_copy_of(model), one.mesh)
        run.forward(batch, rounds=True)
        yield {key: run.outputs[key] for key in few}


def _compare_outputs(
    placed: set[str],
    returned: Placement | None,
    one: _Run,
    draws: Sequence[_Tensors],
    parallel: _Run,
) -> None:
    """Raise for the first difference.

    Args:
        placed: the modules whose outputs may be parts.
        returned: the placement of parts that the model may return.
        draws: the outputs on one device with rounding errors.
    """
    mesh, comparable = one.mesh, dict[CallKey, list[torch.Tensor | None]]()
    for call, expected in one.outputs.items():
        outputs = [*parallel.outputs.get(call, [])]
        if not call[0]:
            pairs = zip_longest(outputs, expected)
            comparable[call] = [x if _is_returned(x, y, returned, mesh) else None for x, y in pairs]
        elif call[0] in placed or [x.shape for x in outputs] == [x.shape for x in expected]:
            comparable[call] = [*outputs]
    errors = _errors(mesh, one.outputs, draws, comparable)
    agreeing = "no module"
    for call, expected in one.outputs.items():
        (name, _), suffix = call, ""
        if errors[call].counts and name:
            # The outputs may be summands, which a module around this one adds up.
            sums = [torch.zeros_like(x) for x in expected]
            for total, x in zip(sums, comparable.get(call, []), strict=False):
                if x is not None and total.shape == x.shape:
                    total.copy_(x)
            for total in sums:
                dist.all_reduce(total, group=mesh.get_group())
            error = _errors(mesh, {call: expected}, draws, {call: sums})[call]
            if not error.counts:
                errors[call], suffix = error, ", summed over ranks,"
        if errors[call].counts:
            assert parallel.diagnosis is not None
            diagnosis = parallel.diagnosis()
            part = diagnosis.returned_part() if errors[call].difference == torch.inf else ""
            if part and not name:
                raise ValueError(
                    "check_tp_plan: under the plan, the model returns this rank's part of what it "
                    f"returns on one device. {part}. If code outside the model takes parts, say so "
                    "with output_layouts of check_tp_plan"
                )
            raise ValueError(
                f"check_tp_plan: the output of {_named(name)} is the first that differs from "
                f"one device's under the plan: {errors[call]}. Before it, that of {agreeing} "
                "agrees. Look at the plan's entries up to this module, and at code between the two "
                "that takes a part of the features, or a summand, for the whole (chunk, split)"
                f"{_on_a_line(diagnosis.cause(name))}"
            )
        agreeing = f"{name!r}{suffix}" if errors[call].ratio >= 0 else agreeing


def _errors(
    mesh: DeviceMesh, one: _Tensors, draws: Sequence[_Tensors], parallel: _Tensors
) -> dict[Any, _Error]:
    """The largest error of each list of tensors, over the tensors and over the ranks.

    The ratio is -1 if ``parallel`` has no such list on any rank.
    """
    rows = []
    for key, tensors in one.items():
        worst = _Error(-1.0)
        lists = [rounded[key] for rounded in draws if key in rounded]
        others = zip_longest(tensors, parallel.get(key, ()))
        for i, (x, output) in enumerate(islice(others, len(tensors) if key in parallel else 0)):
            noisy = [outputs[i] for outputs in lists if i < len(outputs)]
            size, rounding = _rms(x), _effect(x, noisy, mesh)
            difference = _distance(x, output, mesh)
            is_sampled = x.numel() < _FEW and len(noisy) > 1
            expected = _WIDER * rounding if is_sampled else rounding
            ratio = difference / min(max(expected, 1e-30), 1e30)
            worst = max(worst, _Error(ratio, difference, size, rounding))
        rows.append(worst)
    table = torch.tensor(rows, device=mesh.device_type).view(-1, len(_Error._fields))
    dist.all_reduce(table, dist.ReduceOp.MAX, mesh.get_group())
    return {key: _Error(*row) for key, row in zip(one, table.tolist(), strict=True)}


def _spreads(
    mesh: DeviceMesh, one: _Tensors, rounded: _Tensors, parallel: _Run
) -> dict[str, float]:
    """The differences between ranks of plain gradients of few elements, where they count.

    One draw of rounding errors tells little about such gradients. But a plain parameter is the same
    on all ranks, and has the same gradient there, unless each computes it from a part.
    """
    # A rank may have none, because no code of its own reads the parameter.
    plain = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).to(mesh.device_type).double()
        for name, p in sorted(parallel.trained().items())
        if not isinstance(p, DTensor) and p.numel() < _FEW
    }
    if not plain:
        return {}
    limits = {
        name: max(_MARGIN * _distance(one[name][0], rounded[name][0], mesh), _rms(grad) / 256)
        for name, grad in plain.items()
    }
    values = torch.cat([grad.flatten() for grad in plain.values()])
    bounds = torch.cat([values, -values, values.new_tensor([*limits.values()])])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, mesh.get_group())
    largest, negative_smallest, allowed = bounds.split([len(values), len(values), len(limits)])
    spreads = (largest + negative_smallest).split([grad.numel() for grad in plain.values()])
    worst = [max(spread.tolist(), default=0.0) for spread in spreads]
    pairs = zip(plain, worst, allowed.tolist(), strict=True)
    return {name: spread for name, spread, limit in pairs if spread > limit}


def _effect(x: torch.Tensor, noisy: Sequence[torch.Tensor], mesh: DeviceMesh) -> float:
    """The effect of rounding errors on a tensor, given that with some draws of them."""
    if not noisy:  # a call that rounding errors avoid, as of an expert
        return torch.inf
    first = _distance(x, noisy[0], mesh)
    if x.numel() >= _FEW:
        return first
    if len(noisy) == 1:
        return max(first, _rms(x))
    return _rms(torch.tensor([_distance(x, other, mesh) for other in noisy]))


def _distance(whole: torch.Tensor, other: torch.Tensor | None, mesh: DeviceMesh) -> float:
    """The RMS of the difference; infinite for NaN, or if ``other`` is not shaped like a part."""
    if other is None or (part := _part(whole, other.shape, mesh)).shape != other.shape:
        return torch.inf
    return _rms(torch.where(part == other, 0, part - other))


def _rms(x: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm(x.double()) / max(x.numel(), 1) ** 0.5
    return float(norm.nan_to_num(torch.inf, torch.inf))


def _part(whole: torch.Tensor, shape: torch.Size, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part along the first dim whose size differs from ``shape``; else all of it."""
    for dim, (size, other) in enumerate(zip(whole.shape, shape, strict=False)):
        if size != other:
            return taken(whole, local_pieces(Layout(mesh, (Shard(dim),), whole.shape)))
    return whole


def _is_returned(
    x: torch.Tensor | None, whole: torch.Tensor | None, part: Placement | None, mesh: DeviceMesh
) -> bool:
    """Whether the model may return a tensor of this shape, given that of one device."""
    if x is None or whole is None or x.shape == whole.shape:
        return whole is not None
    dim = positive(part, whole.ndim) if part is not None else None
    return isinstance(dim, Shard) and x.shape == part_of(whole.shape, dim.dim, mesh)


def _about_gradient(diagnosis: Diagnosis, parameter: str) -> str:
    return (
        diagnosis.misread_by(parameter.rpartition(".")[0])
        or "Does it need a style that sums its gradient, such as SequenceParallel?"
    )


def _on_a_line(text: str) -> str:
    return text and f"\n{text}"


def _named(module: str) -> str:
    return repr(module) if module else "the model"


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _floating(output: Any) -> list[torch.Tensor]:
    return [x for x in _leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    _mapped(leaves.append, tree)
    return leaves


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of a pytree, and of the dataclasses in it."""

    def of_leaf(x: Any) -> Any:
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return function(x)
        new = copy.copy(x)
        for field in dataclasses.fields(x):
            # Even if the dataclass is frozen.
            object.__setattr__(new, field.name, _mapped(function, getattr(x, field.name)))
        return new

    return tree_map(of_leaf, tree)


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _rounded(x: Any) -> Any:
    """Add random rounding errors to a tensor, and to its gradient in the backward."""

    def off(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + max(_ROUNDING, torch.finfo(x.dtype).eps / 2) * torch.randn_like(x))

    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        return x
    x = off(x)
    if x.requires_grad:
        x.register_hook(off)
    return x


def _digest(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return str(type(x))
    values = x.double().flatten()
    total = values @ torch.linspace(1, 2, len(values), dtype=values.dtype, device=x.device)
    return f"{x.dtype} {list(x.shape)} with the weighted sum {float(total)!r}"
