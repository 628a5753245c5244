"""The autograd function of a linear layer: three GEMMs on float8 operands.

Placements follow from the weight's (see the table in :mod:`fp8_dist.mesh.rules`). Operands that
have to move are moved as float8::

    forward     input --cast--> float8 --gather--> float8 @ weight^T --reduce--> output
    backward    grad_output --cast--> float8 --gather--> @ weight  --reduce--> grad_input
                                                         @ input   ----------> grad_weight

The cast and the gather of grad_output happen inside this function, so no float8 subclass is ever a
backward tangent.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from fp8_dist import fsdp_internals, mesh
from fp8_dist import torch_internals as internals
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels.quantization import as_matrix
from fp8_dist.linear.rowwise_folded import folded_gradients
from fp8_dist.mesh import Layout, Placements
from fp8_dist.mesh.rules import LinearLayouts
from fp8_dist.operand import observers
from fp8_dist.operand.history import PREPARED_INPUT, AmaxHistory, record_amaxes
from fp8_dist.operand.moves import scheme_of_move
from fp8_dist.operand.prepare import Local, prepare
from fp8_dist.operand.saved import flattened
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized
from fp8_dist.scaling.operators import multiply
from fp8_dist.tensor import Float8Tensor
from fp8_dist.transport import Encoding, reduced_to, start_reduction
from fp8_dist.weight.casts import WeightCasts
from fp8_dist.weight.uncast import Uncast

Gradients = tuple[torch.Tensor | None, ...]
Backward = Callable[[Any, torch.Tensor | None], Gradients]


class LinearSpec(NamedTuple):
    """The arguments of one call of the linear function, except for its tensors."""

    config: Float8LinearConfig
    output_placements: Placements | None
    fqn: str
    histories: Mapping[str, AmaxHistory]
    weight: WeightCasts
    training: bool  # whether a backward may follow the forward
    is_prepared: bool  # whether the input is shared by layers and has an amax history
    reduce_transport: Encoding = None  # for sums of the output and grad_input over ranks

    def history(self, operand: Operand) -> AmaxHistory | None:
        """The amax history of an operand other than the weight, if its scale is DELAYED."""
        return self.histories[operand] if operand in self.config.recipe.delayed else None


def float8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parameter: torch.Tensor,
    spec: LinearSpec,
) -> torch.Tensor:
    """Compute ``input @ weight^T + bias`` with float8 operands.

    Args:
        input: ``[..., K]``, in high precision or already float8, without Partial placements.
        weight: ``[N, K]``, the tensor that gradients flow to. It is a DTensor if and only if
            ``input`` is one, on the same mesh.
        bias: ``[N]`` or None.
        parameter: the tensor that is cast: ``weight``, or the layer's parameter that it wraps.
        spec: config, placements of a DTensor output, and the amax histories of DELAYED operands.

    Returns:
        ``[..., N]`` in the input's dtype.
    """
    cast = None if parameter is weight else parameter  # a view of it has no cached statistics
    # Compiled code uses one function. Dynamo assumes that the gradient of an output has the
    # output's placements, but the gradient that _FinishOutput passes on has the placements of the
    # final output.
    if not isinstance(input, DTensor) or torch.compiler.is_compiling():
        return _LinearFunction.apply(input, weight, bias, cast, spec)
    if spec.output_placements is not None:
        spec = spec._replace(output_placements=mesh.normalized(spec.output_placements, input.ndim))
    output = _LinearFunction.apply(input, weight, None, cast, spec)
    if bias is None and spec.output_placements in (None, output.placements):
        return output
    return _FinishOutput.apply(output, bias, spec)


def prepare_gradients(
    grad: torch.Tensor,
    placements: Placements | None,
    right: dict[Gemm, Local],
    spec: LinearSpec,
) -> tuple[dict[Gemm, tuple[Local, Local]], torch.Tensor | None]:
    """Prepare the left and the right operand of each gradient GEMM.

    Args:
        grad: grad_output ``[..., N]``, high precision, no Partial placements.
        placements: the placements that the GEMMs need, if ``grad`` is a DTensor.
        right: the right operand of each GEMM, grad_input first.

    Returns:
        The operands; and the local amax of ``grad``, if it was cast with a history.
    """
    gemms, recipe = tuple(right), spec.config.recipe
    folds = {g: x for g, x in right.items() if recipe.folds and isinstance(x, Quantized)}
    if not folds:
        history = spec.history("grad_output")
        left, amax = prepare(grad, "grad_output", gemms, placements, history, spec.weight)
        return dict(zip(gemms, zip(left, right.values(), strict=True), strict=True)), amax
    scheme = recipe.uses["grad_output"][next(iter(folds))]
    assert scheme is not None
    if isinstance(grad, DTensor) and not torch.compiler.is_compiling():
        # Called only for its warning.
        scheme_of_move(grad, "grad_output", (scheme,), placements, spec.weight)
    pairs: dict[Gemm, tuple[Local, Local]] = {}
    if len(folds) < len(gemms):
        # One GEMM is in high precision, so grad_output is moved once, in high precision.
        if isinstance(grad, DTensor) and grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        pairs = {gemm: (mesh.local_tensor(grad), right[gemm]) for gemm in gemms}
    return pairs | folded_gradients(grad, scheme, placements, folds, spec.weight), None


def _gemm(
    left: Local,
    right: Local,
    gemm: Gemm,
    spec: LinearSpec,
    out_dtype: torch.dtype,
    layouts: tuple[Layout | None, Layout | None] | None,
    high: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Run one of the three GEMMs on local operands ``[..., K]``.

    Args:
        layouts: the operands' layouts, for grad_weight and for observers; ``None``: plain tensors.
        high: the operands in high precision, if observers are shown them.
    """
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        assert isinstance(left, torch.Tensor)
        assert isinstance(right, torch.Tensor)
        return _gemm_in_high_precision(left, right, gemm).to(out_dtype)
    left_layout, right_layout = layouts or (None, None)
    if gemm == "grad_weight":
        left = left.scheme.for_rows(left, left_layout)
        right = right.scheme.for_rows(right, right_layout)
    elif gemm == "grad_input" and right.scheme.is_recast_for_rows:
        # New blocks that ranks cut need a reduction.
        blocks = [level.columns or 1 for level in right.scheme.levels]
        is_cut = right_layout is not None and any(right_layout.cuts_blocks(0, n) for n in blocks)
        right = right.scheme.for_rows(right, right_layout if is_cut else None)
    options = spec.config.gemm_options(gemm)
    transpose = gemm == "grad_weight", gemm == "output"
    result = multiply(left, right, transpose, out_dtype, options)
    if observers.is_observed():
        shown = left_layout, right_layout
        product = observers.Product(gemm, left, right, result, options, shown, None, *(high or ()))
        observers.notify_multiply(spec.weight, product)
    return result


