"""Inputs that several layers share: one cast, one gather, one reduction of their gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from fp8_dist.device import autocast
from fp8_dist.kernels.custom_op import composite_op
from fp8_dist.linear import Float8Linear, checks
from fp8_dist.linear.autograd import Gradients, differentiable_once
from fp8_dist.mesh import as_dtensor, local_tensor, reduced, with_local
from fp8_dist.operand import observers
from fp8_dist.operand.cast import cast_with_gradient
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.in_graph import context, takes_operators
from fp8_dist.operand.moves import scheme_of_move
from fp8_dist.scaling import Scheme
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.text import kind_of
from fp8_dist.transport import ENCODINGS, Encoding, reduced_to


def share_input(
    input: Tensor, layers: Sequence[Float8Linear], *, reduce_transport: Encoding = None
) -> Tensor:
    """Cast and gather an input once for several layers, such as wq, wk and wv.

    This is ``PrepareFloat8ModuleInput`` as a function.

    Args:
        input: a plain tensor with the placement that the layers declared for their input; or a
            DTensor on a 1-D mesh, for layers whose parameters are DTensors.
        layers: column-parallel layers with the same config. All have declared the same mesh and
            input placement, or none has declared any. The first layer has the amax history of a
            DELAYED scale.
        reduce_transport: as in ``PrepareFloat8ModuleInput``, for a DTensor. For a plain tensor the
            layers declare it.

    Returns:
        A DTensor that each of the layers takes as its input. It is float8 if one float8 copy serves
        all GEMMs (``rowwise`` and ``rowwise_with_gw_hp`` gather in high precision). The gradients
        of the layers are summed, and then reduced once to the placement of ``input``.

    Collectives: those of ``PrepareFloat8ModuleInput``, or of torch's ``PrepareModuleInput``.

    Raises:
        ValueError: there are no layers; a layer declared that it is not column-parallel; the layers
            disagree; ``input`` is a DTensor on a mesh of several axes; or ``reduce_transport`` is
            given for an input whose layers declare it.
        TypeError: ``layers`` is not a sequence of Float8Linear; or ``input`` is a DTensor where a
            local tensor was declared, or vice versa.
    """
    if not torch.compiler.is_compiling():
        _check(input, layers, reduce_transport)
    first = layers[0]
    declared, scheme = first.local_placements, first.config.recipe.gather_scheme["input"]
    placed: Any = input if declared is None else as_dtensor(input, declared.mesh, (declared.input,))
    if scheme is not None:
        layout, mesh = placed.placements[0], placed.device_mesh
        history = first.histories.get("input")
        for layer in layers:
            if layer.prepared_input is not history:
                layer.prepared_input = history
        placed = as_float8_input(placed, layout, mesh, scheme, history, first.float8_weight)
    transport = reduce_transport if declared is None else first.reduce_transport
    return gathered(placed, transport, "share_input")


class ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` with a ``reduce_transport`` for the gradients of gathered inputs."""

    def __init__(self, *, reduce_transport: Encoding = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reduce_transport = check_transport(reduce_transport, type(self).__name__)
        pairs = [*zip(self.input_layouts or (), self.desired_input_layouts or (), strict=False)]
        desired = self.desired_input_kwarg_layouts
        pairs += [(layout, desired.get(name)) for name, layout in self.input_kwarg_layouts.items()]
        is_gathered = any(layout is not None and to == Replicate() for layout, to in pairs)
        if reduce_transport is not None and (self.use_local_output or not is_gathered):
            raise ValueError(
                f"{type(self).__name__}: reduce_transport={reduce_transport!r} applies to the "
                "sum of the gradients of an input that the module reads whole: to Replicate(), "
                f"with use_local_output=False. This style has none: {self!r}"
            )

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any
    ) -> Any:
        """Redistribute an input, with the transport if it is gathered; torch's hook calls this."""
        transport = self.reduce_transport
        if transport is None or desired_layout != Replicate() or input_layout is None:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        return gathered(as_dtensor(input, mesh, (input_layout,)), transport, type(self).__name__)


def check_transport(transport: Any, who: str) -> Encoding:
    """Return the argument ``reduce_transport`` of ``who``, or raise if it is not allowed."""
    if transport not in ENCODINGS:
        raise ValueError(f"{who}: reduce_transport is {transport!r}; it must be one of {ENCODINGS}")
    return transport  # type: ignore[no-any-return]


