"""transformers' experts in float8: the implementation ``"fp8_dist"`` of its interfaces.

It is the ``experts_implementation`` of converted experts. As the ``ep_implementation`` of a
``DistributedConfig``, it sends the rows of converted experts in float8.
"""

import copy
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fp8_dist.moe import experts as moe
from fp8_dist.moe.dispatch import route
from fp8_dist.moe.functions import combined_product, grouped_product, local_part
from fp8_dist.moe.operators import add_bias
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import StridedShard
from fp8_dist.weight.weights import weights_of

IMPLEMENTATION = "fp8_dist"


def experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    division: moe.ExpertsDivision | None = None,
) -> Tensor:
    """The forward of converted experts, as transformers' experts interface calls it.

    ``hidden_states`` and the result are ``[T, H]``, the other tensors ``[T, top_k]``.
    ``division``: the division of the experts between ranks; by default, ``division_of`` finds it.

    Collectives: if ranks hold different experts, those of ``route``, ``dispatch_linear`` and
    ``linear_combine``. If they hold parts of each expert, those of ``Float8ExpertTensorParallel``.

    Raises:
        ValueError: the experts are not converted.
    """
    _check_converted(self, "experts_implementation")
    config, (first, second) = self.float8_experts_config, weights_of(self)
    _check_whole(self)
    _warn_if_set(self)
    num_experts, group, mesh = division or moe.division_of(self)
    if mesh is not None:
        hidden_states, top_k_weights = _shared(hidden_states, mesh), _shared(top_k_weights, mesh)
    routing = route(top_k_index, num_experts, group)
    (hidden,) = grouped_product(hidden_states, [moe.weight_of(self, first)], routing, config)
    bias = None
    if self.has_bias:
        first_bias, bias = (local_part(getattr(self, f"{name}_bias")) for name in (first, second))
        hidden = add_bias(hidden, first_bias, routing.groups)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    slots = combined_product(hidden, moe.weight_of(self, second), routing, config, bias)
    output = (slots * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)
    if mesh is None:
        return output
    total = DTensor.from_local(output, mesh, [Partial()], run_check=False).full_tensor()
    return total.clone()  # FSDP2 warns of modules that return views


def _shared(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated tensor, such that the backward sums its gradients over the ranks."""
    replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


class _TransformersExperts(moe.ExpertsAdapter):
    """Experts of transformers' experts interface."""

    def weights(self, module: nn.Module) -> tuple[str, ...]:
        first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        parameters = [module._parameters.get(name) for name in (first, "down_proj")]
        is_experts = all(p is not None and p.ndim == 3 for p in parameters)
        return (first, "down_proj") if is_experts else ()

    def is_transposed(self, module: Any) -> bool:
        return module.is_transposed

    def unfit(self, module: nn.Module) -> str | None:
        if not hasattr(module, "is_transposed"):
            return (
                "its class does not use transformers' experts interface, which passes the experts "
                "of each token (those of Llama 4 multiply every token, scaled by the router before)"
            )
        return "it has a norm after each expert" if module.has_post_expert_norm else None

    def parts(self, module: Any) -> dict[str, Placement]:
        if module.is_transposed or module.has_bias or not module.is_concatenated:
            return {}
        first, last = weights_of(module)
        # Each rank has a part of gate and a part of up.
        divided: Any = StridedShard(1, split_factor=2) if module.has_gate else Shard(1)
        return {first: divided, last: Shard(2)}

    def use(self, module: nn.Module) -> None:
        # Copy the config, so that unconverted experts of the model keep their implementation.
        shared: Any = module.config
        config = copy.copy(shared)
        config._experts_implementation = IMPLEMENTATION
        config.float8_replaces = shared, shared._experts_implementation
        config.float8_features = {n: getattr(module, n).shape[1:] for n in self.weights(module)}
        module.config = config

    def undo(self, module: Any) -> None:
        module.config, _ = module.config.float8_replaces

    def entries(self, model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not isinstance(model, PreTrainedModel):
            return {name: tensor}
        # Clone them, because views of one tensor can't be saved as safetensors.
        return {n: t.clone() for n, t in revert_weight_conversion(model, {name: tensor}).items()}


ADAPTER = _TransformersExperts()


def _warn_if_set(module: Any) -> None:
    """Warn if the implementation of the model's experts was set after the conversion."""
    shared, former = module.config.float8_replaces
    now = shared._experts_implementation
    if now not in (former, IMPLEMENTATION):
        warn_once(
            "experts implementation",
            f"{next(iter(weights_of(module).values())).fqn}: the experts are in float8, so "
            f"set_experts_implementation({now!r}) has no effect on them; leave them out by "
            "convert_experts_to_float8_training's module_filter_fn to run them so",
        )


def _check_whole(module: Any) -> None:
    """Raise if plain weights hold only parts of experts, so that scales cover the parts alone."""
    for name, features in module.config.float8_features.items():
        if (shape := getattr(module, name).shape[1:]) != features:
            raise NotImplementedError(
                f"{weights_of(module)[name].fqn}: the forward was given {tuple(shape)} of the "
                f"features {tuple(features)} of {name}, as moe_tp_experts passes them; leave "
                "converted experts out of its plan, and divide them by Float8ExpertTensorParallel"
            )


def _check_converted(module: nn.Module, argument: str) -> None:
    if moe.experts_config(module) is None:
        raise ValueError(
            f"{argument}={IMPLEMENTATION!r} is for experts in float8, but those of a "
            f"{type(module).__name__} are not converted; call convert_experts_to_float8_training, "
            "or load the model with quantization_config=Fp8DistConfig(experts_recipe=...)"
        )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)

if find_spec("transformers.distributed.expert_parallel"):  # in later releases of transformers 5
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    class Float8EP(EPImplementation):
        """Expert parallelism of converted experts, whose rows travel in float8.

        Collectives: in the forward and backward, those of :func:`experts_forward`. In the
        constructor, one all-reduce of 16 bytes for each parameter's mesh.

        Raises:
            ValueError: the experts are not converted, or the ranks' configs differ.
        """

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            _check_converted(experts, "ep_implementation")
            self.experts = experts
            for weight in weights_of(experts).values():
                weight.compare("from_pretrained")

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            experts = self.num_local_experts * self.ep_mesh.size()
            division = moe.ExpertsDivision(experts, self.ep_mesh.get_group())
            tensors = hidden_states, top_k_index, top_k_weights
            return experts_forward(self.experts, *tensors, division)

    EPImplementationInterface.register(IMPLEMENTATION, Float8EP)