def _gemm_in_high_precision(left: torch.Tensor, right: torch.Tensor, gemm: Gemm) -> torch.Tensor:
    a, b = as_matrix(left), as_matrix(right)
    if gemm == "grad_weight":
        a = a.t()
    if gemm == "output":
        b = b.t()
    return torch.mm(a, b.to(a.dtype))


def _unflattened(matrix: torch.Tensor, like: Local) -> torch.Tensor:
    """Reshape ``[M, N]`` to ``[..., N]``, with the leading dims of an operand.

    Autograd does not treat the result as a view, so it can be modified in place.
    """
    operand = like if isinstance(like, torch.Tensor) else like.qdata
    if operand.ndim == 2:
        return matrix
    return torch.ops.aten._unsafe_view.default(matrix, (*operand.shape[:-1], matrix.shape[-1]))


class _NoSecondDerivative(torch.autograd.Function):
    """Identity that raises on double backward."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, fqn: str, *origins: torch.Tensor) -> torch.Tensor:
        ctx.fqn = fqn
        return gradient

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:  # type: ignore[override]
        raise NotImplementedError(
            f"{ctx.fqn}: a float8 layer can't be differentiated twice, as "
            "torch.autograd.functional.jvp and hessian do; leave it unconverted"
        )


def differentiable_once(backward: Backward) -> Backward:
    """Make a layer's ``backward`` raise under a second differentiation.

    Otherwise ``create_graph=True`` would treat gradients as constants. The error names the layer,
    ``ctx.spec.fqn``.
    """

    @wraps(backward)
    def once(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        # The gradient is a function of grad_output and of all that the output depends on. With
        # these as arguments, differentiating it with respect to any of them raises.
        origins = *[leaf.variable for leaf in _leaves(ctx)], grad
        return tuple(
            g if g is None else _NoSecondDerivative.apply(g, ctx.spec.fqn, *origins)
            for g in gradients
        )

    return once


def _leaves(node: Any) -> list[Any]:
    """The AccumulateGrad nodes of the autograd graph below a node."""
    seen, stack = {node}, [node]
    while stack:
        inputs = {n for n, _ in stack.pop().next_functions if n is not None} - seen
        seen |= inputs
        stack += inputs
    return [n for n in seen if isinstance(getattr(n, "variable", None), torch.Tensor)]


class _Pass(NamedTuple):
    """Facts about the running backward pass, found by the first layer that it reaches."""

    number: int = -1
    accumulates: bool = False  # whether it accumulates gradients of leaves
    begins: bool = False  # no parameter among these leaves has a gradient yet


_last_pass = _Pass()


def _pass_of(node: Any) -> _Pass:
    """Facts about the backward pass that runs a node."""
    global _last_pass
    if _last_pass.number != internals.backward_id():
        leaves = [leaf.variable for leaf in _leaves(node) if internals.backward_runs(leaf)]
        parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
        in_fsdp = fsdp_internals.fsdp_parameters(fsdp_internals.fsdp_groups())
        begins = bool(parameters) and not fsdp_internals.have_gradients(parameters, in_fsdp)
        _last_pass = _Pass(internals.backward_id(), bool(leaves), begins)
    return _last_pass


def _is_training_pass(node: Any) -> tuple[bool, bool | None]:
    """Whether the backward of a layer belongs to a pass that counts (Note [Passes that count]).

    The second result is whether the pass begins to accumulate gradients; None if the weight's own
    gradient decides. A graph computes the same gradients in each backward, so every one counts.
    """
    if torch.compiler.is_compiling():
        return True, None
    weight_node = node.next_functions[1][0]
    if weight_node is None:  # the weight is frozen
        return _pass_of(node).accumulates, _pass_of(node).begins
    is_leaf = isinstance(getattr(weight_node, "variable", None), torch.Tensor)
    runs = internals.backward_runs(weight_node) is not False
    return runs, None if is_leaf else _pass_of(node).begins


class _Layouts(NamedTuple):
    """The layouts of a call whose operands are DTensors.

    Attributes:
        rules: the placements of all operands and results.
        input: the layout of the input.
        gathered: the layout of the input that the GEMMs take.
        weight: the layout of the weight.
    """

    rules: LinearLayouts
    input: Layout
    gathered: Layout
    weight: Layout

    @staticmethod
    def of(input: torch.Tensor, weight: torch.Tensor, fqn: str) -> "_Layouts | None":
        """The layouts of DTensors; ``None`` for plain tensors."""
        x, w = Layout.of(input), Layout.of(weight)
        return None if x is None or w is None else _layouts_of(x, w, fqn)


@internals.cached_but_in_graphs
def _layouts_of(x: Layout, w: Layout, fqn: str) -> _Layouts:
    rules = mesh.linear_layouts(x.placements, w.placements, len(x.shape), fqn)
    shape = torch.Size((*x.shape[:-1], w.shape[1]))
    return _Layouts(rules, x, Layout(x.mesh, rules.input, shape), w)


class _LinearFunction(torch.autograd.Function):
    """The GEMMs of :func:`float8_linear`.

    In eager code a DTensor output has the placements in which the GEMM leaves it, and
    :class:`_FinishOutput` follows. In compiled code the output is finished here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parameter: torch.Tensor | None,
        spec: LinearSpec,
    ) -> torch.Tensor:
        layouts = placements = None
        whole = input
        if isinstance(input, DTensor):
            layouts = _Layouts.of(input, weight, spec.fqn)
        if layouts is not None:
            placements = layouts.rules.input
            whole = _with_features(input, layouts.input, weight.shape[1])
        needs_input = needs_weight = False
        if spec.training:  # under no_grad needs_input_grad is still True for parameters
            needs_input, needs_weight = ctx.needs_input_grad[:2]

        parameter = weight if parameter is None else parameter
        w, later_w, w_amax = spec.weight.operands(parameter, needs_input)
        gemms: tuple[Gemm, ...] = ("output", "grad_weight") if needs_weight else ("output",)
        history = spec.history("input")
        x, x_amax = prepare(whole, "input", gemms, placements, history, spec.weight)

        left, right = x[0], mesh.local_tensor(weight) if w is None else w
        amaxes: dict[str, torch.Tensor] = {}
        if x_amax is not None and (name := _name_of_history(input, spec)) is not None:
            amaxes[name] = x_amax
        if w_amax is not None:
            amaxes["weight"] = w_amax
        if spec.training and spec.histories and not any(ctx.needs_input_grad[:3]):
            right = _recorded(right, spec.weight, amaxes)  # there is no backward

        ctx.high = None
        if observers.keeps_operands():
            ctx.high = input.detach(), spec.weight.high_precision(weight)
        shown = None if layouts is None else (layouts.gathered, layouts.weight)
        product = _gemm(left, right, "output", spec, input.dtype, shown, ctx.high)
        output = _unflattened(product, input if layouts is None else left)

        ctx.set_materialize_grads(False)
        ctx.spec, ctx.layouts = spec, layouts
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
        ctx.bias_layout = None if bias is None else Layout.of(bias)
        ctx.names = tuple(amaxes)
        saved_x = x[1] if needs_weight else None
        saved_w: Local | Uncast | None = None
        if needs_input:
            saved_w = mesh.local_tensor(weight) if later_w is None else later_w
        saved, ctx.specs = flattened(saved_x, saved_w, *amaxes.values())
        ctx.save_for_backward(*saved)

        if layouts is None:
            return output if bias is None else output + bias.to(output.dtype)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        distributed = Layout(layouts.weight.mesh, layouts.rules.output, shape).wrap(output)
        return _finished(distributed, bias, spec) if torch.compiler.is_compiling() else distributed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 5
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = mesh.reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if needs_bias else None
        spec, layouts = ctx.spec, ctx.layouts
        records, begins = _is_training_pass(ctx) if spec.histories else (False, None)
        if not (needs_input or needs_weight or records):
            return None, None, grad_bias, None, None

        saved, (x_spec, w_spec, *amax_specs) = ctx.saved_tensors, ctx.specs
        amaxes = {}
        for name, amax_spec in zip(ctx.names, amax_specs, strict=True):
            amaxes[name] = amax_spec.operand(saved)
        if not (needs_input or needs_weight):
            # Only the bias is trained. (In eager code _FinishOutput adds that of a DTensor output.)
            return None, None, _recorded(grad_bias, spec.weight, amaxes, begins), None, None

        # torch.autograd.grad may ask for fewer gradients than the forward saved operands for.
        operands: dict[Gemm, Local] = {}
        if needs_input:
            w = w_spec.operand(saved)
            operands["grad_input"] = w.cast(mesh.local_tensor(grad)) if isinstance(w, Uncast) else w
        if needs_weight:
            operands["grad_weight"] = x_spec.operand(saved)
        placements = None if layouts is None else layouts.rules.grad_output
        pairs, amax = prepare_gradients(grad, placements, operands, spec)
        if records:
            if amax is not None:
                amaxes["grad_output"] = amax
            in_float8 = [gemm for gemm, (_, x) in pairs.items() if isinstance(x, Quantized)]
            gemm = [*in_float8, *pairs][0]
            left, right = pairs[gemm]
            pairs[gemm] = left, _recorded(right, spec.weight, amaxes, begins)

        grad_input = grad_weight = finish = moved = None
        if layouts is not None:
            moved = layouts.input._replace(placements=placements, shape=grad.shape)
        # The forward may not have been observed. Remove the operands from ctx, which lives as long
        # as the graph.
        (high_input, high_weight), ctx.high = ctx.high or (None, None), None
        if needs_input:
            left, right = pairs["grad_input"]
            shown = None if layouts is None else (moved, layouts.weight)
            high = None if high_weight is None else (grad, high_weight)
            product = _gemm(left, right, "grad_input", spec, ctx.input_dtype, shown, high)
            grad_input = _unflattened(product, grad if layouts is None else left)
            if layouts is not None:
                finish = _reduction_of_grad_input(grad_input, layouts, spec.reduce_transport)
        if needs_weight:
            left, right = pairs["grad_weight"]
            shown = None if layouts is None else (moved, layouts.gathered)
            high = None if high_input is None else (grad, high_input)
            grad_weight = _gemm(left, right, "grad_weight", spec, ctx.weight_dtype, shown, high)
            if layouts is not None:
                layout = layouts.weight._replace(placements=layouts.rules.grad_weight)
                grad_weight = layout.wrap(grad_weight)
        # Finish late, so that the transport overlaps with the GEMM of grad_weight.
        grad_input = grad_input if finish is None else finish()
        return grad_input, grad_weight, grad_bias, None, None


