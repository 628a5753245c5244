"""Siblings: layers that reduce the amaxes of their output gradients together.

See :mod:`fp8_dist.linear.gradient_amax`.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.linear.gradient_amax import Siblings
from fp8_dist.linear.module import Float8Linear


def make_siblings(module: nn.Module, names: Iterable[str]) -> None:
    """Make these layers of a module siblings. Call it before each forward.

    Layers in an FSDP2 unit inside the module are left out.
    """
    share_amaxes(list(_layers(module, names)))


def make_no_siblings(module: nn.Module, names: Iterable[str]) -> None:
    """Undo :func:`make_siblings`. Call it after each forward."""
    for layer in _layers(module, names):
        layer.siblings = None


def share_amaxes(layers: Sequence[Float8Linear]) -> None:
    """Make layers siblings until the next call, unless one of them is a unit of FSDP2."""
    # Siblings need the order of eager autograd. Compiled code has its own.
    alone = torch.compiler.is_compiling() or any(isinstance(m, FSDPModule) for m in layers)
    siblings = None if alone else Siblings(len(layers))
    for layer in layers:
        layer.siblings = siblings


def _layers(module: nn.Module, names: Iterable[str]) -> Iterator[Float8Linear]:
    for name in names:
        inner: nn.Module | None = module
        for part in name.split("."):
            # Other code may have wrapped or removed a layer.
            inner = None if inner is None else inner._modules.get(part)
            if isinstance(inner, FSDPModule):
                break
        else:
            if isinstance(inner, Float8Linear):
                yield inner
