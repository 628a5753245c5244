"""An audit where there is nothing to record, sums of its rows, and durations on GPUs."""

from dataclasses import replace

import torch
import torch.distributed._symmetric_memory  # Registers ops; torch 2.11 imports it late.
from torch import nn
from torch.autograd.profiler_util import FunctionEvent

from fp8_dist.debug import CommRow, comm_audit
from fp8_dist.debug.audit import CommTable
from fp8_dist.debug.collectives import _seconds_of_kernels


def test_a_sum_of_times_is_known_where_all_of_them_are() -> None:
    row = CommRow("all_reduce", "dp", torch.float32, "", False, 1, 2, 8, seconds=1.5)
    found = [CommTable([row, replace(row, seconds=other)]).rows[0] for other in (2.0, None)]
    assert [(each.count, each.bytes, each.seconds) for each in found] == [
        (2, 16, 3.5),
        (2, 16, None),
    ]


def test_without_a_process_group_there_is_nothing_to_record() -> None:
    with comm_audit() as audit:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert audit.rows == []
    assert audit.table() == "no collectives"
    assert repr(audit) == "CommAudit(0 collectives, 0 bytes)"


def event(name: str, inside: FunctionEvent | None = None) -> FunctionEvent:
    """As torch's profiler makes them."""
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
