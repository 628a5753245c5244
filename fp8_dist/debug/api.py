"""The names of ``fp8_dist.debug``."""

from fp8_dist.debug.audit import (
    CommAudit as CommAudit,
    CommRow as CommRow,
    comm_audit as comm_audit,
)
from fp8_dist.debug.recording import Recorder as Recorder, record as record
from fp8_dist.debug.rows import (
    Anomaly as Anomaly,
    AnomalyLimits as AnomalyLimits,
    CastStats as CastStats,
    GemmStats as GemmStats,
)
from fp8_dist.debug.statistics import Float8Stats as Float8Stats, float8_stats as float8_stats
