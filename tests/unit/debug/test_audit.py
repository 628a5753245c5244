"""An audit where there is nothing to record."""

import torch
import torch.distributed._symmetric_memory  # Registers ops; torch 2.11 imports it late.
from torch import nn

from fp8_dist.debug import comm_audit


def test_without_a_process_group_there_is_nothing_to_record() -> None:
    with comm_audit() as audit:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert audit.rows == []
    assert audit.table() == "no collectives"
    assert repr(audit) == "CommAudit(0 collectives, 0 bytes)"
