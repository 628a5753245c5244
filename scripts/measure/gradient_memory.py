"""What gradients on the wire take: buffers of a reduction, and the errors that are kept."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from fp8_dist.fsdp import set_gradient_transport
from fp8_dist.fsdp.gradient_transport import Transport, gradient_errors
from fp8_dist.torch_internals import (
    fsdp_groups_of_module,
    fsdp_padded_sizes,
    fsdp_parameters_of_group,
    fsdp_reduce_scatter_group,
    fsdp_reduction,
)
from scripts.common.candidates import BF16
from scripts.common.llama import LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import build
from scripts.common.report import Check
from scripts.common.saved_bytes import bytes_of

FP32 = "fp32"
# A transport, and whether with error feedback.
WAYS: dict[str, tuple[Transport | None, bool]] = {
    FP32: (None, False),
    "bf16": ("bf16", False),
    "float8": ("float8", False),
    "float8, error feedback": ("float8", True),
}
MOST_KEPT = 1.01  # bytes of errors per element


class Taken(NamedTuple):
    """What the gradients of one block take on a rank, beside FSDP2's own buffers of fp32."""

    elements: int  # unsharded, of the parameters with 2 dims or more
    buffers: int  # bytes: the most that a reduction has allocated at one time
    kept: int  # bytes from one step to the next


def of_gradients(config: LlamaConfig) -> dict[str, Taken]:
    """What each of `WAYS` takes; called on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, (transport, error_feedback) in WAYS.items():
        block = build(BF16, config, mesh).layers[0]
        set_gradient_transport(block, transport, error_feedback=error_feedback)
        (group,) = fsdp_groups_of_module(block)
        reduce = reduction_of(group)
        reduce()
        elements = sum(p.numel() for p in fsdp_parameters_of_group(group) if p.ndim > 1)
        kept = bytes_of(gradient_errors(block).values())
        found[name] = Taken(elements, peak_bytes(reduce), kept)
    return found


def reduction_of(group: Any) -> Callable[[], None]:
    """The reduction of a parameter group's gradients, of random ones."""
    ranks, comm = fsdp_reduce_scatter_group(group), fsdp_reduction(group)
    shard = torch.empty(sum(fsdp_padded_sizes(group)))
    gradients = torch.randn(ranks.size() * len(shard))
    if comm is None:
        return partial(dist.reduce_scatter_tensor, shard, gradients, group=ranks)
    every = range(len(fsdp_padded_sizes(group)))

    def reduce() -> None:
        comm.note(every)
        comm(shard, gradients, ranks, dist.ReduceOp.SUM)

    return reduce


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes of tensors on the CPU that a function has allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def gradients_table(taken: Mapping[str, Taken]) -> str:
    """A line per way."""
    lines = [
        [
            name,
            f"{each.buffers:,}",
            f"{each.buffers / each.elements:.3f}",
            f"{each.kept:,}",
            f"{each.kept / each.elements:.3f}",
        ]
        for name, each in taken.items()
    ]
    head = ["gradients", "buffers, B", "per element", "kept, B", "per element"]
    return table(head, lines, "lr")


def checks_of_gradients(taken: Mapping[str, Taken]) -> list[Check]:
    """What `--assert` asks of what is kept."""
    found = []
    for name, each in taken.items():
        share = each.kept / each.elements
        most = MOST_KEPT if WAYS[name][1] else 0
        sentence = f"{name}: {share:.3f} bytes per element of gradients are kept, at most {most}"
        found.append(Check(sentence, share <= most))
    return found
