"""Launches of Triton kernels on fake tensors: nothing runs, but dispatch modes see an operator.

``fake_cuda::triton_kernel(name, tensors)`` represents one launch. Its tensors are the arguments of
the kernel, and tensors whose addresses were taken since the last launch, because a kernel may get a
table of addresses. It is unknown which of them the kernel reads and which it writes.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
except ImportError:  # the library then has no Triton kernels either
    JITFunction = None

_addressed: list[ReferenceType[torch.Tensor]] = []
_real_data_ptr = torch.Tensor.data_ptr
_real_run = None if JITFunction is None else JITFunction.run


@torch.library.custom_op("fake_cuda::triton_kernel", mutates_args=())
def triton_kernel(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Represent a launch, as described at the top of the file."""


triton_kernel.register_fake(lambda name, tensors: None)


def intercept_launches() -> None:
    """Permanently replace the launches of Triton kernels, and the driver that compilers use."""
    torch.Tensor.data_ptr = _data_ptr  # type: ignore[method-assign]
    if JITFunction is not None:
        JITFunction.run = _run
        driver.set_active(_Driver())


def forget_addresses() -> None:
    """Forget addresses that were taken, so that the next launch does not count their tensors."""
    _addressed.clear()


def launch_nothing() -> None:
    """Undo :func:`intercept_launches`, and let Triton launch on a driver that does nothing.

    Launches are then not seen by dispatch modes, and addresses are real.
    """
    torch.Tensor.data_ptr = _real_data_ptr  # type: ignore[method-assign]
    if JITFunction is not None:
        JITFunction.run = _real_run
        driver.set_active(_IdleDriver())


class _Driver(SimpleNamespace):
    """The part of Triton's driver that is used if launches are intercepted."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        return 0


class _IdleDriver(_Driver):
    """A Triton driver whose kernels do nothing."""

    def __init__(self) -> None:
        super().__init__(launcher_cls=_IdleLauncher, utils=self)
        self.get_device_interface = lambda: torch.cuda

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024  # module, function, registers, spills, threads


class _IdleLauncher:
    def __init__(self, *args: Any) -> None: ...

    def __call__(self, *args: Any) -> None: ...


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    given = tree_leaves([*args, *kwargs.values()])
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    addressed = [tensor for reference in _addressed if (tensor := reference()) is not None]
    _addressed.clear()
    tensors += [t for t in addressed if t.untyped_storage()._cdata not in storages]
    torch.ops.fake_cuda.triton_kernel(self.__name__, tensors)


def _data_ptr(self: torch.Tensor) -> int:
    """An address, which is made up for fake tensors."""
    if not isinstance(self, FakeTensor):
        return _real_data_ptr(self)
    _addressed.append(ref(self))
    return self.untyped_storage()._cdata * 512 + self.storage_offset() * self.itemsize
