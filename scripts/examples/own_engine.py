"""A stand-in for your own inference engine and for the transport to it, without fp8_dist."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from own_model import Model

# The layers of a block that are served in float8: column-parallel and row-parallel in the trainer.
COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "up"), ("attention.o", "down")


class ServedLinear(nn.Module):
    """A linear layer with blockwise scales: 1 x 128 values of its input, 128 x 128 of its weight.

    ``terms``: the number of partial products to sum, as over the ranks of a row-parallel layer.
    """

    def __init__(self, linear: nn.Linear, terms: int) -> None:
        super().__init__()
        self.weight, self.scale_inv = torch.empty(0), torch.empty(0)
        self.bias, self.terms = linear.bias, terms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, 128))
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 448)
        scale = torch.exp2((exponent - (mantissa == 0.5).int()).float())
        x = ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).flatten(-2)
        wide = self.scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = self.weight.double() * wide[: self.weight.shape[0], : self.weight.shape[1]]
        terms = zip(x.chunk(self.terms, -1), weight.chunk(self.terms, -1), strict=True)
        output = torch.stack([(x @ weight.t()).float() for x, weight in terms]).sum(0)
        return output if self.bias is None else output + self.bias


class Engine(Model):
    """The model with served layers, which sum in the same way as the trainer's ``tp`` ranks."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        for block in self.blocks:
            for name in (*COLUMNS, *ROWS):
                terms = tp if name in ROWS else 1
                block.set_submodule(name, ServedLinear(block.get_submodule(name), terms))

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor, *scale_inv: torch.Tensor) -> None:
        """Load a tensor from the trainer."""
        if scale_inv:
            layer = self.get_submodule(name.removesuffix(".weight"))
            layer.weight, (layer.scale_inv,) = tensor, scale_inv
        else:
            self.get_parameter(name).copy_(tensor)


def send(name: str | None, tensors: list[torch.Tensor | None], group: dist.ProcessGroup) -> int:
    """Broadcast tensors from rank 0, and return their size in bytes; the name None is the end."""
    sent = [tensor.contiguous() for tensor in tensors if tensor is not None]
    dist.broadcast_object_list([name, [(tensor.shape, tensor.dtype) for tensor in sent]], 0, group)
    for tensor in sent:
        dist.broadcast(tensor.view(torch.uint8), 0, group)
    return sum(tensor.nbytes for tensor in sent)


def received(group: dist.ProcessGroup, device: str) -> tuple[str | None, list[torch.Tensor]]:
    """Receive the name and tensors that :func:`send` broadcasts."""
    header: list[Any] = [None, None]
    dist.broadcast_object_list(header, 0, group)
    name, kinds = header
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    for tensor in tensors:
        dist.broadcast(tensor.view(torch.uint8), 0, group)
    return name, tensors
