"""One layer with a config of any fields, against the algebra of its three GEMMs in fp64."""

from dataclasses import replace
from typing import Any

import torch
from property_cases import LayerCase
from property_casts import TARGETS
from property_values import DTYPES, laid_out, values
from property_verdicts import WrongResult
from recipe_algebra import SUMMED, layer_of, multiplied_by, step

from fp8_dist import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType


def config_of_case(case: LayerCase) -> Float8LinearConfig:
    """Raises what the config refuses."""
    changes: dict[str, Any] = dict(case.flags)
    for field, kind, granularity, target in case.casts:
        changes[f"cast_config_{field}"] = CastConfig(
            ScalingType(kind),
            ScalingGranularity(granularity),
            None if target is None else TARGETS[target],
        )
    return replace(Float8LinearConfig.from_recipe_name(case.recipe), **changes)


def run_layer(case: LayerCase) -> None:
    """Raises WrongResult."""
    config, dtype = config_of_case(case), DTYPES[case.dtype]
    weight = values(case.weight, (case.out_features, case.in_features), dtype, case.seed)
    bias = values("normal", (case.out_features,), dtype, case.seed + 1) if case.bias else None
    rows = case.rows
    x = values(case.input, (*rows, case.in_features), dtype, case.seed + 2)
    g = values(case.grad_output, (*rows, case.out_features), dtype, case.seed + 3)
    x, g = laid_out(x, case.input_layout), laid_out(g, case.grad_layout)
    found = step(layer_of(config, weight, bias), x, g)
    count = torch.Size(rows).numel()
    flat_x, flat_g = x.reshape(count, case.in_features), g.reshape(count, case.out_features)
    compare(found, config, flat_x, weight, flat_g, bias)


def compare(
    found: dict[str, torch.Tensor],
    config: Float8LinearConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Whether output and gradients are what the config says."""
    operands = {"input": x, "weight": w, "grad_output": g}
    for gemm in SUMMED:
        left, right = multiplied_by(gemm, config, operands)
        expected, bound = left @ right, left.abs() @ right.abs()
        # Where a GEMM takes denormal numbers for zeros.
        sums = left.abs().sum(1, keepdim=True) + right.abs().sum(0, keepdim=True)
        bound = bound + 1e6 * torch.finfo(x.dtype).smallest_normal * sums
        if gemm == "output" and bias is not None:
            # The product is rounded before the bias is added.
            expected, bound = expected.to(x.dtype).double() + bias, bound + bias.double().abs()
        if not config.gemm_enabled(gemm) and not bound.isfinite().all():  # type: ignore[arg-type]
            # torch's GEMMs of bf16 let NaN reach the row before its own.
            bound = torch.full_like(bound, torch.inf)
        check_close(gemm, found[gemm].reshape(expected.shape), expected, bound, x.dtype)
    if bias is not None:
        total, bound = g.double().sum(0), g.double().abs().sum(0) * max(1, len(g))
        check_close("grad_bias", found["grad_bias"], total, bound, x.dtype)


def check_close(
    name: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Whether a result is the expected one, but for rounding to its dtype and sums in fp32.

    bound: the sum of the absolute values of what was summed. Where that overflows, only a value
    that is not finite is right.
    """
    if found.dtype is not dtype or found.shape != expected.shape:
        raise WrongResult(f"{name} is {found.dtype} {tuple(found.shape)}")
    limits, actual = torch.finfo(dtype), found.double()
    finite = expected.isfinite() & (bound < limits.max)
    lost = ~expected.isfinite() & actual.isfinite()
    error = (actual - expected).abs()
    allowed = 2 * limits.eps * expected.abs() + 1e-6 * bound + 2 * limits.smallest_normal
    wrong = lost | (finite & ~(error <= allowed))
    if wrong.any():
        i = tuple(wrong.nonzero()[0].tolist())
        raise WrongResult(
            f"{name}{list(i)} is {actual[i].item()}, expected {expected[i].item()} "
            f"+- {allowed[i].item():.2g}; {int(wrong.sum())} of {wrong.numel()} differ"
        )
