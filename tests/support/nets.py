"""Small models, ways to distribute them, and their parts on one rank; used by many tests."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from ranks import device_mesh
from reference import same_cast, weights_used
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8Tensor,
    cast_to_float8,
    convert_to_float8_training,
    float8_layers,
)
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)


class MLP(nn.Module):
    """SwiGLU with a bias on one column-parallel layer and on the row-parallel one."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GatedMLP(MLP):
    """An MLP without silu, whose last bit depends on the position of a value in a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


class Net(nn.Module):
    """A stack of residual MLPs; input and output are ``[batch, sequence, dim]``."""

    def __init__(self, dim: int = 64, hidden: int = 96, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(MLP(dim, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def net_plan(net: Net, sequence_parallel: bool) -> dict[str, Any]:
    """The float8 tensor-parallel plan of a Net."""
    layout: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {}
    for i, mlp in enumerate(net.layers):
        travels = mlp.w1.config.recipe.gather_scheme["input"] is not None  # type: ignore[union-attr]
        prepare: Any = PrepareFloat8ModuleInput if travels else PrepareModuleInput
        plan[f"layers.{i}"] = prepare(input_layouts=(layout,), desired_input_layouts=(Replicate(),))
        plan[f"layers.{i}.w1"] = Float8ColwiseParallel()
        plan[f"layers.{i}.w3"] = Float8ColwiseParallel()
        plan[f"layers.{i}.w2"] = Float8RowwiseParallel(output_layouts=layout)
    return plan


def sharded_net(mesh: DeviceMesh, config: Float8LinearConfig, **arguments: int) -> Net:
    """A float8 Net with TP over "tp", if that has several ranks, and FSDP2 over the other axes."""
    net = convert_to_float8_training(Net(**arguments), config=config)
    assert isinstance(net, Net)
    if mesh["tp"].size() > 1:
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    data = mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tp")]
    for module in (*net.layers, net):
        fully_shard(module, mesh=data)
    return net


@dataclass
class Distributed:
    """A float8 Net on a mesh of the given sizes, and its float8 twin on one device."""

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    config: Float8LinearConfig = field(default_factory=Float8LinearConfig)
    gather: bool = True
    shard: bool = True
    net_arguments: dict[str, Any] = field(default_factory=dict)
    fsdp_arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh: DeviceMesh = device_mesh(dp=self.dp, tp=self.tp)
        self.twin = Net(**self.net_arguments)
        convert_to_float8_training(self.twin, config=self.config)
        self.net = Net(**self.net_arguments)
        config = self.config
        if self.dp > 1 and self.gather:
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather="auto")
        convert_to_float8_training(self.net, config=config)
        if self.tp > 1:
            apply_tp_plan(self.net, self.mesh["tp"], net_plan(self.net, self.sequence_parallel))
        if self.shard:
            self.fully_shard(self.net, self.net.layers)

    def fully_shard(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Apply FSDP2 over dp to each part, and to the rest of the model."""
        if self.dp > 1:
            for module in (*parts, model):
                fully_shard(module, mesh=self.mesh["dp"], **self.fsdp_arguments)

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of an activation: rows over dp, and with SP positions over tp."""
        tensor = tensor.chunk(self.dp)[self.mesh.get_local_rank("dp")]
        if self.tp > 1 and self.sequence_parallel:
            tensor = tensor.chunk(self.tp, dim=1)[self.mesh.get_local_rank("tp")]
        return tensor.contiguous()

    def wrong_casts(self, forward: Callable[[], object]) -> list[str]:
        """The weights for which a forward does not use the casts of their current values."""
        masters = full_state(self.net)
        with weights_used(self.net) as used:
            forward()
        assert used.keys() == float8_layers(self.net).keys()
        return wrong_casts(used, masters, self.mesh["tp"])


def full_state(net: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict with full tensors."""
    return {name: full(tensor) for name, tensor in net.state_dict().items()}


def wrong_casts(
    used: dict[str, Float8Tensor],
    masters: dict[str, torch.Tensor],
    tp: DeviceMesh | None = None,
) -> list[str]:
    """The weights that differ from this rank's parts of the casts on one device.

    used: from `reference.weights_used`. masters: full weights, named as in a state_dict.
    """
    wrong = []
    for name, weight in used.items():
        master = masters[f"{name}.weight"]
        cast = cast_to_float8(master, CastConfig())
        assert isinstance(cast, Float8Tensor)
        if tp is not None:
            parts = cast.qdata.chunk(tp.size(), 1 if name.endswith(("wo", "w2")) else 0)
            cast = cast.rewrap(qdata=parts[tp.get_local_rank()])
        if not same_cast(weight, cast):
            wrong.append(f"{name}: {weight} instead of {cast}")
    return wrong


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; other tensors are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Block(nn.Module):
    """A module to compile, around a module whose inputs are prepared by a hook."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def blocks(world: Distributed) -> nn.Sequential:
    """The MLPs of a distributed Net, each in a block to compile."""
    return nn.Sequential(*(Block(layer) for layer in world.net.layers))
