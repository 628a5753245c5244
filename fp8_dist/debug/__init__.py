"""Seeing what happens: ``comm_audit`` records collectives, ``float8_stats`` what casts do.

``capture`` saves the tensors of casts to files. ``compare_recipes`` says what each recipe would
lose in each layer.

Above the layers, below FSDP2 and tensor parallelism. Nothing in the library depends on it.
"""

from fp8_dist.debug.anomalies import Anomaly, AnomalyLimits, anomaly_dict
from fp8_dist.debug.audit import CommAudit, comm_audit
from fp8_dist.debug.captured import CapturedCast, load_capture
from fp8_dist.debug.capturing import Capture, capture
from fp8_dist.debug.comparing import compare_recipes
from fp8_dist.debug.comparison import LayerSqnr, ParameterSqnr, RecipeComparison
from fp8_dist.debug.stat_rows import CastStats, GemmStats, append_jsonl
from fp8_dist.debug.stats import Float8Stats, float8_stats
from fp8_dist.debug.table import CommRow

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
    "LayerSqnr",
    "ParameterSqnr",
    "RecipeComparison",
    "anomaly_dict",
    "append_jsonl",
    "capture",
    "comm_audit",
    "compare_recipes",
    "float8_stats",
    "load_capture",
]
