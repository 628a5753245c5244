"""Row-parallel styles for the layers that write to a residual stream."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from fp8_dist.tensor_parallel.styles import Float8RowwiseParallel


class ResidualRowwiseParallel(RowwiseParallel):
    """torch's ``RowwiseParallel`` for a layer that writes to the residual stream.

    The output is a plain local tensor, which is the cheapest form, where the ranks share the
    sharded dim evenly. Otherwise it is a DTensor: a plain tensor doesn't know the lengths of the
    other ranks' shards, which later gathers need.

    Args:
        layouts: ``input_layouts`` and ``output_layouts``, as in torch's style.
    """

    def __init__(self, **layouts: Placement) -> None:
        super().__init__(**layouts, use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_local_if_even)
        return module


class Float8ResidualRowwiseParallel(ResidualRowwiseParallel, Float8RowwiseParallel):
    """``Float8RowwiseParallel`` with the output of :class:`ResidualRowwiseParallel`."""


class EmbeddingRowwiseParallel(ResidualRowwiseParallel):
    """:class:`ResidualRowwiseParallel` for the embedding, which starts the residual stream.

    The forward waits for its output: blocks that read it are often compiled one by one, and torch
    (2.13) loses the gradient of a tensor that is in flight when it enters a compiled graph
    (pytorch#191113).

    The gradient may have any placement. With fewer tokens than ranks, torch replicates the output
    of some norms (2.13: layer_norm; 2.15: rms_norm) and gives their gradient as a Partial, which it
    can't redistribute to the output of an embedding whose weight is sharded.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = outputs.redistribute(placements=output_layouts, async_op=False)
        # The output stays where it is; the gradient is redistributed.
        return outputs.redistribute(placements=output_layouts)


def _local_if_even(module: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
    """A forward hook: the form of the output that :class:`ResidualRowwiseParallel` describes."""
    (placement,), size = output.placements, output.device_mesh.size()
    if isinstance(placement, Shard) and output.shape[placement.dim] % size:
        # A shard that was padded for its reduction keeps the strides of the padded one, which its
        # DTensor does not state: compiled blocks would be compiled again for it, or fail on it.
        return output.clone()
    return output.to_local()
