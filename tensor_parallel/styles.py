"""Float8 counterparts of torch's tensor-parallel styles.

The parameters are partitioned as torch's styles do it. What differs is who moves activations: a
torch style redistributes them in hooks around the layer, in high precision; here the hooks only
say where tensors are, and the layer's own function casts, moves and multiplies them
(:mod:`fp8_dist.linear.autograd`), so that what is gathered, forward or backward, is float8.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from fp8_dist.cast import cast_with_gradient
from fp8_dist.config import CastSpec
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.mesh.layout import local_tensor, reduced
from fp8_dist.tensor.float8_tensor import Float8Tensor


class Float8ColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` of a Float8Linear: weight and bias are ``Shard(0)``.

    Args:
        input_layouts: placement of a plain-tensor input; default Replicate. One that is
            sharded is gathered as float8.
        output_layouts: placement of the output; default ``Shard(-1)``.
        use_local_output: return a plain tensor instead of a DTensor.

    Collectives: forward: an all-gather of the input, if it is sharded and was not gathered before;
    backward: a reduce-scatter (or all-reduce) of grad_input in high precision; and the amax
    all-reduces of the recipe. In ``tensorwise`` gathers take 1 byte per element, and amaxes are
    4 bytes for a sharded input and for grad_output; ``delayed`` reduces none; ``rowwise_folded``
    gathers 4 bytes more per row and reduces 8 per row of grad_output; ``rowwise`` and
    ``rowwise_with_gw_hp`` gather in high precision. (docs/communication.md counts.)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute(self, module, device_mesh, self._partition_linear_fn)


class Float8RowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` of a Float8Linear: the weight is ``Shard(1)``, the bias replicated.

    Args:
        input_layouts: placement of a plain-tensor input; default ``Shard(-1)``.
        output_layouts: placement of the output; default Replicate. With a ``Shard`` (sequence
            parallelism) grad_output is gathered as float8.
        use_local_output: return a plain tensor instead of a DTensor.

    Collectives: forward: a reduce-scatter (or all-reduce) of the output in high precision;
    backward: an all-gather of grad_output, if the output is sharded; and the amax all-reduces of
    the recipe. In ``tensorwise`` the gather takes 1 byte per element, and amaxes are 4 bytes for
    the input and for a sharded grad_output; ``delayed`` reduces none; ``rowwise_folded`` gathers 8
    bytes more per row and reduces 4 per row of the input; ``rowwise`` and ``rowwise_with_gw_hp``
    gather in high precision.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute(self, module, device_mesh, self._partition_linear_fn)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` that casts floating-point inputs to float8 before it moves them.

    Several layers that use one input (q, k, v; w1, w3) then share one cast and one gather.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts,
        use_local_output: as in torch's ``PrepareModuleInput``.
        float8_dtype: the dtype to cast to; ``None`` means that of the layers in the module.
        fwd_config_submodule_fqn: the Float8Linear in the module whose config is followed;
            ``None`` means all of them, and they must agree.

    Collectives: per input, one all-gather of 1 byte per element, and one all-reduce of 4 bytes for
    a dynamic scale per tensor; scales of rows travel in the gather, 4 bytes each.

    Raises:
        ValueError: when applied to a module without Float8Linear, with layers that disagree, or
            that don't take their input in one float8 copy (``rowwise`` takes two).
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype | None = None,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self._cast: Callable[[torch.Tensor], torch.Tensor] | None = None

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if (
            input_layout is not None
            and isinstance(input, torch.Tensor)
            and input.dtype.is_floating_point
            and not isinstance(local_tensor(input), Float8Tensor)
        ):
            assert self._cast is not None
            if torch.is_autocast_enabled(input.device.type) and input.dtype is not torch.float64:
                input = input.to(torch.get_autocast_dtype(input.device.type))
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
            input = self._cast(input)
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # One style may be applied to several modules whose layers cast differently.
        style = copy.copy(self)
        layers = self._followed_layers(module)
        (cast,) = self._check_casts(layers)
        config = next(iter(layers.values())).config
        if cast.delayed:
            # Its history is kept with a layer's, of which it need not be the input.
            history = AmaxHistory(
                cast, config.amax_history_len, config.round_scales_to_power_of_2, device_mesh
            )
            next(iter(layers.values())).histories["prepared_input"] = history
            module.float8_prepared_input = history  # type: ignore[assignment]

            def find_history(module: Any, inputs: Any) -> None:
                # That of a copy, if the module is one: copies share their hooks.
                style._cast = partial(_cast_delayed, module.float8_prepared_input)

            module.register_forward_pre_hook(find_history)
        else:
            style._cast = partial(_cast_dynamic, cast, config.round_scales_to_power_of_2)
        return super(PrepareFloat8ModuleInput, style)._apply(module, device_mesh)

    def _followed_layers(self, module: nn.Module) -> dict[str, Float8Linear]:
        layers = float8_layers(module)
        if self.fwd_config_submodule_fqn is not None:
            chosen = layers.get(self.fwd_config_submodule_fqn)
            if chosen is None:
                raise ValueError(
                    f"PrepareFloat8ModuleInput: fwd_config_submodule_fqn="
                    f"{self.fwd_config_submodule_fqn!r} is no Float8Linear in this "
                    f"{type(module).__name__}; it has {list(layers)}"
                )
            return {self.fwd_config_submodule_fqn: chosen}
        if not layers:
            raise ValueError(
                f"PrepareFloat8ModuleInput: this {type(module).__name__} contains no "
                "Float8Linear; convert the model first, or use torch's PrepareModuleInput"
            )
        return layers

    def _check_casts(self, layers: dict[str, Float8Linear]) -> set[CastSpec]:
        """The one input cast that the layers agree about."""
        for name, layer in layers.items():
            if layer.config.gather_cast("input") is None:
                raise ValueError(
                    f"PrepareFloat8ModuleInput: {', '.join(layers)} take their input in two "
                    "different casts, or in high precision in some GEMM, which no single float8 "
                    f"copy can serve ({name}: {layer.extra_repr()}); use torch's "
                    "PrepareModuleInput"
                )
        casts = {
            (layer.config.gather_cast("input"), layer.config.round_scales_to_power_of_2)
            for layer in layers.values()
        }
        if len(casts) > 1:
            raise ValueError(
                "PrepareFloat8ModuleInput: the layers that share this input cast it differently: "
                f"{ {n: layer.extra_repr() for n, layer in layers.items()} }; give them one "
                "config, or name the one to follow in fwd_config_submodule_fqn"
            )
        found = {cast for cast, _ in casts if cast is not None}
        for cast in found:
            if self.float8_dtype not in (None, cast.dtype):
                raise ValueError(
                    f"PrepareFloat8ModuleInput: float8_dtype={self.float8_dtype}, but the layers "
                    f"({', '.join(layers)}) cast their input to {cast.dtype}; drop the argument"
                )
        return found


class _CastDelayed(torch.autograd.Function):
    """A cast with a delayed scale; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, history: AmaxHistory, record: bool) -> torch.Tensor:
        return history.cast(input, record)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


