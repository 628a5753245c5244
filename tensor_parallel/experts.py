"""Expert parallelism: each rank has an equal number of whole experts."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from fp8_dist.linear.agreement import check_placed
from fp8_dist.linear.weight import float8_modules, weights_of
from fp8_dist.moe.experts import experts_config, float8_experts
from fp8_dist.tensor_parallel.styles import CheckedStyle, described


class Float8ExpertParallel(CheckedStyle):
    """Style for converted experts: their parameters ``[E, ...]`` become ``Shard(0)``.

    Tokens travel to the ranks of their experts in float8, and the outputs come back
    (:class:`fp8_dist.moe.Float8ExpertsConfig`). The ranks of the mesh have different tokens.

    Collectives: one all-reduce of 16 bytes, which ``comm_audit`` does not count, and a scatter of
    each parameter. In a step, per module: an all-to-all of 8 bytes per expert; one of the tokens
    and one of the outputs in the forward; two more in the backward.

    Raises:
        ValueError: on all ranks, if the module is not one of converted experts, their number is not
            a multiple of the mesh's size, or the ranks' configs differ.
    """

    def misfits(self, module: nn.Module, size: int) -> Iterator[str]:
        if inside := [fqn for fqn in float8_experts(module) if fqn]:
            yield (
                f"Float8ExpertParallel is for experts, but a {type(module).__name__} is a module "
                f"around them; apply the style to its {', '.join(inside)}"
            )
            return
        if experts_config(module) is None:
            yield (
                f"Float8ExpertParallel is for experts, but a {type(module).__name__} has none in "
                "float8; call convert_experts_to_float8_training first"
            )
            return
        fqn = next(iter(weights_of(module).values())).fqn
        for name, parameter in module.named_parameters(recurse=False):
            experts = len(parameter)
            if experts % size:
                yield (
                    f"{fqn}.{name}: {experts} experts can't be divided equally between "
                    f"{size} ranks; choose a number of ranks that divides it"
                )

    def check(self, module: nn.Module, mesh: DeviceMesh) -> None:
        layers = float8_modules(module)
        check_placed(layers, mesh, "parallelize_module", {"the style": described(self)})
        for misfit in self.misfits(module, mesh.size()):
            raise ValueError(f"parallelize_module: {misfit}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        for name, whole in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(
                whole.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        return module
