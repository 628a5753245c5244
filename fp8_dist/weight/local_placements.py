"""Declared placements of plain local tensors.

In hand-written tensor parallelism, parameters and activations are plain local tensors. A layer with
declared placements wraps them as DTensors in its forward, and then works like a layer with a
parallel style.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8_dist.mesh import Placements, as_dtensor, sharded_dim


class LocalPlacements(NamedTuple):
    """Declared placements of a weight and an input that are plain local tensors.

    (The layer's ``output_placements`` has the placement of the output.)
    """

    mesh: DeviceMesh  # 1-D
    weight: Placement  # Shard(0), Shard(1) or Replicate
    input: Placement  # Shard or Replicate

    def distributed(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Wrap the operands as DTensors, whose gradients have the declared placements."""
        # The bias of a column-parallel weight is sharded like the columns of the output.
        bias_at = Shard(0) if self.weight == Shard(0) else Replicate()
        return (
            as_dtensor(input, self.mesh, (self.input,)),
            as_dtensor(weight, self.mesh, (self.weight,)),
            None if bias is None else as_dtensor(bias, self.mesh, (bias_at,)),
        )

    def check(
        self, input: torch.Tensor, weight: torch.Tensor, output: Placements | None, fqn: str
    ) -> None:
        """Check operands against the declared placements.

        Raises:
            ValueError: the input's features don't fit, or the input or output lacks the declared
                dim.
        """
        for name, placement in ("input", self.input), *(("output", p) for p in output or ()):
            if isinstance(placement, Shard) and not -input.ndim <= placement.dim < input.ndim:
                raise ValueError(
                    f"{fqn}: the {name} was declared as {placement!r}, but it has {input.ndim} "
                    "dims; declare one of these in declare_placements"
                )
        features, last = weight.shape[1], input.ndim - 1
        if self.weight == Shard(1):
            features *= self.mesh.size()
        is_local = input.ndim > 0 and not isinstance(input, DTensor)
        if is_local and sharded_dim(self.input, input.ndim) == last:
            features //= self.mesh.size()
        if input.ndim == 0 or input.shape[-1] != features:
            raise ValueError(
                f"{fqn}: the last dim of the input must be {features}, for a weight of "
                f"{tuple(weight.shape)} declared as {self.weight!r} and an input declared as "
                f"{self.input!r} on {self.mesh.size()} ranks; got an input of shape "
                f"{tuple(input.shape)}"
            )
