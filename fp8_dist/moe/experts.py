"""Conversion of a model's experts to float8, and access to their weights in a forward.

Modules keep their classes. An *adapter* recognizes the experts of a package, and makes their
modules use float8. ``fp8_dist.integrations`` registers adapters in ``EXPERTS_ADAPTERS``.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fp8_dist.config import check_config
from fp8_dist.mesh import local_tensor, sharded_dim
from fp8_dist.moe.config import Float8ExpertsConfig, stored_transposed
from fp8_dist.moe.functions import Weight, local_part
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import CastPlan, Quantized, Scheme, transposed
from fp8_dist.text import kind_of, without_wrappers
from fp8_dist.torch_internals import (
    StridedShard,
    recorded_as_operators_are,
    remove_state_hooks,
)
from fp8_dist.weight.agreement import note_converted
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.uncast import Uncast
from fp8_dist.weight.weights import checked_module, load_weights, save_weights, weights_of

FilterFn = Callable[[nn.Module, str], bool]

_CALLER = "convert_experts_to_float8_training"
# The remedy in errors about weights that are distributed before they are converted.
CONVERT_BEFORE = (
    "Convert the model first, then apply tensor parallelism, then fully_shard. One that is "
    "distributed already, as after convert_to_linear, can't be converted: make a new model in this "
    "order, and load the state_dict of this one"
)


class ExpertsAdapter:
    """Conversion and export of a package's experts.

    The base class adapts custom experts, whose class names its weights and whose forward calls the
    functions of ``fp8_dist.moe.layers``.
    """

    def weights(self, module: nn.Module) -> tuple[str, ...]:
        """The names of the weights ``[E, N, K]`` of a module; empty if it has no experts."""
        # A wrapper, such as checkpointing's, has the attributes of the module in it.
        of_class = getattr(type(module), "float8_weight_names", ())
        return tuple(vars(module).get("float8_weight_names", of_class))

    def is_transposed(self, module: nn.Module) -> bool:
        """Whether the weights of a module are stored as ``[E, K, N]``."""
        return False

    def unfit(self, module: nn.Module) -> str | None:
        """The reason why these experts can't be converted, or ``None``."""
        weights = {name: module._parameters.get(name) for name in self.weights(module)}
        wrong = [name for name, weight in weights.items() if weight is None or weight.ndim != 3]
        return f"it has no parameter {', '.join(wrong)} of shape [E, N, K]" if wrong else None

    def parts(self, module: nn.Module) -> dict[str, Placement]:
        """The placement of each weight if every rank has a part of each expert.

        The hidden features, between the first and the last weight, are divided. Empty if they can't
        be.
        """
        return {}

    def use(self, module: nn.Module) -> None:
        """Make a module use float8, once its weights are converted."""

    def undo(self, module: nn.Module) -> None:
        """Undo :meth:`use`."""

    def entries(self, model: nn.Module, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The entries of a checkpoint for a weight ``[E, N, K]``, or the scales of its blocks.

        ``name``: the name of the weight in the state dict of ``model``.
        """
        return {name: tensor}


CUSTOM_EXPERTS = ExpertsAdapter()
# Package of a module's class -> function that returns the adapter of its experts.
EXPERTS_ADAPTERS: dict[str, Callable[[], ExpertsAdapter]] = {}


def _adapter_of(module: nn.Module) -> ExpertsAdapter:
    packages = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
    known = EXPERTS_ADAPTERS.keys() & packages
    if CUSTOM_EXPERTS.weights(module) or not known:
        return CUSTOM_EXPERTS
    return EXPERTS_ADAPTERS[known.pop()]()


class ExpertWeight(Float8Weight):
    """A weight ``[E, N, K]`` of a module of experts. One float8 copy serves both of its GEMMs.

    A weight that is stored as ``[E, K, N]`` is cast in that layout, with the scales of
    ``[E, N, K]``, and its transposed view is multiplied.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        # Looking up the adapter also registers the forward, such as when a model is unpickled.
        self.adapter = _adapter_of(module)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored as ``[E, K, N]``."""
        return self.adapter.is_transposed(self.module)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        (scheme,) = self.config.recipe.schemes["weight"]  # dynamo does not trace super().schemes
        return (stored_transposed(scheme) if self.is_transposed else scheme,)

    def plan(self, gemms: tuple[Gemm, ...], device: torch.device) -> CastPlan:
        return CastPlan(self.schemes, places=(0,) * len(gemms))

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        # Scales are folded into the float8 copy of a gradient, so it is cast once.
        schemes = self.schemes if operand == "weight" else self.config.recipe.schemes[operand]
        return {tuple(self.config.recipe.uses[operand]): schemes[0]}

    def why_not_captured(self) -> str:
        return "belongs to experts, whose numbers of rows the host reads; leave them out"

    def check_sharded(self) -> None:
        layout, ndim = self.layout(self.master()), self.parameter().ndim
        *outer, last = (None,) if layout is None else layout.placements
        if isinstance(last, StridedShard) and last.dim in [sharded_dim(p, ndim) for p in outer]:
            raise ValueError(
                f"{self.fqn}: FSDP2 shards dim {last.dim} of {self.name}, of which tensor "
                "parallelism has given each rank several pieces, and torch would save them in "
                "another order; shard another dim (shard_placement_fn)"
            )

    @recorded_as_operators_are
    def operand(self, parameter: torch.Tensor, is_transposed: bool | None = None) -> Weight:
        """The weight ``[E, N, K]`` for a forward and its backward.

        ``is_transposed``: whether the parameter is ``[E, K, N]``; by default :attr:`is_transposed`.

        Collectives: as :meth:`operands`. Before the first forward of a weight that other code has
        distributed, those of :meth:`compare`.
        """
        is_graph = torch.compiler.is_compiling()  # a graph compares when it looks up casts
        if isinstance(parameter, DTensor) and not (self.is_compared or is_graph):
            self.compare("the first forward")
        output, grad_input, _ = self.operands(parameter, torch.is_grad_enabled())
        assert output is not None
        tensor, layout, to = local_part(parameter), self.layout(parameter), None
        if self.is_transposed if is_transposed is None else is_transposed:
            (to,) = self.config.recipe.schemes["weight"]
            output, layout = transposed(output, to), None
        later: Quantized | Uncast = output
        if isinstance(grad_input, Uncast):
            later = grad_input._replace(parameter=tensor, transposed_to=to)
        return Weight(tensor if to is None else tensor.mT, output, later, self, layout)


def expert_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """The shapes ``[E, N, K]`` of a module's weights of experts; empty if none are known."""
    adapter = _adapter_of(module)
    weights = {name: module.get_parameter(name) for name in adapter.weights(module)}
    return {n: (w.mT if adapter.is_transposed(module) else w).shape for n, w in weights.items()}


def experts_config(module: nn.Module) -> Float8ExpertsConfig | None:
    """The config of a module of converted experts; ``None`` for any other module."""
    return vars(module).get("float8_experts_config")  # a wrapper has the attributes of its module


def float8_experts(module: nn.Module) -> dict[str, nn.Module]:
    """The converted experts in ``module``, by FQN.

    Raises:
        TypeError: ``module`` is not an nn.Module.
    """
    parts = checked_module(module).named_modules()
    return {fqn: part for fqn, part in parts if experts_config(part) is not None}


def check_arguments(caller: str, module: nn.Module, module_filter_fn: FilterFn | None) -> None:
    """Raise TypeError if an argument that all conversions take has the wrong type."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: pass the model, an nn.Module, got {module!r}")
    try:
        if module_filter_fn is not None:
            called = signature(module_filter_fn)
            called.bind(None, "")
            # skip_head would take the layer for a model, and its FQN for the name of a layer.
            takes_names = any(p.kind is p.VAR_POSITIONAL for p in called.parameters.values())
            if takes_names and "__call__" in dir(called.return_annotation):
                raise TypeError("it returns a function")
    except TypeError as error:  # not a function, or a function with other arguments or results
        raise TypeError(
            f"{caller}: module_filter_fn must be a function (module, fqn) -> bool, got "
            f"{module_filter_fn!r}; skip_head(model) makes one, and so does lambda module, fqn: "
            "'NAME' not in fqn"
        ) from error
    except ValueError:  # functions implemented in C may have no signature
        pass


def convert_experts_to_float8_training(
    module: nn.Module,
    *,
    config: Float8ExpertsConfig | None = None,
    module_filter_fn: FilterFn | None = None,
) -> nn.Module:
    """Convert the experts of mixture-of-experts layers in place.

    Their grouped GEMMs then run in float8. Router, activation function and routing weights stay in
    high precision. Linear layers are converted by :func:`fp8_dist.convert_to_float8_training`
    instead. Convert before the model is distributed.

    Experts of transformers are converted if they have the weights ``gate_up_proj`` (or ``up_proj``)
    and ``down_proj`` of shape ``[E, N, K]`` or ``[E, K, N]``, as in Mixtral, Qwen3-MoE, OLMoE,
    DeepSeek-V3 and GPT-OSS.
    Experts of your own are converted if their class has the attribute ``float8_weight_names``, the
    names of such weights. Their forward passes the weights to :func:`dispatch_linear`,
    :func:`linear_combine` or :func:`grouped_linear`, with ``self.float8_experts_config``; FSDP2
    then gathers them in float8.

    Args:
        module: the model.
        config: default ``Float8ExpertsConfig()``.
        module_filter_fn: a function ``(module, fqn) -> bool`` that is called for each module of
            experts. If it returns False, the experts stay unconverted.

    Returns:
        ``module``.

    Collectives: none.

    Raises:
        ValueError: there are no experts to convert, experts are already converted with another
            config, or a weight is already distributed.
        NotImplementedError: experts that the filter admits can't be converted.
        TypeError: an argument has the wrong type.
    """
    check_arguments(_CALLER, module, module_filter_fn)
    config = config or Float8ExpertsConfig()
    check_config(_CALLER, config, Float8ExpertsConfig)
    chosen: dict[str, tuple[nn.Module, ExpertsAdapter]] = {}
    for name, part in module.named_modules():
        adapter = _adapter_of(part)
        if not adapter.weights(part):
            continue
        fqn = without_wrappers(name)
        if module_filter_fn is not None and not module_filter_fn(part, fqn):
            continue
        _check(part, adapter, fqn or "the module", config)
        if experts_config(part) is None:
            chosen[fqn] = part, adapter
    if not chosen and not float8_experts(module):
        raise ValueError(
            f"{_CALLER}: the model has no experts that are known, or module_filter_fn admits none; "
            "those of transformers are known from its release 5 on, and experts of your own need "
            "the attribute float8_weight_names"
        )
    for fqn, (part, adapter) in chosen.items():
        add_weights(part, adapter.weights(part), config, fqn)
        adapter.use(part)
    note_converted(module)
    return module


def add_weights(
    part: nn.Module, names: Sequence[str], config: Float8ExpertsConfig, fqn: str
) -> None:
    """Make parameters of a module float8 weights; its forward takes them from :func:`weight_of`."""
    weights = {name: ExpertWeight(part, config.linear, fqn, name=name) for name in names}
    part.float8_weights = weights  # type: ignore[assignment]
    part.float8_experts_config = config  # type: ignore[assignment]
    part.register_state_dict_post_hook(save_weights)
    part.register_load_state_dict_pre_hook(load_weights)


def why_not_convertible_back(part: nn.Module) -> str:
    """Return the reason why converted experts can't be converted back in place, or ``""``."""
    if not _adapter_of(part).weights(part):
        return f"{kind_of(part)} is built in float8"
    if any(isinstance(weight.parameter(), DTensor) for weight in weights_of(part).values()):
        return "they are distributed"
    return ""


def convert_back(part: nn.Module) -> None:
    """Undo the conversion of experts that are not distributed."""
    _adapter_of(part).undo(part)
    remove_state_hooks(part, {save_weights, load_weights})
    del part.float8_weights, part.float8_experts_config


def _check(part: nn.Module, adapter: ExpertsAdapter, fqn: str, config: Float8ExpertsConfig) -> None:
    known = experts_config(part)
    if known not in (None, config):
        raise ValueError(
            f"{_CALLER}: {fqn} is converted already, with another config: {known}. Convert it "
            "once, or exclude it in module_filter_fn"
        )
    if why := adapter.unfit(part):
        raise NotImplementedError(
            f"{_CALLER}: {fqn} can't be converted: {why}. Exclude it in module_filter_fn"
        )
    weights = [part._parameters[name] for name in adapter.weights(part)]
    if known is None and any(isinstance(weight, DTensor) for weight in weights):
        raise ValueError(
            f"{_CALLER}: the weights of {fqn} are distributed already. {CONVERT_BEFORE}"
        )


class ExpertsDivision(NamedTuple):
    """Distribution of experts over ranks.

    Attributes:
        experts: the number of experts of all ranks.
        group: the ranks that the experts are divided between; ``None`` if this rank has all.
        mesh: the mesh whose ranks each have a part of every expert; ``None`` if experts are whole.
    """

    experts: int
    group: ProcessGroup | None
    mesh: DeviceMesh | None = None


def division_of(module: nn.Module) -> ExpertsDivision:
    """Return the distribution of converted experts in the forward.

    Raises:
        ValueError: they are divided neither by whole experts nor by :meth:`ExpertsAdapter.parts`.
    """
    weights = weights_of(module)
    first: Any = next(iter(weights.values()))
    layouts = {name: weight.layout() for name, weight in weights.items()}
    # Meshes are compared, because equal meshes may have several groups of the same ranks.
    divisions = {(layout.shape[0], layout.mesh) if layout else None for layout in layouts.values()}
    parts = {name: (placement,) for name, placement in first.adapter.parts(module).items()}
    is_parted = parts == {name: layout and layout.placements for name, layout in layouts.items()}
    for name, layout in layouts.items():
        if layout is not None and not is_parted and layout.placements != (Shard(0),):
            raise ValueError(
                f"{first.fqn}: {name} is placed as {list(layout.placements)} on {layout.mesh} in "
                "the forward; experts are divided by Float8ExpertParallel or "
                "Float8ExpertTensorParallel on one axis, and FSDP2 shards them over others"
            )
    if len(divisions) > 1:
        raise ValueError(
            f"{first.fqn}: the weights of the experts are distributed in different ways"
        )
    (division,) = divisions
    if division is None:
        return ExpertsDivision(len(local_tensor(first.parameter())), None)
    experts, mesh = division
    if is_parted:
        return ExpertsDivision(experts, None, mesh)
    return ExpertsDivision(experts, mesh.get_group() if mesh.size() > 1 else None)


def weight_of(module: nn.Module, name: str) -> Weight:
    """The weight of converted experts for a forward and its backward.

    Collectives: as :meth:`ExpertWeight.operand`.
    """
    weight: Any = weights_of(module)[name]
    operand: Weight = weight.operand(getattr(module, name))
    return operand


def parts_of(module: nn.Module) -> dict[str, Placement]:
    """The placements that divide the features of converted experts; see ``ExpertsAdapter``."""
    weight: Any = next(iter(weights_of(module).values()))
    return weight.adapter.parts(module)
