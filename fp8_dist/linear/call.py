"""The call of a linear layer: its operands are checked, wrapped and reduced before the GEMMs."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8_dist.device import autocast
from fp8_dist.linear import checks
from fp8_dist.linear.autograd import LinearSpec, float8_linear
from fp8_dist.mesh import local_tensor, reduced
from fp8_dist.operand.cast import check_transforms
from fp8_dist.operand.history import warn_if_not_synced
from fp8_dist.tensor import Float8Tensor
from fp8_dist.torch_internals import recorded_as_operators_are
from fp8_dist.weight.local_placements import LocalPlacements


def call_declared(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: LinearSpec,
    declared: LocalPlacements,
) -> Tensor:
    """:func:`call_linear` of plain local tensors with declared placements.

    Raises:
        ValueError: the operands do not fit their placements.
    """
    declared.check(input, weight, spec.output_placements, spec.fqn)
    if isinstance(input, DTensor):
        # It is the result of share_input, which reduces the gradient itself.
        spec = spec._replace(reduce_transport=None)
    output = call_linear(*declared.distributed(input, weight, bias), weight, spec)
    assert isinstance(output, DTensor)
    return output.to_local()


@recorded_as_operators_are
def call_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, spec: LinearSpec
) -> Tensor:
    """Compute a layer's output.

    Args:
        input: ``[..., K]``, floating point, or already float8.
        weight, bias: the parameters, or DTensors that wrap them.
        parameter: the layer's weight, not wrapped.

    Raises:
        ValueError, NotImplementedError: as :meth:`fp8_dist.Float8Linear.forward`.
    """
    fqn, is_distributed = spec.fqn, isinstance(input, DTensor)
    is_compiling = torch.compiler.is_compiling()
    check_transforms(fqn, input, weight, bias)
    if is_distributed or isinstance(weight, DTensor):
        checks.check_mesh(weight, input, fqn)
        if not (is_compiling or spec.weight.is_compared):
            spec.weight.compare("the first forward")
    if spec.reduce_transport is not None:
        checks.check_summed_in_fp32(input, spec.reduce_transport, fqn)
    if not is_compiling:
        checks.check_alignment(spec.config, parameter, input.device, fqn)
        if is_distributed:
            checks.check_local_features(weight, input, fqn)
        if spec.histories:
            warn_if_not_synced(spec.histories, fqn)
    local = local_tensor(input)
    if isinstance(local, Float8Tensor):
        checks.check_prepared(spec.config, local, fqn)
    else:
        input = autocast(input)
        if is_distributed:
            input = reduced(input)
    return float8_linear(input, weight, bias, parameter, spec)
