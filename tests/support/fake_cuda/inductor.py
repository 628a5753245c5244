"""Run the wrapper code of Inductor on the fake CUDA device, without its kernels.

Inductor generates the same code as for a GPU. Of that code only the Python wrapper runs, which
allocates buffers, and calls kernels, GEMMs and custom operators in order.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import extern_kernels

from fake_cuda.counter import KernelCounter
from fake_cuda.device import FakeCudaMode, fake_tensors

Call = Callable[[list[Any]], Any]


@contextmanager
def compiled_code_is_counted(mode: FakeCudaMode, counter: KernelCounter) -> Iterator[None]:
    """Make graphs that Inductor compiles in the block run on a mode's tensors, and count them.

    Eager code between graphs is not counted.
    """

    def counted(code: str) -> Call:
        call = _wrapper_on_fake_tensors(code)

        def run(args: list[Any]) -> Any:
            with fake_tensors(mode), counter:
                return call(args)

        return run

    with inductor_for_the_device(counted, _kernel):
        yield


@contextmanager
def compiled_code_launches_nothing() -> Iterator[None]:
    """Make graphs that Inductor compiles in the block run on tensors of ``kernels.cpp``.

    These have no memory.
    """

    def wrapper(code: str) -> Call:
        names = executed(code)
        names["empty_strided_cuda"] = _empty_strided
        call: Call = names["call"]
        return call

    kernel = SimpleNamespace(run=lambda *args, **kwargs: None)
    with inductor_for_the_device(wrapper, lambda *args, **kwargs: kernel):
        yield


@contextmanager
def inductor_for_the_device(
    wrapper: Callable[[str], Call], kernel: Callable[..., Any]
) -> Iterator[None]:
    """Make Inductor compile for the fake device.

    Args:
        wrapper: makes the function that runs a graph from the generated code.
        kernel: the replacement of ``AsyncCompile.triton``.
    """

    def compile_to_module(self: GraphLowering) -> Any:
        code, _ = self.codegen()
        return SimpleNamespace(call=wrapper(code.value), __file__="", key="", runner=None)

    options = {"fx_graph_cache": False, "compile_threads": 1}
    options |= {"shape_padding": False}  # it would run on the device
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(torch._inductor.config.patch(options))
        enter(torch._functorch.config.patch(enable_autograd_cache=False))
        enter(patch.object(GraphLowering, "compile_to_module", compile_to_module))
        # Leave out patterns of attention and dropout, which are traced on real CUDA tensors.
        enter(patch.object(joint_graph, "lazy_init", lambda *args: None))
        enter(patch.object(post_grad, "lazy_init", lambda *args: None))
        # Replace the part of this pass that would compute constants on the device.
        folded = "constant_fold_uniform_value"
        enter(patch.object(joint_graph, folded, joint_graph.remove_redundant_views))
        raw_stream = "_cuda_getCurrentRawStream"
        enter(patch.object(torch._C, raw_stream, lambda device: 0, create=True))
        enter(patch.object(AsyncCompile, "triton", kernel))
        enter(patch.object(AsyncCompile, "wait", lambda self, names: None))
        yield


class _Kernel:
    """A Triton kernel of Inductor; `run` launches it."""

    def __init__(self, name: str, source: str) -> None:
        self._name = name
        signature = re.search(rf"def {name}\((.*?)\)", source, re.DOTALL)
        assert signature is not None
        self._parameters = [p.partition(":")[0].strip() for p in signature[1].split(",")]

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []
        for name, argument in zip(self._parameters, args, strict=False):
            if isinstance(argument, torch.Tensor):
                tensors += [argument] * (2 if name.startswith("in_out") else 1)
        torch.ops.fake_cuda.triton_kernel(self._name, tensors)


def _kernel(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> _Kernel:
    return _Kernel(name, source)


class _ExternKernels:
    """torch's GEMMs without ``out``, because some can't write to a fake tensor."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(extern_kernels, name)
        return lambda *args, out=None, **kwargs: kernel(*args, **kwargs)


def executed(code: str) -> dict[str, Any]:
    """Execute generated code, and return the names that it defines."""
    names: dict[str, Any] = {"__name__": "generated"}
    exec(compile(code, "<Inductor>", "exec"), names)
    return names


def _wrapper_on_fake_tensors(code: str) -> Call:
    names = executed(code)
    names["extern_kernels"] = _ExternKernels()
    names["empty_strided_cuda"] = _empty_strided
    names["reinterpret_tensor"] = _reinterpreted
    names["copy_if_misaligned"] = lambda tensor: tensor
    names["assert_size_stride"] = names["assert_alignment"] = lambda *args: None
    call: Call = names["call"]
    return call


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
