"""Tensor and sequence parallelism with float8 gathers: styles and ready-made plans."""

if __name__ != "fp8_dist.tensor_parallel":
    raise ImportError(
        f"this package is fp8_dist.tensor_parallel, not {__name__}: import "
        "fp8_dist.tensor_parallel (from the root of a checkout, or after pip install)"
    )

from fp8_dist.tensor_parallel.check import check_tp_plan
from fp8_dist.tensor_parallel.experts import Float8ExpertParallel, Float8ExpertTensorParallel
from fp8_dist.tensor_parallel.inputs import share_input
from fp8_dist.tensor_parallel.local import declare_placements
from fp8_dist.tensor_parallel.plan import apply_tp_plan
from fp8_dist.tensor_parallel.plans import llama_tp_plan
from fp8_dist.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

__all__ = [
    "Float8ColwiseParallel",
    "Float8ExpertParallel",
    "Float8ExpertTensorParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "apply_tp_plan",
    "check_tp_plan",
    "declare_placements",
    "llama_tp_plan",
    "share_input",
]
