"""Float8 in a torchtitan trainer config: conversion, parallelism, and updates of scales.

In tensor parallelism, gathers move from torchtitan's modules into the float8 layers. torchtitan
declares for each module how inputs and outputs are redistributed. An attention module gathers its
input in high precision. The output of ``wo`` is reduce-scattered outside of the layer, and so its
gradient is gathered outside of the layer. With this module, the input is cast before it is gathered
(``share_input``), and the layer redistributes its own output and output gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import resolve_placements

from fp8_dist.config import Float8LinearConfig
from fp8_dist.fsdp import attach_update, set_gradient_transport
from fp8_dist.fsdp.gradient_transport import Transport
from fp8_dist.integrations.torchtitan.experts import Float8ExpertsConverter, fields_of
from fp8_dist.linear.module import Float8Linear
from fp8_dist.tensor_parallel import declare_placements, share_input
from fp8_dist.tensor_parallel.inputs import check_transport
from fp8_dist.transport import Encoding
from fp8_dist.weight.weights import float8_weights


class TitanFloat8Linear(Float8Linear, Module):
    """A Float8Linear that torchtitan builds from a config and parallelizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        float8: Float8LinearConfig
        fqn: str

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.in_features, config.out_features, bias=config.bias, config=config.float8
        )
        self.fqn = config.fqn


