"""The layers that the benchmarks compare: ours, torch's and torchao's, by name.

A *candidate* is named "fp32", "bf16" (nn.Linear), a recipe of ours, or "torchao" and a recipe of
its own. Where torchao is not installed its candidates are not there.
"""

import dataclasses
import logging
from typing import Any

import torch
from torch import nn

from fp8_dist import Float8Linear, Float8LinearConfig, Float8LinearRecipeName

# torchao warns of kernels that it can't load here, torch of what torchao registers.
for _logger in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_logger).setLevel(logging.ERROR)
try:
    from torchao import float8 as torchao
    from torchao.float8 import float8_ops, float8_tensor_parallel  # noqa: F401
    from torchao.float8.float8_linear import Float8Linear as TorchaoLinear
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )
    from torchao.float8.float8_training_tensor import GemmInputRole
except ImportError:
    torchao = None

BF16, FP32 = "bf16", "fp32"
OURS = tuple(recipe.value for recipe in Float8LinearRecipeName)
# (Its rows need a kernel that CPUs have since torch 2.12.)
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
if torch.__version__.startswith("2.11."):
    _RECIPES = ("tensorwise",)
TORCHAO = () if torchao is None else tuple(f"torchao {recipe}" for recipe in _RECIPES)


def is_torchaos(name: str) -> bool:
    """Whether a candidate is torchao's."""
    return name.startswith("torchao ")


def peer_of(name: str) -> str | None:
    """torchao's candidate that ours or bf16 is compared with: the one most like it."""
    if name not in (BF16, *OURS):
        return None
    like = dict.fromkeys((BF16, "delayed"), "tensorwise") | {"rowwise_folded": "rowwise"}
    return f"torchao {like.get(name, name)}"


def faster_than_peer(name: str, seconds: dict[str, float]) -> float | None:
    """torchao's time over ours; None where there is nothing to compare."""
    peer = peer_of(name)
    return None if peer is None or peer not in seconds else seconds[peer] / seconds[name]


def torchao_config(name: str, **changes: Any) -> Any:
    """torchao's config of one of its candidates."""
    config = torchao.Float8LinearConfig.from_recipe_name(name.removeprefix("torchao "))
    return dataclasses.replace(config, **changes)


def torchao_cast(name: str, x: torch.Tensor, operand: str, gemm: str) -> torch.Tensor:
    """An operand as torchao's layer casts it for one of its three GEMMs; shape as given.

    Args:
        name: the candidate.
        x: a matrix: the input [M, K], the weight [N, K] or the gradient of the output [M, N].
        operand: "input", "weight" or "grad_output".
        gemm: "output", "grad_input" or "grad_weight".
    """
    config = torchao_config(name)
    second = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}
    suffix = f"_for_{gemm}" if gemm == second[operand] else ""
    cast = getattr(config, f"cast_config_{operand}{suffix}")
    # Rows are summed over in grad_weight, and in grad_input by the weight.
    over_rows = gemm == "grad_weight" or (operand, gemm) == ("weight", "grad_input")
    return hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        TorchaoLinear.from_float(nn.Linear(16, 16, device="meta"), config).linear_mm_config,
        gemm_input_role=GemmInputRole[operand.upper()],
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(0 if over_rows else -1, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def linear_of(name: str, linear: nn.Linear) -> nn.Linear:
    """A candidate's layer with the parameters of ``linear``."""
    if is_torchaos(name):
        return TorchaoLinear.from_float(linear, torchao_config(name))
    if name in OURS:
        return Float8Linear.from_float(linear, Float8LinearConfig.from_recipe_name(name))
    return linear
