"""A converted parameter reads like a plain one, even by code that reads memory directly."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experts import Experts, experts_config
from nets import sharded_net
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, reloaded, same_bits
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import to_dlpack
from torch.utils.tensorboard._convert_np import make_np

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
)
from fp8_dist.mesh import local_tensor
from fp8_dist.weight.known import KnownWeight

# Ways to read a tensor; each returns a plain tensor.
READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "numpy(force=True)": lambda t: torch.from_numpy(t.numpy(force=True)),
    "np.asarray": lambda t: torch.from_numpy(np.asarray(t)),
    "tensorboard": lambda t: torch.from_numpy(make_np(t)),
    "tolist": lambda t: torch.tensor(t.tolist()).view(t.shape),
    "torch.from_dlpack": torch.from_dlpack,
    "np.from_dlpack": lambda t: torch.from_numpy(np.from_dlpack(t)),
    "to_dlpack": lambda t: torch.from_dlpack(to_dlpack(t)),
    "storage": lambda t: torch.empty(0).set_(
        t.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    ),
    "torch.save": reloaded,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "copy": lambda t: copy.copy(t).numpy(),
    "deepcopy": lambda t: copy.deepcopy(t).numpy(),
    "safetensors": lambda t: load(save({"t": t.contiguous()}))["t"],
    "share_memory_": lambda t: t.clone().share_memory_().numpy(),
}
# Tensors that code gets from a local tensor.
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    ".data": lambda t: t.data,
    "clone": lambda t: t.clone(),
    "view": lambda t: t.view(-1),
    "slice": lambda t: t[1:, 2:],
    "mT": lambda t: t.mT,
    "cpu": lambda t: t.cpu(),
    "deepcopy": copy.deepcopy,
}


TURN = count()  # every third reader takes a turn at each source


def wrong_reads(local: Tensor) -> list[str]:
    """The reads of a local tensor, by source and reader, that do not give its values."""
    wrong = []
    for source, make in SOURCES.items():
        tensor = make(local.detach())
        expected = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        for reader, read in list(READS.items())[next(TURN) % 3 :: 3]:
            found = torch.as_tensor(read(tensor))
            if type(found) is not Tensor or not same_bits(found.contiguous(), expected):
                wrong.append(f"{reader} of {source}")
        if expected.numel() and tensor.data_ptr() != tensor.untyped_storage().data_ptr() + (
            tensor.storage_offset() * tensor.itemsize
        ):
            wrong.append(f"address of {source}")
        if torch.histc(tensor).tolist() != torch.histc(expected).tolist():
            wrong.append(f"histc of {source}")
    return wrong


def locals_of(model: nn.Module) -> dict[str, Tensor]:
    """The local tensors of the parameters, and the parameters as a whole."""
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[f"full_tensor of {name}"] = parameter.full_tensor()
            found[f"to_local of {name}"] = parameter.to_local()
        found[f"local of {name}"] = local_tensor(parameter)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("axes", "gather"),
    [
        ({"dp": 1, "tp": 1}, "auto"),
        ({"dp": 2, "tp": 1}, False),
        ({"dp": 1, "tp": 2}, False),
        ({"dp": 2, "tp": 2}, "auto"),
        ({"replicas": 2, "dp": 2, "tp": 1}, "auto"),
    ],
)
@on_ranks("axes", returns=[])
def test_reads(axes: dict[str, int], gather: Any) -> list[str]:
    """Of trained and frozen weights, before and after a step."""
    net = sharded_net(device_mesh(**axes), Float8LinearConfig(enable_fsdp_float8_all_gather=gather))
    net.layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.layers[0].parameters())
    attach_update(optimizer, net)
    wrong = []
    for when in ("before", "after"):
        wrong += [
            f"{read} of {name} {when} a step"
            for name, local in locals_of(net).items()
            if "w1" in name and ("layers.0" in name or when == "after")
            for read in wrong_reads(local)
        ]
        net(torch.randn(4, 4, 64)).sum().backward()
        optimizer.step()
    return wrong


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, returns=[])
def test_reads_of_experts_and_of_padded_shards() -> list[str]:
    model = nn.Sequential(
        Experts(3, 8, 16, experts_config(enable_fsdp_float8_all_gather=True)),
        convert_to_float8_training(
            nn.Linear(8, 5), config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        ),
    )
    for module in (*model, model):
        fully_shard(module, mesh=device_mesh(dp=2))
    model(torch.randn(4, 8)).sum().backward()
    return [
        f"{read} of {name}"
        for name, local in locals_of(model).items()
        if "bias" not in name
        for read in wrong_reads(local)
    ]


@on_ranks(2, returns=None)
def test_reads_of_what_requires_gradients_are_refused_as_of_plain_tensors() -> None:
    mesh, config = device_mesh(dp=2, tp=1), Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    weight = sharded_net(mesh, config).layers[0].w1.weight
    plain = torch.zeros(2, requires_grad=True)
    for tensor in (weight.to_local(), weight.full_tensor(), local_tensor(weight).requires_grad_()):
        for read in (lambda t: t.numpy(), np.asarray):
            assert raised(RuntimeError, lambda: read(tensor)) == raised(  # noqa: B023
                RuntimeError,
                lambda: read(plain),  # noqa: B023
            )
        assert reloaded(tensor).requires_grad
        assert tensor.tolist() == tensor.detach().tolist()


@pytest.mark.parametrize("copied", [copy.copy, lambda t: t.detach()])
def test_writes_to_a_shallow_copy_are_noticed(copied: Callable[[Tensor], Tensor]) -> None:
    weight: Any = nn.Parameter(KnownWeight(torch.ones(4, 4)))
    weight.detach().valid.fill_(3)
    twin = copied(weight)
    with torch.no_grad():
        twin.mul_(2)
    assert twin.data_ptr() == weight.data_ptr()
    assert int(weight.valid) < 0


def save_all(folders: list[Path]) -> None:
    """Save what programs usually save, in files in this rank's folder."""
    folder = folders[torch.distributed.get_rank()]
    net = sharded_net(
        device_mesh(dp=2, tp=1), Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    )
    optimizer = torch.optim.AdamW(net.parameters())
    attach_update(optimizer, net)
    net(torch.randn(4, 4, 64)).sum().backward()
    optimizer.step()
    weight = net.layers[0].w1.weight
    local = local_tensor(weight)
    local.label = "w1"
    values = {
        "parameter": weight,
        "parameters": dict(net.named_parameters()),
        "model": net.state_dict(),
        "model with variables": net.state_dict(keep_vars=True),
        "optimizer": optimizer.state_dict(),
        "to_local": weight.to_local(),
        "local parameter": nn.Parameter(local),
        "rows": local[:2],
        "list": [weight.data, weight.detach().to_local(), weight.full_tensor().clone()],
    }
    for name, value in values.items():
        torch.save(value, folder / name)


PROGRAM = """
import sys
sys.modules["fp8_dist"] = None  # not installed
from pathlib import Path
import torch, torch.distributed.tensor
for path in sorted(Path(sys.argv[1]).iterdir()):
    value = torch.load(path, weights_only=True)
    local = getattr(value, "_local_tensor", value)
    print(path.name, type(value).__name__, type(local).__name__, getattr(local, "label", ""))
"""


def test_what_was_saved_loads_where_the_library_is_not(ranks: RankPools, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    ranks(2).run(save_all, folders)
    loaded = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folders[0])], capture_output=True, text=True
    )
    assert loaded.stdout.splitlines() == [
        "list list list ",
        "local parameter Parameter Parameter ",
        "model OrderedDict OrderedDict ",
        "model with variables OrderedDict OrderedDict ",
        "optimizer dict dict ",
        "parameter DTensor Tensor w1",
        "parameters dict dict ",
        "rows Tensor Tensor ",
        "to_local Tensor Tensor ",
    ], loaded.stderr
