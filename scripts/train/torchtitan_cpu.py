"""torchtitan 0.3 on CPU ranks: ``torchrun -m scripts.train.torchtitan_cpu --config NAME ...``.

torchtitan expects GPUs. This script gives it a device module for CPUs, works around features that
gloo and torch 2.13 lack, and trains the debug model on bytes of Python source instead of tokens. At
the end rank 0 prints the collectives of the last step. For the required packages see
docs/torchtitan.md.
"""

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils

VOCABULARY, STEPS = 2048, 6


def cpu_device_module() -> Any:
    """torch.cpu with the functions that torchtitan calls on a device module."""
    module = types.ModuleType("cpu_device")
    memory = types.SimpleNamespace(total_memory=2**34)
    for name, result in {
        "current_device": 0,
        "device_count": 8,
        "empty_cache": None,
        "get_device_name": "CPU",
        "get_device_properties": memory,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "set_device": None,
        "synchronize": None,
    }.items():
        setattr(module, name, functools.partial(lambda result, *args, **kwargs: result, result))
    module.__getattr__ = functools.partial(getattr, torch.cpu)  # type: ignore[method-assign]
    return module


# Before torchtitan's other modules import these names.
titan_utils.device_type, titan_utils.device_module = "cpu", cpu_device_module()
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda *args, **kwargs: None  # type: ignore[attr-defined]

import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402
import torchtitan.train  # noqa: E402
import torchtitan.trainer as titan_trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402
from torchtitan.models.qwen3 import config_registry as qwen3_registry  # noqa: E402

from fp8_dist.debug import comm_audit  # noqa: E402
from fp8_dist.integrations.torchtitan import config_registry as float8_registry  # noqa: E402
from fp8_dist.integrations.torchtitan import with_float8  # noqa: E402
from scripts.common.gloo import leave, use_one_thread_per_group  # noqa: E402


class Bytes(BaseDataLoader):
    """Random pieces of a text, which depend on the data-parallel rank and the step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any
    ) -> None:
        self.rank, self.length, self.batch = dp_rank, seq_len, local_batch_size
        with open(os.__file__, "rb") as file:
            self.text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()

    def __iter__(self) -> Iterator[Any]:
        for step in range(10**6):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            last = len(self.text) - self.length - 1
            starts = torch.randint(0, last, (self.batch,), generator=generator).tolist()
            pieces = torch.stack([self.text[i : i + self.length + 1] for i in starts])
            positions = torch.arange(self.length).repeat(self.batch, 1)
            inputs = {"input": pieces[:, :-1].contiguous(), "positions": positions}
            yield inputs, pieces[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """A placeholder: the dataloader yields bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        self.eos_id = 0

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def on_cpu(config: Any) -> Any:
    """Change a trainer's config to small sizes, and to nothing that needs files or a GPU."""
    attentions = list(config.model_spec.model.traverse(FlexAttention.Config))
    for _, _, parent, name in attentions:
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.dataloader, config.tokenizer = Bytes.Config(), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len = 4, 64
    config.training.steps, config.training.disable_cuda_graphs = STEPS, True
    config.validator.enable = config.checkpoint.enable = False
    config.activation_checkpoint = None
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.debug.seed, config.dump_folder = 0, "runs/torchtitan"
    return config


def llama3_debugmodel_encoded() -> Any:
    """The debug Llama that also sends gradients and sums of tensor parallelism in float8."""
    config = config_registry.llama3_debugmodel()
    encoded = {"gradient_transport": "float8", "reduce_transport": "float8"}
    return on_cpu(with_float8(config, "tensorwise", **encoded))


def qwen3_moe_debug_float8() -> Any:
    """A small mixture of experts, with experts and linear layers in float8."""
    config = qwen3_registry.qwen3_moe_debug()
    config.model_spec.model.layers[2:] = []
    return with_float8(on_cpu(config), "rowwise_folded", experts_recipe="rowwise_folded")


def __getattr__(name: str) -> Callable[[], Any]:
    """Look up configs of torchtitan and of fp8_dist's plug-in by their names."""
    registry = config_registry if hasattr(config_registry, name) else float8_registry
    make = getattr(registry, name)
    return lambda: on_cpu(make())


def audited(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a train step to audit the last one and print the table on rank 0."""

    def step(self: Any, batches: Any) -> Any:
        if self.step < STEPS:
            return train_step(self, batches)
        with comm_audit() as audit:
            result = train_step(self, batches)
        if dist.get_rank() == 0:
            print(audit.without_modules().table(), flush=True)
        return result

    return step


def summed(disable_division: Callable[..., None]) -> Callable[..., None]:
    """Make FSDP2 reduce gradients with SUM as well, because gloo has no PREMUL_SUM."""

    def disable(model: torch.nn.Module) -> None:
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    return disable


if __name__ == "__main__":
    use_one_thread_per_group()
    titan_fsdp.disable_fsdp_gradient_division = summed(titan_fsdp.disable_fsdp_gradient_division)
    titan_trainer.Trainer.train_step = audited(titan_trainer.Trainer.train_step)
    sys.argv[1:1] = ["--module", "scripts.train.torchtitan_cpu"]
    torchtitan.train.main()
    leave()
