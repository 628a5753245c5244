"""The names of ``fp8_dist.debug``."""

from fp8_dist.debug.audit import CommAudit, CommRow, comm_audit
from fp8_dist.debug.recording import Recorder, record
from fp8_dist.debug.rows import Anomaly, AnomalyLimits, CastStats, GemmStats
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
    "comm_audit",
    "float8_stats",
    "record",
]