class Float8Converter(QuantizationConverter):
    """A converter from torchtitan's Linear to Float8Linear, with the filter that torchtitan uses.

    Layers whose sizes are not multiples of 16 stay unconverted. FSDP2 gathers weights in float8
    where the recipe allows it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The config of the conversion."""

        recipe_name: str = "tensorwise"  # as in Float8LinearConfig.from_recipe_name
        # Layers whose name contains one of these strings stay unconverted.
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the configs of linear layers in a model's config, in place.

        Raises:
            ValueError: the recipe is unknown, or there is no layer to convert.
        """
        recipe = Float8LinearConfig.from_recipe_name(self.config.recipe_name)
        float8 = replace(recipe, enable_fsdp_float8_all_gather="auto")
        has_converted = False
        for fqn, linear, parent, name in list(model_config.traverse(Linear.Config)):
            # Subclasses of the config belong to layers that compute something else.
            is_linear = type(linear) is Linear.Config
            if not (is_linear and module_filter_fn(linear, fqn, self.config.filter_fqns)):
                continue
            has_converted = True
            new = TitanFloat8Linear.Config(**fields_of(linear), float8=float8, fqn=fqn)
            if isinstance(parent, list):
                parent[name] = new
            else:
                setattr(parent, name, new)
        if not has_converted:
            raise ValueError(
                "Float8Converter: the model has no linear layer to convert; its layers are not "
                f"torchtitan's Linear, have sizes that are no multiples of 16, or have one of "
                f"{self.config.filter_fqns} in their names"
            )
        return model_config


def with_float8(
    config: Any,
    recipe_name: str = "tensorwise",
    filter_fqns: Sequence[str] = ("lm_head",),
    *,
    experts_recipe: str | None = None,
    gradient_transport: Transport | None = None,
    reduce_transport: Encoding = None,
) -> Any:
    """Make the model of a torchtitan ``Trainer.Config`` train in float8.

    Args:
        config: a config from a function in a ``config_registry``. Its ``model_spec`` is replaced.
        recipe_name: the name of a recipe, as in ``Float8LinearConfig.from_recipe_name``.
        filter_fqns: layers whose name contains one of these strings stay unconverted.
        experts_recipe: the name of a recipe of ``fp8_dist.moe.Float8ExpertsConfig``, by which to
            convert routed experts, too. Default: they stay in high precision.
        gradient_transport: the transport of FSDP2's gradients, as in ``set_gradient_transport``.
        reduce_transport: the transport of sums over tensor-parallel ranks, as in ``llama_tp_plan``.
            With either transport, results depend on the number of ranks.

    Returns:
        ``config``. FSDP2 gathers weights in float8 where the recipe allows it, and tensor
        parallelism gathers inputs and output gradients in float8. Scales are updated after each
        optimizer step.

    Raises:
        ValueError: the recipe or ``reduce_transport`` is unknown, or there is no layer to convert.
            When the model is parallelized: some of the layers that share one input are converted
            and some are not, or a given transport applies to nothing.
        NotImplementedError: when the model is parallelized: ``spmd_backend`` is ``full_dtensor``; a
            module gathers several inputs, or none, for its converted layers; or, with
            ``spmd_types``, a converted layer is not sharded, or is row-parallel with a bias.
    """
    check_transport(reduce_transport, "with_float8")
    spec, filters = config.model_spec, list(filter_fqns)
    layers = Float8Converter.Config(recipe_name=recipe_name, filter_fqns=filters)
    layers.build().convert(spec.model)
    if experts_recipe is not None:
        experts = Float8ExpertsConverter.Config(recipe_name=experts_recipe, filter_fqns=filters)
        experts.build().convert(spec.model)

    def parallelize(model: nn.Module, *, parallel_dims: Any, **others: Any) -> nn.Module:
        if parallel_dims.tp_enabled:
            # This must come before torchtitan wraps the forwards.
            _move_gathers(model, parallel_dims, reduce_transport)
        elif reduce_transport is not None:
            raise ValueError(
                f"with_float8: reduce_transport={reduce_transport!r} is for tensor parallelism; "
                "set parallelism.tensor_parallel_degree, or drop it"
            )
        model = spec.parallelize_fn(model, parallel_dims=parallel_dims, **others)
        if gradient_transport is not None:
            set_gradient_transport(model, gradient_transport)
        return model

    def attach(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(optimizers, model_parts, parallel_dims)
        for part in model_parts:
            if float8_weights(part):
                attach_update(optimizers, part)

    config.model_spec = replace(spec, parallelize_fn=parallelize, post_optimizer_build_fn=attach)
    return config


def _move_gathers(model: nn.Module, parallel_dims: Any, transport: Encoding) -> None:
    if parallel_dims.spmd_backend == "full_dtensor":
        raise NotImplementedError(
            "fp8_dist has no tensor parallelism for parallelism.spmd_backend=full_dtensor; use "
            "spmd_types or partial_dtensor"
        )
    mesh, is_local = parallel_dims.get_mesh("tp"), parallel_dims.spmd_backend == "spmd_types"
    layers = [module for module in model.modules() if isinstance(module, TitanFloat8Linear)]
    for layer in layers if is_local else ():
        dim = _weight_dim(layer)
        if dim is None or (dim == 1 and layer.bias is not None):
            # spmd_types would sum the gradients of replicated parameters a second time.
            raise NotImplementedError(
                f"{layer.fqn}: the {'weight' if dim is None else 'bias'} is replicated over the "
                "tensor-parallel ranks, which fp8_dist does not handle with spmd_types; leave the "
                "layer unconverted (filter_fqns), or use parallelism.spmd_backend=partial_dtensor"
            )
    # With local tensors, the layers declare the transport themselves (_place).
    input_transport = None if is_local else transport
    inputs: dict[nn.Module, Any] = {}  # the placement of each layer's input before the gather
    for fqn, module in model.named_modules():
        sharding = getattr(module, "_sharding_config", None)
        if sharding is None or not sharding.in_dst_shardings or sharding.local_map is not None:
            continue
        if readers := _column_parallel(module, fqn):
            name = _moved_input(sharding, fqn)
            source = sharding.in_src_shardings[name]
            inputs |= dict.fromkeys(readers, resolve_placements(source, mesh)[0])
            module._sharding_config = replace(sharding, in_dst_shardings=None)
            share = partial(share_input, layers=readers, reduce_transport=input_transport)
            module.forward = _with_prepared_input(module, name, share)
    for layer in layers:
        _place(layer, mesh, inputs, is_local, transport)


def _moved_input(sharding: Any, fqn: str) -> str:
    """Return the name of the only input that a module gathers over the tensor-parallel axis."""
    sources, targets = sharding.in_src_shardings, sharding.in_dst_shardings
    names = [n for n in targets if _on_tp(sources[n]) != _on_tp(targets[n])]
    if len(names) != 1:
        raise NotImplementedError(
            f"{fqn}: fp8_dist takes over the gather of one input of a module, found {names}; leave "
            "its layers unconverted (filter_fqns)"
        )
    return names[0]


def _on_tp(layout: Any) -> Any:
    return layout.per_axis_spmd_types()[MeshAxisName.TP]


def _weight_dim(layer: Any) -> int | None:
    """Return the dim along which tensor parallelism shards a weight; None if it does not."""
    return getattr(_on_tp(layer._sharding_config.state_shardings["weight"]), "dim", None)


def _column_parallel(module: nn.Module, fqn: str) -> list[TitanFloat8Linear]:
    """Return the column-parallel float8 layers, which take the input that ``module`` gathers."""
    layers = {
        name: child
        for name, child in module.named_modules()
        if child is not module
        and isinstance(child, Linear | TitanFloat8Linear)
        and _weight_dim(child) == 0
    }
    converted = {name: m for name, m in layers.items() if isinstance(m, TitanFloat8Linear)}
    others = [name for name in layers if name not in converted]
    if converted and others:
        raise ValueError(
            f"{fqn}: {list(converted)} are converted to float8 and {others} are not, but they "
            "share one gather of their input; convert all of them or none (filter_fqns)"
        )
    return list(converted.values())


def _with_prepared_input(
    module: Any, name: str, prepare: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    forward, position = module.forward, module._cache_pos_arg_names().index(name)

    @wraps(forward)
    def with_prepared_input(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            return forward(*args, **kwargs | {name: prepare(kwargs[name])})
        return forward(*args[:position], prepare(args[position]), *args[position + 1 :], **kwargs)

    return with_prepared_input


def _place(
    layer: Any, mesh: Any, inputs: dict[nn.Module, Any], is_local: bool, transport: Encoding
) -> None:
    """Let a layer redistribute its own output, and declare the placements of local tensors."""
    dim, sharding = _weight_dim(layer), layer._sharding_config
    output = sharding.out_dst_shardings or sharding.out_src_shardings
    layer._sharding_config = replace(sharding, out_src_shardings=output, out_dst_shardings=None)
    (placement,) = resolve_placements(output, mesh)
    if not is_local:
        layer.output_placements = (placement,)
        layer.reduce_transport = transport if dim == 1 else None
        return
    source = inputs.get(layer, Replicate()) if dim == 0 else Shard(-1)
    declare_placements(
        layer,
        mesh,
        weight=Shard(dim),  # type: ignore[arg-type]
        input=source,
        output=placement,
        reduce_transport=transport if dim == 1 or layer in inputs else None,
    )
