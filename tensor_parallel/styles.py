"""Float8 counterparts of torch's tensor-parallel styles.

Parameters are partitioned as by torch's styles, but activations are redistributed elsewhere.
torch's styles redistribute them in hooks around the layer, in high precision. Here the hooks only
annotate tensors with their placements. The layer's autograd function casts, redistributes and
multiplies them (:mod:`fp8_dist.linear.autograd`), so that all gathers, forward and backward, are
float8.

If a style is applied by torch's ``parallelize_module``, an all-reduce of 16 bytes first compares
the layers and the style between ranks. A difference raises ValueError.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.mesh import check_axis
from fp8_dist.operand.history import PREPARED_INPUT, AmaxHistory
from fp8_dist.scaling import Scheme
from fp8_dist.tensor_parallel import inputs
from fp8_dist.text import is_torchaos, kind_of, without_wrappers
from fp8_dist.transport import Encoding
from fp8_dist.weight import agreement
from fp8_dist.weight.stored_weight import place_scales
from fp8_dist.weight.weights import attach_statistics, float8_modules, float8_weights


class CheckedStyle(ParallelStyle):
    """Style with a check that ``apply_tp_plan`` makes before it changes any module."""

    def misfits(self, module: nn.Module, size: int) -> Iterator[str]:
        """Yield the reasons why the style can't be applied to a module on ``size`` ranks."""
        yield from ()

    def check(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Compare the module's layers between ranks; raise ValueError if the style doesn't fit."""
        check_axis(mesh, "parallelize_module")
        weights = float8_weights(module).values()
        if not weights or any(not weight.is_compared for weight in weights):
            layers, facts = float8_modules(module), facts_of(self, "the style")
            agreement.check_placed(layers, mesh, "parallelize_module", facts)
        for misfit in self.misfits(module, mesh.size()):
            raise ValueError(f"parallelize_module: {misfit}")


class _Float8LinearStyle(CheckedStyle):
    """Base class of the styles for a Float8Linear.

    A style derives from this class first, and then from torch's style, which partitions the
    parameters.
    """

    input_layouts: Any
    output_layouts: Any
    use_local_output: bool

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        reduce_transport: Encoding = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]  # of torch's style
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.reduce_transport = inputs.check_transport(reduce_transport, type(self).__name__)

    def misfits(self, module: nn.Module, size: int) -> Iterator[str]:
        if not isinstance(module, Float8Linear):
            torch_style = "Rowwise" if isinstance(self, RowwiseParallel) else "Colwise"
            model = "the plain model" if is_torchaos(type(module)) else "it first"
            yield (
                f"{type(self).__name__} needs a Float8Linear, found {kind_of(module)}; "
                f"convert {model} (convert_to_float8_training), or use torch's "
                f"{torch_style}Parallel"
            )
        elif isinstance(module.weight, DTensor):
            yield (
                f"{module.fqn} is distributed already: its weight is {module.weight.placements} on "
                f"{module.weight.device_mesh}; parallelize it once, before fully_shard"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        module.output_placements = tuple(self.output_layouts)
        module.reduce_transport = self.reduce_transport
        layouts, use_local_output = tuple(self.input_layouts), self.use_local_output
        transport = self.reduce_transport if isinstance(self, ColwiseParallel) else None

        def annotate(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            if not isinstance(args[0], DTensor):
                return DTensor.from_local(args[0], mesh, layouts, run_check=False)
            if transport is not None and args[0].placements[0].is_replicate():
                raise ValueError(
                    f"{module.fqn}: reduce_transport={transport!r} applies to the reduction of "
                    "grad_input, which is left to what gathered the input. Give it to that "
                    "(PrepareFloat8ModuleInput, share_input), or pass the input as a plain tensor"
                )
            return args[0]

        def local_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local() if use_local_output else output

        return distribute_module(module, device_mesh, self._partition, annotate, local_output)

    def _partition(self, name: str, module: Any, mesh: DeviceMesh) -> None:
        weight = module.float8_weight
        scales = module._parameters.pop(weight.scales_name, None)  # not placed like the weight
        self._partition_linear_fn(name, module, mesh)  # type: ignore[attr-defined]  # torch's style
        if scales is not None:
            place_scales(weight, scales)
        attach_statistics([weight])


class Float8ColwiseParallel(_Float8LinearStyle, ColwiseParallel):
    """``ColwiseParallel`` for a Float8Linear: weight and bias are ``Shard(0)``.

    Args:
        input_layouts: placement of a plain-tensor input; default Replicate. A sharded input is
            gathered as float8.
        output_layouts: placement of the output; default ``Shard(-1)``.
        use_local_output: return a plain tensor instead of a DTensor.
        reduce_transport: the encoding in which grad_input travels: ``"float8"`` or ``"bf16"``, with
            sums in fp32. None: torch's collectives. With an encoding, **the result depends on the
            number of ranks**: training on a mesh does not give the same bits as on one device.

    Collectives: in the forward, an all-gather of the input, if it is sharded and was not gathered
    before. In the backward, a reduce-scatter (or all-reduce) of grad_input in high precision, or
    with ``reduce_transport`` an all-to-all of 1.008 (float8) or 2 (bf16) bytes per element, and in
    place of an all-reduce also an all-gather of as many. Plus the amax all-reduces of the recipe:

    * ``tensorwise`` gathers 1 byte per element. It reduces 4 bytes for a sharded input, and 4 for
      grad_output.
    * ``delayed`` gathers 1 byte per element, and reduces no amaxes.
    * ``rowwise_folded`` gathers 1 byte per element and 4 per row. It reduces 8 bytes per row of
      grad_output.
    * ``rowwise`` and ``rowwise_with_gw_hp`` gather in high precision.

    See docs/communication.md for counts.

    Raises:
        ValueError: the style is applied to a module that is not a Float8Linear;
            ``reduce_transport`` is not one of the above; or, in the forward, it is not None but
            the input is a DTensor that was gathered before.
    """


class Float8RowwiseParallel(_Float8LinearStyle, RowwiseParallel):
    """``RowwiseParallel`` for a Float8Linear: the weight is ``Shard(1)``, the bias replicated.

    Args:
        input_layouts: placement of a plain-tensor input; default ``Shard(-1)``.
        output_layouts: placement of the output; default Replicate. With a ``Shard`` (sequence
            parallelism) grad_output is gathered as float8.
        use_local_output: return a plain tensor instead of a DTensor.
        reduce_transport: the encoding in which the output travels, as in
            :class:`Float8ColwiseParallel`.

    Collectives: in the forward, a reduce-scatter (or all-reduce) of the output in high precision,
    or with ``reduce_transport`` an all-to-all as in :class:`Float8ColwiseParallel`. In the
    backward, an all-gather of grad_output, if the output is sharded. Plus the amax all-reduces of
    the recipe:

    * ``tensorwise`` gathers 1 byte per element. It reduces 4 bytes for the input, and 4 for a
      sharded grad_output.
    * ``rowwise_folded`` gathers 1 byte per element and 8 per row. It reduces 4 bytes per row of the
      input.
    * Other recipes are as in :class:`Float8ColwiseParallel`.

    Raises:
        ValueError: the style is applied to a module that is not a Float8Linear; or
            ``reduce_transport`` is not one of the above.
    """


class PrepareFloat8ModuleInput(inputs.ModuleInput, CheckedStyle):
    """``PrepareModuleInput`` that casts floating-point inputs to float8 before it moves them.

    Layers that read the same input (q, k, v; w1, w3) then share one cast and one gather. The layers
    whose config determines the cast are *followed*. With DELAYED scaling the amax history of the
    input belongs to the first followed layer, as ``histories["prepared_input"]``.

    Args:
        input_layouts, desired_input_layouts, use_local_output: as in torch's
            ``PrepareModuleInput``.
        input_kwarg_layouts, desired_input_kwarg_layouts: as in torch's ``PrepareModuleInput``.
        float8_dtype: the dtype to cast to; ``None``: the input dtype of the followed layers.
        fwd_config_submodule_fqn: the name, in the module, of the one Float8Linear that is followed;
            ``None``: all of them are followed, and they must agree.
        reduce_transport: as in :class:`Float8ColwiseParallel`, for the gradients of inputs that the
            module reads whole. The gradients of the layers that read an input are summed, and then
            reduced once.

    Collectives: for each input, one all-gather of 1 byte per element, and for a dynamic scale per
    tensor one all-reduce of 4 bytes. Scales of rows travel in the gather, 4 bytes each. In the
    backward, a reduce-scatter of the gradient, as in :class:`Float8ColwiseParallel`.

    Raises:
        ValueError: ``reduce_transport`` is given and the module reads no input whole; or the style
            is applied to a module without a Float8Linear, with layers that disagree, or with layers
            that can't use one float8 copy of their input (``rowwise`` needs two).
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
        reduce_transport: Encoding = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
            reduce_transport=reduce_transport,
        )
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def misfits(self, module: nn.Module, size: int) -> Iterator[str]:
        layers, kind = float8_layers(module), type(module).__name__
        fqn = self.fwd_config_submodule_fqn
        casts = {name: input_cast(layers[name]) for name in self._followed(layers)}
        shown = {name: layers[name].extra_repr() for name in casts}
        dtypes = [cast[0].dtype for cast in casts.values() if cast is not None]
        if not layers:
            yield (
                f"PrepareFloat8ModuleInput: this {kind} contains no Float8Linear; convert the "
                "model first, or use torch's PrepareModuleInput"
            )
        elif not casts:
            yield (
                f"PrepareFloat8ModuleInput: fwd_config_submodule_fqn={fqn!r} is not a Float8Linear "
                f"in this {kind}; it has {list(layers)}"
            )
        elif len(dtypes) < len(casts):
            yield (
                f"PrepareFloat8ModuleInput: no single float8 copy of the input serves all GEMMs of "
                f"{', '.join(casts)}: {shown}; use torch's PrepareModuleInput"
            )
        elif len(set(casts.values())) > 1:
            yield (
                "PrepareFloat8ModuleInput: the layers that share this input cast it differently: "
                f"{shown}; give them one config, or name the one to follow in "
                "fwd_config_submodule_fqn"
            )
        elif self.float8_dtype not in (None, *dtypes):
            yield (
                f"PrepareFloat8ModuleInput: float8_dtype={self.float8_dtype}, but the layers "
                f"({', '.join(casts)}) cast their input to {dtypes[0]}; drop the argument"
            )

    def _followed(self, layers: Iterable[str]) -> list[str]:
        """The names of the followed layers, among those of a module's layers."""
        fqn = self.fwd_config_submodule_fqn
        return [name for name in layers if fqn in (None, name, without_wrappers(name))]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        layers = float8_layers(module)
        name = self._followed(layers)[0]
        first = layers[name]
        recipe, length = first.config.recipe, first.config.amax_history_len
        scheme = recipe.gather_scheme["input"]
        assert scheme is not None
        if "input" in recipe.delayed:
            # A history of the first layer, so that sync reduces it and a state_dict has it.
            history = AmaxHistory(recipe.delayed["input"], length, device_mesh)
            first.histories[PREPARED_INPUT] = history
        for layer in layers.values():
            layer.prepared_by |= {first.fqn}
            layer.prepared_input = first.histories.get(PREPARED_INPUT, layer.prepared_input)

        def cast_inputs(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # Look the layer up by name, because a copy of the module has the same hooks.
            layer: Any = module.get_submodule(name)
            if not isinstance(layer, Float8Linear):  # convert_to_linear
                return args, kwargs
            history = layer.histories.get(PREPARED_INPUT)
            cast = device_mesh, scheme, history, layer.float8_weight
            layouts, by_name = self.input_layouts or (), self.input_kwarg_layouts
            pairs = zip(args, layouts, strict=False)
            cast_args = [inputs.as_float8_input(x, layout, *cast) for x, layout in pairs]
            named = kwargs.items()
            cast_kwargs = {n: inputs.as_float8_input(x, by_name.get(n), *cast) for n, x in named}
            if history is not None:
                inputs.share_amaxes([*cast_args, *cast_kwargs.values()])
            return (*cast_args, *args[len(layouts) :]), cast_kwargs

        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        return super()._apply(module, device_mesh)


def input_cast(layer: nn.Module) -> tuple[Scheme, bool] | None:
    """Return the scheme of a layer's input, and whether it is DELAYED.

    None if no single float8 copy serves all GEMMs of the layer, or if it is not a Float8Linear.
    """
    if not isinstance(layer, Float8Linear):
        return None
    recipe = layer.config.recipe
    scheme = recipe.gather_scheme["input"]
    return None if scheme is None else (scheme, "input" in recipe.delayed)


def facts_of(style: ParallelStyle, name: str) -> dict[str, str]:
    """The class and the arguments of a style as text, by name, so that ranks can compare them."""
    others = ("use_local_output", "reduce_transport")
    values = {n: x for n, x in vars(style).items() if n.endswith("layouts") or n in others}
    facts = {name: type(style).__name__}
    return facts | {f"{n} of {name}": str(value) for n, value in values.items()}
