"""Debugging tools: ``comm_audit`` records collectives, ``float8_stats`` measures casts.

``record`` keeps the last steps' casts, and writes them when something goes wrong.
"""

from fp8_dist.debug.audit import CommAudit, CommRow, comm_audit
from fp8_dist.debug.recording import Recorder, record
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
    "CastStats",
    "CommAudit",
    "CommRow",
    "Float8Stats",
    "GemmStats",
    "Recorder",
    "anomaly_dict",
    "append_jsonl",
    "comm_audit",
    "float8_stats",
    "record",
]
