"""The counter itself: what launches kernels, and what makes the host wait."""

from collections.abc import Callable

import torch
from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import fake_tensors
from fake_cuda.process import FakeCudaProcess

E4M3 = torch.float8_e4m3fn


def counted(run: Callable[[torch.Tensor], object], *size: int) -> Counts:
    """Count what a function of a bf16 tensor does, in the process with the device."""
    with fake_tensors():
        x = torch.empty(size, device="cuda", dtype=torch.bfloat16)
        with KernelCounter() as counter:
            run(x)
    return counter.counts


def waits(x: torch.Tensor) -> None:
    x.sum().item()
    x.cpu()
    x.to("cpu", non_blocking=True)
    torch.tensor([1.0, 2.0], device="cuda")


def test_what_the_host_waits_for(fake_cuda: FakeCudaProcess) -> None:
    assert fake_cuda.run(counted, waits, 64, 64).syncs == [
        "_local_scalar_dense",
        "_to_copy from cuda to cpu",
        "_to_copy from cpu to cuda",
    ]


def wrong_gemms(x: torch.Tensor) -> None:
    q, one = x.to(E4M3), torch.ones((), device="cuda")
    a, b = q[:32], q[:48]
    bf16 = torch.bfloat16
    torch._scaled_mm(a, b.t(), one, one, out_dtype=bf16)  # as it must be
    shifted = q.view(-1)[8 : 8 + a.numel()].view(a.shape)
    torch._scaled_mm(shifted, b.t(), one, one, out_dtype=bf16)
    rows, columns = torch.ones(32, 1, device="cuda"), torch.ones(1, 48, device="cuda")
    torch._scaled_mm(a, b.t(), rows, columns, out_dtype=bf16)  # as it must be
    e5m2 = b.view(torch.float8_e5m2)
    torch._scaled_mm(a, e5m2.t(), rows, columns, out_dtype=bf16)


def test_operands_that_a_gemm_refuses(fake_cuda: FakeCudaProcess) -> None:
    assert fake_cuda.run(counted, wrong_gemms, 64, 64).problems == [
        "a begins 8 bytes into its memory",
        "rowwise scales with b in torch.float8_e5m2",
    ]
