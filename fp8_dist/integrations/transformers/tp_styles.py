"""Parallel styles for the blocks and the residual stream of a transformers model.

Without sequence parallelism, the stream between blocks is a plain tensor that is the same on all
ranks. With it, each rank has a part of the sequence (dim 1): a local tensor if the parts are even,
else a DTensor (``local_if_even``).
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from fp8_dist.mesh import as_dtensor
from fp8_dist.tensor_parallel import inputs, plans, styles

_SEQUENCE = (Shard(1),)


class SequenceEmbedding(plans.EmbeddingRowwiseParallel):
    """The style of a vocabulary-parallel embedding that starts a sequence-parallel stream.

    The output is a DTensor for any length of the sequence, because the model reads the length from
    the shape of the output, for masks and position ids.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallel.RowwiseParallel._apply(self, module, device_mesh)


class StreamInput(parallel.ParallelStyle):
    """The style of the first layer, whose first argument becomes a sequence-parallel stream.

    A plain tensor (``inputs_embeds`` from the user) is assumed to contain the full sequence.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _pass_first_argument_alone(module, partial(_split, device_mesh))
        return module


class StreamNorm(parallel.SequenceParallel):
    """The style of a norm that runs on the parts of a sequence-parallel stream.

    ``returned`` converts the output, a DTensor that is sharded along the sequence.
    """

    def __init__(self, returned: Callable[[DTensor], torch.Tensor]) -> None:
        super().__init__()
        self.returned = returned

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module, returned = super()._apply(module, device_mesh), self.returned

        def convert(module: nn.Module, args: Any, output: DTensor) -> torch.Tensor:
            # With fewer tokens than ranks, torch replicates the output of some norms.
            return returned(output.redistribute(placements=_SEQUENCE))

        module.register_forward_hook(convert)
        return module


class BlockInput(inputs.ModuleInput, styles.CheckedStyle):
    """``PrepareModuleInput`` for a module's first argument, given by position or by keyword.

    Args:
        parts: maps the name of each linear layer that reads the input to the number of parts (heads
            or features) in its output. Ranks must be able to share the parts evenly.
        may_change_output: whether the caller may change the output in place. Then the output of the
            module must be one tensor.
    """

    def __init__(
        self, *, parts: dict[str, int], may_change_output: bool = False, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.parts, self.may_change_output = parts, may_change_output

    def misfits(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from super().misfits(module, size)
        for layer, count in self.parts.items():
            if count % size:
                yield (
                    f"{layer!r} has {count} heads (or features), which {size} tensor-parallel "
                    "ranks cannot share evenly: use a tensor-parallel size that divides them"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _pass_first_argument_alone(module)
        if self.may_change_output:
            module.register_forward_hook(_no_view)
        return super()._apply(module, device_mesh)


class Float8BlockInput(BlockInput, styles.PrepareFloat8ModuleInput):
    """:class:`BlockInput` in float8: one cast and one gather for the layers that read it."""


class ReplicatedBlock(parallel.ParallelStyle):
    """The style of a block in a sequence-parallel stream that every rank computes in full.

    The first argument is gathered in high precision. Each rank keeps its part of the sequence from
    the (first) output. Gradients of the block's parameters are not reduced, because all ranks
    compute the same ones. An output of another shape with the same number of elements, such as
    ``[B * S, D]``, is viewed in the shape of the input.

    Collectives: an all-gather of the input; in the backward, an all-gather of the output's
    gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: torch.Tensor) -> torch.Tensor:
            return as_dtensor(x, device_mesh, _SEQUENCE).full_tensor()

        def keep_part(module: nn.Module, args: Any, output: Any) -> Any:
            first, *others = output if isinstance(output, tuple) else (output,)
            # Llama 4's experts return a list of tokens.
            part = _split(device_mesh, first.view(args[0].shape))
            return (part, *others) if isinstance(output, tuple) else part

        _pass_first_argument_alone(module, gather)
        module.register_forward_hook(keep_part)
        return module


def _split(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a stream. A plain tensor is the whole sequence."""
    stream = as_dtensor(x, mesh, (Replicate(),))
    return plans.local_if_even(stream.redistribute(placements=_SEQUENCE))


def _no_view(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Return an alias, because autograd forbids in-place changes of a view that a style returns."""
    return torch.ops.aten._unsafe_view.default(output, output.shape)


def _pass_first_argument_alone(
    module: nn.Module, change: Callable[[Any], Any] = lambda x: x
) -> None:
    """Apply ``change`` to the first argument; pass it by position, and the others by keyword."""
    names = list(inspect.signature(module.forward).parameters)

    def rearrange(module: nn.Module, args: Any, kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        return (change(arguments.pop(names[0])),), arguments

    module.register_forward_pre_hook(rearrange, with_kwargs=True)
