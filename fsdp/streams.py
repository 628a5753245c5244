"""Events that gathers on other streams wait for."""

from collections.abc import Iterable

import torch

from fp8_dist.linear.module import Float8Linear
from fp8_dist.mesh import Layout


def note_made(layers: Iterable[Float8Linear]) -> None:
    """Let later gathers of these weights wait for their scales and casts on this stream.

    FSDP2 gathers on streams of its own.
    """
    weights = [layer.float8_weight for layer in layers if device_of(layer).type == "cuda"]
    if weights:
        event = torch.cuda.current_stream().record_event()
        for weight in weights:
            weight.made = event


def device_of(layer: Float8Linear) -> torch.device:
    """Return the device on which the scales of a weight are used, also with CPU offload."""
    shard, layout = layer.float8_weight.shard(), Layout.of(layer.weight)
    offloaded = layout is not None and layout.mesh.device_type != shard.device.type
    return torch.device(layout.mesh.device_type) if layout and offloaded else shard.device
