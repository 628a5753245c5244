"""Seeing what happens: ``comm_audit`` records collectives, ``float8_stats`` what casts do.

Above the layers, below FSDP2 and tensor parallelism. Nothing in the library depends on it.
"""

from fp8_dist.debug.anomalies import Anomaly, AnomalyLimits, anomaly_dict
from fp8_dist.debug.audit import CommAudit, comm_audit
from fp8_dist.debug.stat_rows import CastStats, GemmStats, append_jsonl
from fp8_dist.debug.stats import Float8Stats, float8_stats
from fp8_dist.debug.table import CommRow

__all__ = [
    "Anomaly",
    "AnomalyLimits",
    "CastStats",
    "CommAudit",
    "CommRow",
    "Float8Stats",
    "GemmStats",
    "anomaly_dict",
    "append_jsonl",
    "comm_audit",
    "float8_stats",
]
