"""Tensor parallelism by hand: modules whose parameters and activations are plain local tensors."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import MLP, Net
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fp8_dist import Float8Linear, Float8LinearConfig, convert_to_float8_training
from fp8_dist.tensor_parallel import declare_placements, share_input


class LocalMLP(MLP):
    """An MLP whose column-parallel layers share one gather of their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = share_input(x, [self.w1, self.w3])  # type: ignore[list-item]
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def cut(layer: nn.Linear, whole: nn.Linear, tp: DeviceMesh, dim: int) -> None:
    """Give a layer this rank's shard of the parameters of another."""
    part, parts = tp.get_local_rank(), tp.size()
    layer.weight = nn.Parameter(whole.weight.detach().chunk(parts, dim)[part].clone())
    if whole.bias is not None:
        bias = whole.bias.detach()
        layer.bias = nn.Parameter((bias.chunk(parts)[part] if dim == 0 else bias).clone())


def local_net(
    tp: DeviceMesh, config: Float8LinearConfig, sequence_parallel: bool, **arguments: Any
) -> Net:
    """A float8 ``nets.Net`` of local tensors, sharded by hand over ``tp``, placements declared."""
    whole, net = Net(**arguments), Net(**arguments)
    net.layers = nn.ModuleList(
        LocalMLP(mlp.w1.in_features, mlp.w1.out_features) for mlp in whole.layers
    )
    for mlp, other in zip(net.layers, whole.layers, strict=True):
        for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            cut(getattr(mlp, name), getattr(other, name), tp, dim)
    convert_to_float8_training(net, config=config)
    declare(net.layers, tp, sequence_parallel)
    return net


def declare(mlps: Iterable[nn.Module], tp: DeviceMesh, sequence_parallel: bool) -> None:
    at = Shard(1) if sequence_parallel else Replicate()
    for mlp in mlps:
        for layer in (mlp.w1, mlp.w3):
            assert isinstance(layer, Float8Linear)
            declare_placements(layer, tp, weight=Shard(0), input=at, output=Shard(-1))
        assert isinstance(mlp.w2, Float8Linear)
        declare_placements(mlp.w2, tp, weight=Shard(1), input=Shard(-1), output=at)
