"""Transports of reduce-scatters: their argument, and inputs gathered for several layers."""

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from fp8_dist.linear.checks import check_summed_in_fp32
from fp8_dist.linear.once import Gradients, differentiable_once
from fp8_dist.mesh import Layout
from fp8_dist.transport import Encoding, reduced_to

_ALLOWED = ("float8", "bf16", None)


class ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` with a ``reduce_transport`` for the gradients of gathered inputs."""

    def __init__(self, *, reduce_transport: Encoding = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reduce_transport = check_transport(reduce_transport, type(self).__name__)
        pairs = [*zip(self.input_layouts or (), self.desired_input_layouts or (), strict=False)]
        by_name = self.desired_input_kwarg_layouts
        pairs += [(at, by_name.get(name)) for name, at in self.input_kwarg_layouts.items()]
        gathers = any(isinstance(at, Shard) and then == Replicate() for at, then in pairs)
        if reduce_transport is not None and (self.use_local_output or not gathers):
            raise ValueError(
                f"{type(self).__name__}: reduce_transport={reduce_transport!r} applies to the "
                "reduce-scatter of the gradient of an input that is gathered: from a Shard to "
                f"Replicate(), with use_local_output=False. This style has none: {self!r}"
            )

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any
    ) -> Any:
        """Gather an input with the transport; torch's hook calls this for each input."""
        transport, gathers = self.reduce_transport, desired_layout == Replicate()
        if transport is None or not (gathers and isinstance(input_layout, Shard)):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
        return gathered(input, transport, type(self).__name__)


def check_transport(transport: Any, who: str) -> Encoding:
    """Return the argument ``reduce_transport`` of ``who``, or raise if it is unknown."""
    if transport not in _ALLOWED:
        raise ValueError(f"{who}: reduce_transport is {transport!r}; it must be one of {_ALLOWED}")
    return transport  # type: ignore[no-any-return]


def gathered(input: DTensor, transport: Encoding, who: str) -> DTensor:
    """Gather a sharded input, whose gradient is reduced with a transport.

    Args:
        input: a DTensor on a 1-D mesh, in high precision or float8.
        transport: the encoding of the sums; None for torch's reduce-scatter.

    Collectives: an all-gather; in the backward a reduce-scatter, or what
    :func:`fp8_dist.transport.start_reduction` makes of it.
    """
    if transport is None:
        return input.redistribute(placements=(Replicate(),))
    check_summed_in_fp32(input, transport, who)
    if not isinstance(input.placements[0], Shard):
        raise ValueError(
            f"{who}: reduce_transport={transport!r} applies to the reduce-scatter of the gradient "
            f"of a sharded input, but the input is {input.placements} on {input.device_mesh}; "
            "shard it (sequence parallelism), or drop the argument"
        )
    return _gathered(input, transport, who)


# Dynamo assumes that a gradient has the placement of its output, but this one is Partial. So only
# AOTAutograd, which knows the placement, traces the function.
@torch.compiler.allow_in_graph
def _gathered(input: DTensor, transport: Encoding, who: str) -> DTensor:
    whole: DTensor = _Gather.apply(input, _Spec(who, transport))
    return whole


class _Spec(NamedTuple):
    fqn: str
    transport: Encoding


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: DTensor, spec: _Spec) -> DTensor:
        ctx.spec, ctx.layout = spec, Layout.of(input)
        ctx.set_materialize_grads(False)
        return input.redistribute(placements=(Replicate(),))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if grad is None:
            return None, None
        assert isinstance(grad, DTensor)
        placements: tuple[Placement, ...] = ctx.layout.placements
        return reduced_to(grad, placements, ctx.spec.transport), None
