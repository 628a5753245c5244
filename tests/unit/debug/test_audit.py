"""An audit where there is nothing to record, and sums of its rows."""

from dataclasses import replace

import torch
import torch.distributed._symmetric_memory  # Registers ops; torch 2.11 imports it late.
from torch import nn

from fp8_dist.debug import CommRow, comm_audit
from fp8_dist.debug.communication.table import CommTable


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
