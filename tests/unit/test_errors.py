"""Errors that no other test provokes."""

from collections.abc import Callable
from functools import partial

import torch
from reference import raised
from torch import nn

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
    attach_update,
    auto_filter,
    cast_to_float8,
    convert_to_float8_training,
    float8_layers,
    freeze_to_float8,
    update_float8_scales,
)
from fp8_dist.config_text import CUSTOM, field_texts, recipe_of
from fp8_dist.debug import comm_audit
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.tensor_parallel import apply_tp_plan
from fp8_dist.text import did_you_mean, with_article

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
        f"apply_tp_plan(model, mesh, plan) needs a DeviceMesh, got a {type(mesh).__name__}": partial(
            apply_tp_plan, nn.Linear(16, 16), mesh, {}
        )
        for mesh in ([0, 1], "tp")
    },
    "apply_tp_plan(model, mesh, plan): expected a model (an nn.Module), got a dict": lambda: (
        apply_tp_plan({}, nn.Linear(16, 16), "tp")  # type: ignore[arg-type]
    ),
    "attach_update(optimizer, module): expected a model (an nn.Module), got an SGD": lambda: (
        attach_update(nn.Linear(16, 16), torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]
    ),
    "cast_to_float8: expected a tensor, got a list": lambda: cast_to_float8([1.0], CastConfig()),  # type: ignore[arg-type]
    "cast_to_float8: expected a tensor, got an int": lambda: cast_to_float8(1, CastConfig()),  # type: ignore[arg-type]
    "expected a model (an nn.Module), got an AdamW": lambda: float8_layers(
        torch.optim.AdamW([torch.ones(1)])  # type: ignore[arg-type]
    ),
    "expected a model (an nn.Module), got an SGD": lambda: update_float8_scales(
        torch.optim.SGD([torch.ones(1)])  # type: ignore[arg-type]
    ),
    "weight_block_size; did you mean 'emulate'?": lambda: Float8LinearConfig.from_recipe_name(
        "mxfp8", emulated=True
    ),
    "cast_config must be a CastConfig, got 'e4m3'": lambda: cast_to_float8(ONE, "e4m3"),  # type: ignore[arg-type]
    "from_float: expected an nn.Linear, got <": lambda: Float8Linear.from_float(nn.ReLU()),  # type: ignore[arg-type]
    "config must be a Float8LinearConfig, got 'x'": lambda: Float8Linear(16, 16, config="x"),  # type: ignore[arg-type]
    "got <class 'fp8_dist.config.CastConfig'>; Float8LinearConfig.from_recipe_name(": lambda: (
        Float8Linear(16, 16, config=CastConfig)  # type: ignore[arg-type]
    ),
}
VALUES: Refused = {
    "'delayed', 'bf16']; did you mean 'rowwise_folded'?": lambda: (
        Float8LinearConfig.from_recipe_name("rowise_folded")
    ),
    "'delayed']; did you mean 'tensorwise'?": lambda: auto_filter("Tensor-wise"),
    "got 'blokwise'; did you mean 'blockwise'?": lambda: Float8ExpertsConfig.from_recipe_name(
        "blokwise"
    ),
    "comes from the history that a Float8Linear keeps": lambda: cast_to_float8(
        ONE, CastConfig(ScalingType.DELAYED)
    ),
    "update_float8_scales: the module has no converted layer; call convert": lambda: (
        update_float8_scales(nn.ReLU())
    ),
}
OPERATIONS: Refused = {
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


def test_articles_follow_the_sound() -> None:
    an = ["AdamW", "int", "LSTM", "RMSNorm", "ndarray", "nn.Linear", "Unembedding", "FSDPLinear"]
    a = ["Float8Linear", "list", "ReLU", "UserDict", "uint8", "UNet", "SiLU", "module"]
    assert [with_article(name).split() for name in an] == [["an", name] for name in an]
    assert [with_article(name).split() for name in a] == [["a", name] for name in a]


def test_only_names_that_are_near_are_proposed() -> None:
    names = ["tensorwise", "rowwise", "rowwise_folded"]
    assert did_you_mean("fast", names) == did_you_mean(None, names) == ""
    assert did_you_mean("ROWWISE", names) == "; did you mean 'rowwise'?"
    assert did_you_mean("rowise_", names, 2) == "; did you mean 'rowwise' or 'rowwise_folded'?"


def test_what_is_said_of_configs() -> None:
    rowwise = Float8LinearConfig.from_recipe_name("rowwise", emulate=True)
    by_hand = Float8LinearConfig(CastConfig(scaling_granularity=ScalingGranularity.AXISWISE))
    assert [recipe_of(rowwise), recipe_of(by_hand)] == ["rowwise", CUSTOM]
    one, other = field_texts(rowwise), field_texts(by_hand)
    assert one.keys() == other.keys()
    name = "cast_config_input_for_grad_weight.scaling_granularity"
    assert one[name] == other[name] == "ScalingGranularity.AXISWISE"
    assert (one["emulate"], other["emulate"]) == ("True", "False")
