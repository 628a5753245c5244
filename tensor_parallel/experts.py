"""Styles that divide experts: each rank gets whole experts, or a part of every expert."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from fp8_dist.moe.experts import experts_config, float8_experts, parts_of
from fp8_dist.tensor_parallel.styles import CheckedStyle
from fp8_dist.text import kind_of
from fp8_dist.weight.stored_weight import place_scales
from fp8_dist.weight.weights import attach_statistics, weights_of


class _ExpertsStyle(CheckedStyle):
    """Style for converted experts, whose weights get the placements of :meth:`placements`."""

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Return the placement of each weight, or nothing if the style can't divide the experts."""
        raise NotImplementedError

    def misfits(self, module: nn.Module, size: int) -> Iterator[str]:
        if converted_fqns := [fqn for fqn in float8_experts(module) if fqn]:
            yield (
                f"{type(self).__name__} is for experts, but {kind_of(module)} is a module "
                f"around them; apply the style to its {', '.join(converted_fqns)}"
            )
            return
        if (config := experts_config(module)) is None:
            yield (
                f"{type(self).__name__} is for experts, but {kind_of(module)} has none in "
                "float8; call convert_experts_to_float8_training first"
            )
            return
        fqn = next(iter(weights_of(module).values())).fqn or "the module"
        placements: Mapping[str, Any] = self.placements(module)
        if not placements:
            yield (
                f"{fqn}: the features of {kind_of(module)} can't be divided; use "
                "Float8ExpertParallel"
            )
        elif config.combine == "float8" and Shard(0) not in placements.values():
            yield (
                f"{fqn}: combine='float8' would cast the outputs before they are summed over "
                "ranks; use combine='high_precision'"
            )
        for name, placement in placements.items():
            dim = placement.dim
            count = module.get_parameter(name).shape[dim] // getattr(placement, "split_factor", 1)
            if count % size:
                yield (
                    f"{fqn}.{name}: {count} {'features' if dim else 'experts'} can't be divided "
                    f"equally between {size} ranks; choose a number of ranks that divides it"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        for name, placement in self.placements(module).items():
            whole = module.get_parameter(name)
            part = distribute_tensor(
                whole.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank
            )
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        for weight in weights_of(module).values():
            if (stored := weight.stored()) and not isinstance(stored.scales, DTensor):
                place_scales(weight, stored.scales)
        attach_statistics(weights_of(module).values())
        return module


class Float8ExpertParallel(_ExpertsStyle):
    """Style for converted experts: their parameters ``[E, ...]`` become ``Shard(0)``.

    Tokens travel to the ranks of their experts in float8, and the outputs come back
    (:class:`fp8_dist.moe.Float8ExpertsConfig`). The ranks of the mesh have different tokens.

    Collectives: when the style is applied, one all-reduce of 16 bytes, which ``comm_audit`` does
    not count, and a scatter of each parameter. In each step, per module: an all-to-all of 8 bytes
    per expert; all-to-alls of the tokens and of the outputs in the forward, and two in the
    backward.

    Raises:
        ValueError: on all ranks, if the module does not hold converted experts, their number is not
            a multiple of the mesh's size, or the ranks' configs differ.
    """

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}


class Float8ExpertTensorParallel(_ExpertsStyle):
    """Style for converted experts: ranks divide the hidden features of each expert.

    The first weight is column-parallel, the last row-parallel. In transformers' experts,
    ``gate_up_proj`` becomes ``_StridedShard(1, split_factor=2)``, so that each rank has parts of
    gate and of up. ``down_proj`` becomes ``Shard(2)``. All ranks have the same tokens and routing,
    and get the same output. With scales of blocks, no block may be split between ranks.

    The operands of all GEMMs have the bits of one device. The output, and the gradients of tokens
    and of routing weights, differ by the order of the sum over ranks, as in row-parallel layers.

    Collectives: when the style is applied, those of :class:`Float8ExpertParallel`. In each step,
    per module, all-reduces of the output, of the gradient of the tokens, and of the gradient of the
    routing weights, in high precision. For recipes with scales of rows, also all-reduces of 4 bytes
    per token and chosen expert: one in the forward and one in the backward, where
    ``rowwise_folded`` has two.

    Raises:
        ValueError: on all ranks, if the module does not hold converted experts, their features
            can't be divided equally, ``combine`` is ``"float8"``, or the ranks' configs differ.
    """

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return parts_of(module)
