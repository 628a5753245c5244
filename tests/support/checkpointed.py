"""Models whose layers are checkpointed fully, selectively, or not at all."""

from functools import partial

import torch
from nets import Net
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8_dist import selective_checkpoint_policy

SELECTIVE = {
    "context_fn": partial(create_selective_checkpoint_contexts, selective_checkpoint_policy)
}


def forward(net: Net, x: torch.Tensor, mode: str) -> torch.Tensor:
    for layer in net.layers:
        if mode == "none":
            x = x + layer(x)
        else:
            arguments = SELECTIVE if mode == "selective" else {}
            x = x + checkpoint(layer, x, use_reentrant=False, **arguments)
    return x


class Checkpointed(nn.Module):
    """A module for FSDP2 to shard, with a checkpointed layer inside, as in torchtitan."""

    def __init__(self, layer: nn.Module, mode: str) -> None:
        super().__init__()
        self.layers, self.mode = nn.ModuleList([layer]), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x, self.mode)  # type: ignore[arg-type]