def _name_of_history(input: torch.Tensor, spec: LinearSpec) -> str | None:
    """The name of the history that records the amax of the input; ``None`` if none does."""
    if not isinstance(mesh.local_tensor(input), Float8Tensor):
        return "input"
    # It was cast with the history that it has.
    return PREPARED_INPUT if spec.is_prepared and spec.training else None


def _reduction_of_grad_input(
    local: torch.Tensor, layouts: _Layouts, transport: Encoding
) -> Callable[[], torch.Tensor]:
    """Start to reduce the input's gradient; return what finishes it.

    If this layer gathered the input, it also reduce-scatters the gradient. An input that arrived
    gathered gets a Partial gradient, so that all layers that take it share one reduction, unless
    this layer has a ``reduce_transport``.
    """
    rules, current = layouts.rules, layouts.input.placements
    gradient = layouts.input._replace(placements=rules.grad_input).wrap(local)
    target = []
    for now, needed, summand in zip(current, rules.input, rules.grad_input, strict=True):
        is_shared = now == needed and not transport
        target.append(summand if is_shared else now)
    return start_reduction(gradient, tuple(target), transport)


def _with_features(input: torch.Tensor, layout: Layout, features: int) -> torch.Tensor:
    """Return the input with ``features`` as the global size of its last dim.

    ``DTensor.from_local`` assumes that all shards have the size of the local one. If shards are
    unequal and cut blocks, ranks would disagree about which blocks are cut.
    """
    if layout.shape[-1] == features:
        return input
    shape = torch.Size((*layout.shape[:-1], features))
    return layout._replace(shape=shape).wrap(mesh.local_tensor(input))


