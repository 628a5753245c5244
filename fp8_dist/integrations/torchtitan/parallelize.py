"""Tensor parallelism in float8: gathers move from torchtitan's modules into the float8 layers.

torchtitan declares per module how inputs and outputs move. An attention gathers its input in high
precision, and ``wo`` reduce-scatters its output outside of the layer, so that the gradient of that
is gathered outside, too. Here the input is cast before it is gathered (``share_input``), and
the layer moves its own output and output gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import resolve_placements

from fp8_dist.integrations.torchtitan.converter import TitanFloat8Linear
from fp8_dist.tensor_parallel import declare_placements, share_input


def float8_parallelize(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A model's ``parallelize_fn`` with float8 tensor parallelism.

    Raises (what is returned):
        NotImplementedError: tensor parallelism with the back end ``full_dtensor``; with
            ``spmd_types``, converted layers that it does not shard, or row-parallel ones with a
            bias.
        ValueError: some of the layers that take one input are converted, and some are not.
    """
    return partial(_parallelize, parallelize)


def _parallelize(
    parallelize: Callable[..., nn.Module], model: nn.Module, *, parallel_dims: Any, **others: Any
) -> nn.Module:
    if parallel_dims.tp_enabled:
        if parallel_dims.spmd_backend == "full_dtensor":
            raise NotImplementedError(
                "fp8_dist has no tensor parallelism for parallelism.spmd_backend=full_dtensor; use "
                "spmd_types or partial_dtensor"
            )
        if parallel_dims.spmd_backend == "spmd_types":
            _check_local_layers(model)
        # (Before torchtitan wraps the forwards.)
        _move_gathers(model, parallel_dims)
    return parallelize(model, parallel_dims=parallel_dims, **others)


def _check_local_layers(model: nn.Module) -> None:
    """Refuse replicated parameters: spmd_types sums their gradients, which layers have summed."""
    for module in model.modules():
        if isinstance(module, TitanFloat8Linear):
            dim = _weight_dim(module)
            if dim is None or (dim == 1 and module.bias is not None):
                what = "weight" if dim is None else "bias"
                raise NotImplementedError(
                    f"{module.fqn}: the {what} is replicated over the tensor-parallel ranks, which "
                    "fp8_dist does not handle with spmd_types; leave the layer unconverted "
                    "(filter_fqns), or use parallelism.spmd_backend=partial_dtensor"
                )


def _move_gathers(model: nn.Module, parallel_dims: Any) -> None:
    mesh = parallel_dims.get_mesh("tp")
    inputs: dict[nn.Module, Any] = {}  # of each layer: its placement before it is gathered
    for fqn, module in model.named_modules():
        sharding = getattr(module, "_sharding_config", None)
        if sharding is None or not sharding.in_dst_shardings or sharding.local_map is not None:
            continue
        layers = _column_parallel(module, fqn)
        if layers:
            name = _moved_input(sharding, fqn)
            source = sharding.in_src_shardings[name]
            inputs |= dict.fromkeys(layers, resolve_placements(source, mesh)[0])
            module._sharding_config = replace(sharding, in_dst_shardings=None)
            module.forward = _with_shared_input(module, name, layers)
    for module in model.modules():
        if isinstance(module, TitanFloat8Linear):
            _place(module, mesh, inputs, parallel_dims.spmd_backend == "spmd_types")


def _moved_input(sharding: Any, fqn: str) -> str:
    """The name of the one input that a module gathers over the tensor-parallel axis."""
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


def _weight_dim(layer: nn.Module) -> int | None:
    """The dim of a weight that tensor parallelism shards."""
    sharding: Any = layer._sharding_config
    dim: int | None = getattr(_on_tp(sharding.state_shardings["weight"]), "dim", None)
    return dim


def _column_parallel(module: nn.Module, fqn: str) -> list[TitanFloat8Linear]:
    """The float8 layers that take what ``module`` gathers."""
    every = {
        name: child
        for name, child in module.named_modules()
        if child is not module
        and isinstance(child, Linear | TitanFloat8Linear)
        and _weight_dim(child) == 0
    }
    converted = {name: m for name, m in every.items() if isinstance(m, TitanFloat8Linear)}
    others = [name for name in every if name not in converted]
    if converted and others:
        raise ValueError(
            f"{fqn}: {list(converted)} are converted to float8 and {others} are not, but they "
            "share one gather of their input; convert all of them or none (filter_fqns)"
        )
    return list(converted.values())


def _with_shared_input(
    module: Any, name: str, layers: list[TitanFloat8Linear]
) -> Callable[..., Any]:
    forward, position = module.forward, module._cache_pos_arg_names().index(name)

    @wraps(forward)
    def with_shared_input(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            return forward(*args, **kwargs | {name: share_input(kwargs[name], layers)})
        x = share_input(args[position], layers)
        return forward(*args[:position], x, *args[position + 1 :], **kwargs)

    return with_shared_input


def _place(layer: Any, mesh: Any, inputs: dict[nn.Module, Any], is_local: bool) -> None:
    """Let a layer move its own output, and, of local tensors, know where they stand."""
    sharding = layer._sharding_config
    dim, moves = _weight_dim(layer), sharding.out_dst_shardings is not None
    output = sharding.out_dst_shardings if moves else sharding.out_src_shardings
    if moves:
        layer._sharding_config = replace(sharding, out_src_shardings=output, out_dst_shardings=None)
    (placement,) = resolve_placements(output, mesh)
    if not is_local:
        layer.output_placements = (placement,)
        return
    assert dim is not None
    source = inputs.get(layer, Replicate()) if dim == 0 else Shard(-1)
    declare_placements(layer, mesh, weight=Shard(dim), input=source, output=placement)
