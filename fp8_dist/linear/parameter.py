"""The weight of a layer as a parameter: where it is, and in which form FSDP2 keeps it.

Code with hand-written tensor parallelism has plain parameters and activations, each rank its parts.
A layer with declared placements wraps them as DTensors during its forward, and then works like a
layer with a parallel style.
"""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8_dist.linear.agreement import check_placed
from fp8_dist.linear.optimizer_steps import note_replaced
from fp8_dist.mesh import (
    Layout,
    Placements,
    layout_over,
    local_tensor,
    replicated_over,
    sharded_dim,
)
from fp8_dist.tensor import Float8Tensor
from fp8_dist.tensor.known import KnownWeight
from fp8_dist.tensor.wrapper import WrapperParameter
from fp8_dist.torch_internals import (
    AsyncCollectiveTensor,
    carry_attributes,
    dtensor_local,
    has_hooks_after_accumulation,
    set_dtensor_local,
)


class LocalPlacements(NamedTuple):
    """Declared placements of a weight and an input that are plain local tensors.

    The placement of the output is the layer's ``output_placements``.
    """

    mesh: DeviceMesh  # 1-D
    weight: Placement  # Shard(0), Shard(1) or Replicate
    input: Placement  # Shard or Replicate

    def distributed(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Wrap the operands as DTensors, whose gradients have the declared placements."""
        # The bias of a column-parallel weight is sharded like the columns of the output.
        bias_at = Shard(0) if self.weight == Shard(0) else Replicate()
        return (
            input if isinstance(input, DTensor) else self._wrap(input, self.input),
            self._wrap(weight, self.weight),
            None if bias is None else self._wrap(bias, bias_at),
        )

    def _wrap(self, local: torch.Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(local, self.mesh, (placement,), run_check=False)

    def check(
        self, input: torch.Tensor, weight: torch.Tensor, output: Placements | None, fqn: str
    ) -> None:
        """Check operands against the declared placements.

        Raises:
            TypeError: the weight is a DTensor, or the input is a DTensor that ``share_input`` did
                not return.
            ValueError: the input's features don't fit, or the input or output lacks the declared
                dim.
        """
        if isinstance(weight, DTensor):
            raise TypeError(
                f"{fqn}: the weight was declared as a local tensor, {self.weight!r} on "
                f"{self.mesh}, but it is a DTensor on {weight.device_mesh}; call the module that "
                "fully_shard was called on, which gathers it, or leave the layer to the parallel "
                "styles"
            )
        for name, placement in ("input", self.input), *(("output", each) for each in output or ()):
            if isinstance(placement, Shard) and not -input.ndim <= placement.dim < input.ndim:
                raise ValueError(
                    f"{fqn}: the {name} was declared as {placement!r}, but it has {input.ndim} "
                    "dims; declare one of these in declare_placements"
                )
        features, last = weight.shape[1], input.ndim - 1
        if self.weight == Shard(1):
            features *= self.mesh.size()
        if isinstance(input, DTensor):
            shared = self.weight == Shard(0) and tuple(input.placements) == (Replicate(),)
            if not shared or input.device_mesh != self.mesh:
                raise TypeError(
                    f"{fqn}: the input was declared as a local tensor, {self.input!r} on "
                    f"{self.mesh}, but it is a DTensor, {input.placements} on {input.device_mesh}; "
                    "pass its to_local() at the declared placement, or what share_input returns"
                )
        elif input.ndim and sharded_dim(self.input, input.ndim) == last:
            features //= self.mesh.size()
        if input.ndim == 0 or input.shape[-1] != features:
            raise ValueError(
                f"{fqn}: the last dim of the input must be {features}, for a weight of "
                f"{tuple(weight.shape)} declared as {self.weight!r} and an input declared as "
                f"{self.input!r} on {self.mesh.size()} ranks; got an input of shape "
                f"{tuple(input.shape)}"
            )


class GatherType(Protocol):
    """A tensor type whose all-gather FSDP2 runs in float8; ``fp8_dist.fsdp`` defines it."""

    def wrap(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Wrap a local tensor, of the parameter ``name``, as one of this type on its storage."""


class LayerParameter:
    """A parameter of a module, by its name there. The reference to the module is weak.

    Attributes:
        name, fqn: the name of the parameter in the module, and the name of the module.
        sharded: the sharded parameter, while FSDP2 has another in its place.
        is_compared: whether the ranks were found to agree about the layer (``agreement``).
        waits_in_fsdp: returns whether FSDP2 has a gradient of the parameter that it has not reduced
            yet; None if FSDP2 does not shard it.
        gathered_over: the mesh over which FSDP2 gathers the parameter; ``None`` until FSDP2 first
            runs, and without it. ``fp8_dist.fsdp`` sets it.
        gathered_as: the dtype of an all-gather in high precision; ``None``: the parameter's own.
        gather_type: the type of weights that FSDP2 gathers in float8; ``fp8_dist/__init__.py`` sets
            it.
    """

    gather_type: ClassVar[GatherType]

    def __init__(self, module: nn.Module, name: str, fqn: str) -> None:
        self._module = weakref.ref(module)
        self.name, self.fqn = name, fqn
        self.sharded: torch.Tensor | None = None
        self.gathered_over: DeviceMesh | None = None
        self.gathered_as: torch.dtype | None = None
        self.is_compared = False
        self.waits_in_fsdp: Callable[[], bool] | None = None

    def compare(self, caller: str) -> None:
        """Compare the layer between the ranks of its mesh, once, if other code has placed it."""
        layout = None if self.is_compared else self.layout()
        if layout is not None:
            check_placed({self.fqn: self.module}, layout.mesh, f"{caller} of {self.fqn}")

    @property
    def module(self) -> nn.Module:
        """The module that has the parameter."""
        module = self._module()
        assert module is not None, f"{self.fqn} was freed"
        return module

    def parameter(self) -> torch.Tensor:
        """The parameter that is currently registered."""
        module = self.module
        parameter = module._parameters.get(self.name)  # faster than getattr
        return getattr(module, self.name) if parameter is None else parameter

    def replace(self, new: torch.Tensor) -> None:
        """Put another parameter in the place of this one, with its attributes and hooks.

        The steps of optimizers that hold the old one are refused.
        """
        old = self.parameter()
        if new is not old:
            carry_attributes(old, new)
            note_replaced(old, new, self.module, self.name, self.fqn)
        setattr(self.module, self.name, new)

    def is_computed(self, parameter: torch.Tensor) -> bool:
        """Whether the weight of a forward is not the registered parameter, but computed from it.

        A parametrization does that, and FSDP1, which flattens parameters.
        """
        return self.module._parameters.get(self.name) is not parameter

    @property
    def is_registered(self) -> bool:
        """Whether it is a parameter of the module, neither parametrized nor flattened."""
        return self.name in self.module._parameters and self.parameter().ndim >= 2

    def may_have_gradient(self) -> bool:
        """Whether a gradient was accumulated for the parameter, or a hook may have taken it.

        Hooks accumulate gradients elsewhere, in fp32 for instance.
        """
        for each in (self.parameter(), self.sharded):
            if each is not None and (each.grad is not None or has_hooks_after_accumulation(each)):
                return True
        return self.waits_in_fsdp is not None and self.waits_in_fsdp()

    def shard(self) -> torch.Tensor:
        """The current shard, without a copy or collectives."""
        return KnownWeight.unwrap(local_tensor(self.parameter()))

    def layout(self, parameter: torch.Tensor | None = None) -> Layout | None:
        """The layout of a parameter, by default the layer's, as a DTensor or as declared."""
        parameter = self.parameter() if parameter is None else parameter
        declared: LocalPlacements | None = getattr(self.module, "local_placements", None)
        if declared is None:
            return Layout.of(parameter)
        return layout_over(parameter, declared.mesh, declared.weight, self.fqn)

    def gathered_layout(self, sharded: Layout) -> Layout | None:
        """The layout of what FSDP2 gathers, given that of the sharded parameter.

        It is the same one if FSDP2 keeps the parameter whole on every rank (``replicate``).
        """
        mesh = self.gathered_over
        return None if mesh is None else replicated_over(sharded, mesh)

    @property
    def device(self) -> torch.device:
        """The device on which the scales are used, even with CPU offload."""
        return device_of(self.shard(), self.layout())

    @staticmethod
    def can_be(tensor: torch.Tensor | None) -> bool:
        """Whether a tensor can be a layer's weight.

        A subclass with its own GEMM, such as the quantized weights of torchao, can't.
        """
        local: Any = dtensor_local(tensor) if isinstance(tensor, DTensor) else tensor
        return isinstance(
            local, Float8Tensor | WrapperParameter | AsyncCollectiveTensor
        ) or not hasattr(local, "__tensor_flatten__")

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter as a plain tensor or DTensor on the same storage, detached.

        It shares the version counters, including that of the local tensor, so writes to it are
        noticed.
        """
        local = KnownWeight.unwrap(local_tensor(parameter)).detach()
        if not isinstance(parameter, DTensor):
            return local
        plain: Any = parameter.detach()
        set_dtensor_local(plain, local)
        return plain


def gathers_float8(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 gathers a parameter in float8."""
    return hasattr(local_tensor(parameter), "fsdp_pre_all_gather")


def device_of(shard: torch.Tensor, layout: Layout | None) -> torch.device:
    """The device on which the scales of a shard are used, even with CPU offload."""
    if layout is None or layout.mesh.device_type == shard.device.type:
        return shard.device
    return torch.device(layout.mesh.device_type)
