"""Debugging tools: ``comm_audit`` records collectives, ``float8_stats`` measures casts.

``capture`` saves the tensors of casts to files.
"""

from fp8_dist.debug.audit import CommAudit, CommRow, comm_audit
from fp8_dist.debug.capturing import Capture, CapturedCast, capture, load_capture
from fp8_dist.debug.rows import (
    Anomaly,
    AnomalyLimits,
    CastStats,
    GemmStats,
    anomaly_dict,
    append_jsonl,
)
from fp8_dist.debug.statistics import Float8Stats, float8_stats

__all__ = [
    "Anomaly",
    "AnomalyLimits",
    "Capture",
    "CapturedCast",
    "CastStats",
    "CommAudit",
    "CommRow",
    "Float8Stats",
    "GemmStats",
    "anomaly_dict",
    "append_jsonl",
    "capture",
    "comm_audit",
    "float8_stats",
    "load_capture",
]
