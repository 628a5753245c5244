"""Durations on GPUs, as far as a CPU can tell: from events as torch's profiler makes them."""

from torch.autograd.profiler_util import FunctionEvent

from fp8_dist.debug.communication.timing import _seconds_of_kernels


def event(name: str, inside: FunctionEvent | None = None) -> FunctionEvent:
    made = FunctionEvent(id=0, name=name, thread=1, start_us=0, end_us=10)
    if inside is not None:
        inside.append_cpu_child(made)
    return made


def test_the_kernels_of_nccl_that_a_call_launched_are_its_time() -> None:
    mark = event("comm_audit: collective 0")
    op = event("nccl:_all_gather_base", event("c10d::_allgather_base_", mark))
    op.append_kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 300)
    op.append_kernel("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 200)
    op.append_kernel("nccl:_all_gather_base", 0, 510)  # the range around them
    op.append_kernel("void at::native::elementwise_kernel<128, 4>(int)", 0, 7)
    assert _seconds_of_kernels(mark) == 500e-6
    mark = event("comm_audit: collective 1")
    op = event("symm_mem::one_shot_all_reduce", mark)
    op.append_kernel("void one_shot_all_reduce_kernel<float>(int)", 0, 300)
    assert _seconds_of_kernels(mark) is None  # no kernels of NCCL
