"""Debugging tools: ``comm_audit`` records collectives, ``float8_stats`` measures casts.

``capture`` saves the tensors of casts to files. ``compare_recipes`` measures the error of each
recipe in each layer.

In the import order this package is above the layers, and below FSDP2 and tensor parallelism.
Nothing in the library depends on it.
"""

from fp8_dist.debug.captures.files import CapturedCast, load_capture
from fp8_dist.debug.captures.recorder import Capture, capture
from fp8_dist.debug.communication.audit import CommAudit, comm_audit
from fp8_dist.debug.communication.table import CommRow
from fp8_dist.debug.recipes.comparing import compare_recipes
from fp8_dist.debug.recipes.comparison import LayerSqnr, ParameterSqnr, RecipeComparison
from fp8_dist.debug.statistics.anomalies import Anomaly, AnomalyLimits, anomaly_dict
from fp8_dist.debug.statistics.recorder import Float8Stats, float8_stats
from fp8_dist.debug.statistics.rows import CastStats, GemmStats, append_jsonl

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