def _recorded(
    operand: Any, owner: WeightCasts, amaxes: dict[str, torch.Tensor], begins: bool | None = None
) -> Any:
    """Record the amaxes of a pass that counts (Note [Passes that count]); return the operand.

    ``operand``: an operand of the pass that is not in flight. In a graph the recording takes it and
    returns a copy, because the graph would drop an operator whose result is not used.
    """
    if not torch.compiler.is_compiling():
        owner.record_amaxes(amaxes, begins)
        return operand
    if isinstance(operand, Quantized):
        first, *rest = operand.scales  # a scale is small
        return operand._replace(scales=(_recorded(first, owner, amaxes), *rest))
    return record_amaxes.overload(operand, owner.handle, [*amaxes], [*amaxes.values()])


class _FinishOutput(torch.autograd.Function):
    """Add the bias to a DTensor output, and reduce or move it to ``spec.output_placements``.

    This function is separate because it saves nothing for backward. Full activation checkpointing
    ends a recomputation as soon as the last tensor is saved. If the function that saves tensors
    also issued the reduction, the reduction would be repeated, and its result dropped without a
    wait. The gradient keeps the placements in which it arrives: :class:`_LinearFunction` gathers it
    as float8.
    """

    @staticmethod
    def forward(
        ctx: Any, output: DTensor, bias: torch.Tensor | None, spec: LinearSpec
    ) -> torch.Tensor:
        ctx.spec, ctx.bias_layout = spec, Layout.of(bias)
        ctx.set_materialize_grads(False)
        finished = _finished(output, bias, spec)
        if finished is not output:
            return finished
        # If forward returned its input, autograd would make a view of it, through DTensor's
        # dispatch.
        return mesh.with_local(output, mesh.local_tensor(output))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if grad is None:
            return None, None, None
        grad = mesh.reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if ctx.needs_input_grad[1] else None
        return grad, grad_bias, None


def _finished(output: DTensor, bias: torch.Tensor | None, spec: LinearSpec) -> torch.Tensor:
    """Add the bias to a GEMM's output, and redistribute it to ``spec.output_placements`` if given.

    The bias is not moved. It is added to the columns of a column-parallel output, or to the reduced
    output of a row-parallel layer.
    """
    placements, transport = spec.output_placements, spec.reduce_transport
    if bias is None:
        return output if placements is None else reduced_to(output, placements, transport)
    if any(p.is_partial() for p in output.placements):
        summed = tuple(Replicate() if p.is_partial() else p for p in output.placements)
        output = reduced_to(output, placements or summed, transport)
    biased: DTensor = output + bias.to(output.dtype)  # type: ignore[assignment]
    return biased if placements is None else mesh.redistributed(biased, placements)


def _bias_gradient(grad: torch.Tensor, bias_layout: Layout | None) -> torch.Tensor:
    """Sum the high-precision gradient over its rows, at the placements of the bias."""
    summed = grad.sum(dim=tuple(range(grad.ndim - 1))) if grad.ndim > 1 else grad
    if not isinstance(summed, DTensor) or bias_layout is None:
        return summed
    return summed.redistribute(placements=bias_layout.placements)
