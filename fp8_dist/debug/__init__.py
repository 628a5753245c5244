"""Seeing what happens: ``comm_audit`` records the collectives of eager code.

Above the layers, below FSDP2 and tensor parallelism. Nothing in the library depends on it.
"""

from fp8_dist.debug.audit import CommAudit, comm_audit
from fp8_dist.debug.table import CommRow

__all__ = ["CommAudit", "CommRow", "comm_audit"]
