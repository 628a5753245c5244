"""Launches of Triton kernels on fake tensors: nothing runs, but dispatch modes see an operator.

``fake_cuda::triton_kernel(name, tensors)`` stands for one launch. Which tensors a kernel reads and
which it writes can't be told: those are written that nothing has written before.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
except ImportError:  # the library then has no Triton kernels either
    Autotuner = JITFunction = None


@torch.library.custom_op("fake_cuda::triton_kernel", mutates_args=())
def triton_kernel(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """A launch; see above."""


triton_kernel.register_fake(lambda name, tensors: None)


def intercept_launches() -> None:
    """Replaces what launches Triton kernels, and the driver that compilers ask, for good."""
    if JITFunction is not None:
        JITFunction.run = _run
        Autotuner.run = _run_any
        driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    given = (*args, *kwargs.values())
    tensors = [argument for argument in given if isinstance(argument, torch.Tensor)]
    torch.ops.fake_cuda.triton_kernel(self.__name__, tensors)


def _run_any(self: Any, *args: Any, **kwargs: Any) -> None:
    """An autotuned kernel, without its search: any configuration launches once."""
    self.fn.run(*args, **kwargs)