def as_float8_input(
    x: Any,
    layout: Placement | None,
    mesh: DeviceMesh,
    scheme: Scheme,
    history: AmaxHistory | None,
    owner: observers.Owner,
) -> Any:
    """Cast a floating-point input to a float8 DTensor; return anything else unchanged.

    Args:
        layout: the placement of ``x``, if it is a plain tensor; ``None``: do not cast it.
        history: the amax history of a DELAYED scale.
        owner: the ``float8_weight`` of the first layer that takes the input.
    """
    castable = isinstance(x, Tensor) and x.dtype.is_floating_point
    if layout is None or not castable or isinstance(local_tensor(x), Float8Tensor):
        return x
    x = as_dtensor(autocast(x), mesh, (layout,))
    if scheme_of_move(x, "input", (scheme,), (Replicate(),) * x.device_mesh.ndim, owner) is None:
        return x
    return cast_with_gradient(reduced(x), scheme, history)


def share_amaxes(inputs: Sequence[Any]) -> None:
    """Give the float8 inputs of a module one amax, the largest, for the history that they share.

    The layers that take them record it, perhaps not all of them in the backward.
    """
    locals_ = [local_tensor(x) for x in inputs if isinstance(x, DTensor)]
    lows = [x for x in locals_ if isinstance(x, Float8Tensor)]
    amaxes = [low.local_amax for low in lows if low.local_amax is not None]
    if len(amaxes) > 1:
        largest = torch.stack(amaxes).amax()
        for low in lows:
            low.local_amax = largest


def gathered(input: DTensor, transport: Encoding, who: str) -> DTensor:
    """Gather an input, unless it is whole. Its gradient is reduced with a transport.

    Args:
        input: a DTensor on a 1-D mesh, in high precision or float8; Shard or Replicate.
        transport: the encoding of the sums; None for torch's collectives.

    Collectives: an all-gather of a Shard; in the backward a reduce-scatter or an all-reduce or,
    with a transport, the collectives of :func:`fp8_dist.transport.start_reduction`.
    """
    if transport is None:
        return input.redistribute(placements=(Replicate(),))
    checks.check_summed_in_fp32(input, transport, who)
    if torch.compiler.is_compiling() and takes_operators():
        output: DTensor = _gathered_in_graph(input, transport, who, context())
        return output
    return _Gather.apply(input, _Spec(who, transport))


@composite_op("gather_input(Tensor x, str transport, str who, str context) -> Tensor")
def _gathered_in_graph(x: DTensor, transport: Encoding, who: str, context: str) -> DTensor:
    """Operator of :func:`gathered`; ``context`` is a part of the key in torch's caches.

    (Dynamo, if it traced the autograd function, would assume that the gradient of the output has
    the placement of the output, but it is Partial.)
    """
    return _Gather.apply(x, _Spec(who, transport))


class _Spec(NamedTuple):
    fqn: str
    transport: Encoding


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: DTensor, spec: _Spec) -> Tensor:
        ctx.spec, ctx.placements = spec, tuple(input.placements)
        ctx.set_materialize_grads(False)
        if ctx.placements == (Replicate(),):  # autograd would replace ``input`` by a view
            return with_local(input, local_tensor(input))
        return input.redistribute(placements=(Replicate(),))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return None, None
        assert isinstance(grad, DTensor)
        return reduced_to(grad, ctx.placements, ctx.spec.transport), None


def _check(input: Tensor, layers: Sequence[Float8Linear], reduce_transport: Encoding) -> None:
    single = isinstance(layers, nn.Linear)
    wrong = [layers] if single else [m for m in layers if not isinstance(m, Float8Linear)]
    if wrong:
        kinds = ", ".join(type(layer).__name__ for layer in wrong)
        raise TypeError(
            f"share_input takes a list of Float8Linear, got {kinds}"
            + (" alone" if single else "; convert it first (convert_to_float8_training)")
        )
    names = [layer.fqn for layer in layers]
    declared = layers[0].local_placements if layers else None
    settings = {
        (m.local_placements, m.config.recipe.gather_scheme["input"], m.reduce_transport)
        for m in layers
    }
    if len(settings) != 1 or (declared is not None and declared.weight != Shard(0)):
        listed = "".join(f"\n  - {m.fqn}: {m.local_placements}, {m.extra_repr()}" for m in layers)
        raise ValueError(
            f"share_input: {names} must be column-parallel layers (declare_placements with "
            f"weight=Shard(0)), with one mesh, input placement and cast of the input; found{listed}"
        )
    check_transport(reduce_transport, "share_input")
    if reduce_transport is not None and declared is not None:
        raise ValueError(
            f"share_input: reduce_transport={reduce_transport!r}, but {names} declared how their "
            "input stands; give it to declare_placements"
        )
    if isinstance(input, DTensor) != (declared is None):
        raise TypeError(
            f"share_input: the input of {names} is {kind_of(input)}; layers with "
            "declare_placements take a plain tensor, others a DTensor"
        )
    if isinstance(input, DTensor) and input.device_mesh.ndim != 1:
        raise ValueError(
            f"share_input: the input of {names} is on {input.device_mesh}; it must be on a 1-D mesh"
        )