def _cast_dynamic(cast: CastSpec, power_of_2: bool, input: torch.Tensor) -> torch.Tensor:
    return cast_with_gradient(reduced(input), cast, power_of_2)


def _cast_delayed(history: AmaxHistory, input: torch.Tensor) -> torch.Tensor:
    return _CastDelayed.apply(reduced(input), history, torch.is_grad_enabled())


def _distribute(
    style: ColwiseParallel | RowwiseParallel,
    module: nn.Module,
    mesh: DeviceMesh,
    partition: Callable[..., None],
) -> nn.Module:
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"{type(style).__name__} needs a Float8Linear, found a {type(module).__name__}; "
            "convert the layer, or use torch's style without Float8 in its name"
        )
    module.output_placements = tuple(style.output_layouts)
    return distribute_module(
        module,
        mesh,
        partition,
        partial(_annotate_input, tuple(style.input_layouts)),  # type: ignore[arg-type]
        partial(_local_output, style.use_local_output),  # type: ignore[arg-type]
    )


def _annotate_input(
    layouts: tuple[Placement, ...], module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh
) -> torch.Tensor:
    x = inputs[0]
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, layouts, run_check=False)


def _local_output(
    use_local_output: bool, module: nn.Module, output: DTensor, mesh: DeviceMesh
) -> torch.Tensor:
    return output.to_local() if use_local_output else output
