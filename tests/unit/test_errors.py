"""Errors that no other test provokes."""

from collections.abc import Callable
from functools import partial

import torch
from reference import raised
from torch import nn

from fp8_dist import (
    CastConfig,
    Float8Linear,
    ScalingType,
    cast_to_float8,
    convert_to_float8_training,
    freeze_to_float8,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit
from fp8_dist.moe import convert_experts_to_float8_training
from fp8_dist.tensor_parallel import apply_tp_plan

ONE = torch.ones(())
Refused = dict[str, Callable[[], object]]
TYPES: Refused = {
    "convert_to_float8_training: pass the model, an nn.Module, got None": lambda: (
        convert_to_float8_training(None)  # type: ignore[arg-type]
    ),
    "convert_experts_to_float8_training: pass the model, an nn.Module, got 'moe'": lambda: (
        convert_experts_to_float8_training("moe")  # type: ignore[arg-type]
    ),
    "must be a function (module, fqn) -> bool, got ['lm_head']; skip_head(model) makes": lambda: (
        convert_to_float8_training(nn.Linear(16, 16), module_filter_fn=["lm_head"])  # type: ignore[arg-type]
    ),
    "freeze_to_float8: module_filter_fn must be a function": lambda: freeze_to_float8(
        Float8Linear(16, 16), module_filter_fn="0"
    ),  # type: ignore[arg-type]
    "comm_audit takes a DeviceMesh, got 'dp'; pass the mesh": lambda: comm_audit("dp"),  # type: ignore[arg-type]
    **{
        f"apply_tp_plan needs a DeviceMesh, got a {type(mesh).__name__}; init": partial(
            apply_tp_plan, nn.Linear(16, 16), mesh, {}
        )
        for mesh in ([0, 1], "tp")
    },
    "cast_to_float8: expected a tensor, got a list": lambda: cast_to_float8([1.0], CastConfig()),  # type: ignore[arg-type]
    "cast_config must be a CastConfig, got 'e4m3'": lambda: cast_to_float8(ONE, "e4m3"),  # type: ignore[arg-type]
    "from_float: expected an nn.Linear, got <": lambda: Float8Linear.from_float(nn.ReLU()),  # type: ignore[arg-type]
    "config must be a Float8LinearConfig, got 'x'": lambda: Float8Linear(16, 16, config="x"),  # type: ignore[arg-type]
    "got <class 'fp8_dist.config.CastConfig'>; Float8LinearConfig.from_recipe_name(": lambda: (
        Float8Linear(16, 16, config=CastConfig)  # type: ignore[arg-type]
    ),
}
VALUES: Refused = {
    "comes from the history that a Float8Linear keeps": lambda: cast_to_float8(
        ONE, CastConfig(ScalingType.DELAYED)
    ),
    "update_float8_scales: the module has no converted layer; call convert": lambda: (
        update_float8_scales(nn.ReLU())
    ),
}
OPERATIONS: Refused = {
    "0: torch.jit.script can't compile a float8 layer; use torch.export or": lambda: (
        torch.jit.script(convert_to_float8_training(nn.Sequential(nn.Linear(16, 16))))
    ),
    "Float8Linear: torch.jit.trace would record": lambda: torch.jit.trace(
        Float8Linear(16, 16), torch.ones(16, 16)
    ),
}


def test_what_is_refused() -> None:
    for kind, calls in (
        (TypeError, TYPES),
        (ValueError, VALUES),
        (NotImplementedError, OPERATIONS),
    ):
        for text, call in calls.items():
            assert text in raised(kind, call)
