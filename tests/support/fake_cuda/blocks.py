"""Blocks of Llama 8B under FSDP2, to be run in a process of fake CUDA devices."""

import dataclasses
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import FakeCudaMode, fake_tensors
from fake_cuda.inductor import compiled_code_is_counted
from fake_cuda.world import RANKS, meshes
from fp8_dist import float8_layers
from scripts.common.llama import MODELS, Block, rope_tables
from scripts.common.models import after_step, convert
from scripts.common.recipes import BF16

SEQUENCE = 16  # tokens, for cases where their number does not matter


class Blocks(nn.Module):
    """Transformer blocks, without embedding and head."""

    def __init__(self, blocks: int, sequence: int) -> None:
        super().__init__()
        config = dataclasses.replace(MODELS["8b"], max_seq_len=sequence)
        self.layers = nn.ModuleList(Block(config) for _ in range(blocks))
        self.cos, self.sin = rope_tables(config, torch.device("cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos=self.cos, sin=self.sin)
        return x


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, enable_gqa: bool
) -> torch.Tensor:
    """The attention kernel that torch chooses on a GPU. (A CPU build chooses another.)"""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def count_blocks(name: str, blocks: int, sequence: int) -> Counts:
    """Count forward and backward of a candidate's third step.

    (The second step, the first after an update, also copies tables of addresses to the device.)
    Each of `RANKS` ranks has one sequence, and FSDP2 shards over all ranks.
    """
    mesh = meshes(dp=RANKS)["dp"]
    with fake_tensors(), patch.object(F, "scaled_dot_product_attention", flash_attention):
        model = _sharded(name, blocks, sequence, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        size = (1, sequence, MODELS["8b"].dim)
        x = torch.empty(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            with KernelCounter() as counter:
                model(x).backward(x.detach())
            optimizer.step()
            optimizer.zero_grad()
            after_step(name, sharded=True)(model)
    return counter.counts


def count_compiled_block(name: str, sequence: int) -> Counts:
    """Count a step of one block, compiled by Inductor, on one device, after a change of weights."""
    torch._dynamo.reset()
    mode, counter = FakeCudaMode(), KernelCounter()
    size, dtype = (1, sequence, MODELS["8b"].dim), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode, torch.device("cuda"):
            model = Blocks(1, sequence)
            x, grad = torch.empty(size, requires_grad=True), torch.empty(size)
    finally:
        torch.set_default_dtype(dtype)
    if name != BF16:
        convert(name, model, shard=False)
    with mode:
        _load_histories(model)
    compiled = torch.compile(model, fullgraph=True)
    with (
        patch.object(F, "scaled_dot_product_attention", flash_attention),
        compiled_code_is_counted(mode, counter),
    ):
        compiled(x).backward(grad)
        with fake_tensors(mode), torch.no_grad():
            for layer in float8_layers(model).values():
                layer.weight.add_(0)
        counter.counts = Counts()
        compiled(x).backward(grad)
    return counter.counts


def count_update(name: str, blocks: int) -> Counts:
    """Count the update of the scales of some blocks after the second optimizer step."""
    mesh = meshes(dp=RANKS)["dp"]
    with fake_tensors(), patch.object(F, "scaled_dot_product_attention", flash_attention):
        model = _sharded(name, blocks, SEQUENCE, mesh)
        with torch.no_grad():  # initializes FSDP2
            size = (1, SEQUENCE, MODELS["8b"].dim)
            model(torch.empty(size, device="cuda", dtype=torch.bfloat16))
        for _ in range(2):
            with KernelCounter() as counter:
                after_step(name, sharded=True)(model)
    return counter.counts


def _sharded(name: str, blocks: int, sequence: int, mesh: DeviceMesh) -> Blocks:
    """A candidate's blocks under FSDP2. Histories of delayed scales are filled."""
    with torch.device("cuda"):
        model = Blocks(blocks, sequence)
    convert(name, model, shard=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    _load_histories(model)
    return model


def _load_histories(model: nn.Module) -> None:
    for layer in float8_layers(model).values():
        for history in layer.histories.values():
            history.load(torch.ones(1, device="cuda"))
