"""Shared experts take the cast of the tokens that the routed experts take."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import pytest
import torch
from expecttest import assert_expected_inline
from hf_experts import IDS, different, step
from hf_models import build
from ranks import RankPools, device_mesh
from reference import same_bits
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import Float8LinearConfig, convert_to_float8_training, skip_head
from fp8_dist.cast import cast_copies
from fp8_dist.linear.observing import Observer, observed_by
from fp8_dist.linear.operands import cast_input
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.scaling import CastPlan, Quantized
from fp8_dist.tensor_parallel import Float8ExpertParallel

MIXTURE = "model.layers.1.mlp."


class Readers(Observer):
    """The layers that take each cast of an input in the last mixture of a model, in order."""

    def __init__(self) -> None:
        self.casts: list[list[str]] = []

    def on_casts(self, owner: Any, operand: str, high: Any, lows: Mapping[Any, Quantized]) -> None:
        if operand != "input" or not owner.fqn.startswith(MIXTURE):
            return
        (low,) = lows.values()
        # (An attribute does not keep the tensor, as a list of tensors would.)
        readers = getattr(low.qdata, "readers", None)
        if readers is None:
            readers = low.qdata.readers = []  # type: ignore[attr-defined]
            self.casts.append(readers)
        name = owner.fqn.removeprefix(MIXTURE)
        readers.append(name if owner.name == "weight" else f"{name}.{owner.name}")


def mixture(kind: str, recipe: Any) -> nn.Module:
    """A model whose experts and linear layers have the same recipe."""
    model = build(kind)
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))
    return convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=skip_head(model),
    )


def casts(model: nn.Module, training: bool = True) -> str:
    readers = Readers()
    with torch.set_grad_enabled(training), observed_by(readers):
        model(input_ids=IDS)
    return "\n".join(", ".join(each) for each in readers.casts)


def alone(model: nn.Module) -> nn.Module:
    """Give the routed experts tokens of their own."""
    for experts in float8_experts(model).values():
        experts.register_forward_pre_hook(lambda _, args: (args[0].clone(), *args[1:]))
    return model


@pytest.mark.parametrize("recipe", ["rowwise_folded", "blockwise", "mxfp8"])
def test_one_cast_of_the_tokens(recipe: str) -> None:
    """DeepSeek-V3 calls the routed experts first, with a view; Qwen2-MoE the shared ones."""
    assert_expected_inline(
        casts(mixture("deepseek_v3", recipe)),
        """\
experts.gate_up_proj, shared_experts.gate_proj, shared_experts.up_proj
experts.down_proj
shared_experts.down_proj""",
    )
    assert_expected_inline(
        casts(mixture("qwen2_moe", recipe)),
        """\
shared_expert.gate_proj, shared_expert.up_proj, experts.gate_up_proj
shared_expert.down_proj
experts.down_proj""",
    )


def test_tokens_of_another_scheme_are_cast_again() -> None:
    assert_expected_inline(
        casts(mixture("deepseek_v3", "tensorwise")),  # one scale per tensor, and one per token
        """\
experts.gate_up_proj
experts.down_proj
shared_experts.gate_proj, shared_experts.up_proj
shared_experts.down_proj""",
    )


def test_routed_experts_keep_the_cast_without_autograd() -> None:
    assert_expected_inline(
        casts(mixture("deepseek_v3", "rowwise_folded").eval(), training=False),
        """\
experts.gate_up_proj, shared_experts.gate_proj, shared_experts.up_proj
experts.down_proj
shared_experts.down_proj""",
    )


def expert_parallel() -> str:
    model, mesh = mixture("deepseek_v3", "rowwise_folded"), device_mesh(ep=2)
    for experts in float8_experts(model).values():
        parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
    return casts(model)


def test_tokens_that_are_sent_to_their_experts(ranks: RankPools) -> None:
    found = ranks(2).run_same(expert_parallel)
    assert found == casts(mixture("deepseek_v3", "rowwise_folded"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe"])
def test_the_bits_are_those_of_two_casts(kind: str, checkpointing: bool) -> None:
    model, twin = mixture(kind, "rowwise_folded"), alone(mixture(kind, "rowwise_folded"))
    assert len(casts(twin).splitlines()) == len(casts(model).splitlines()) + 1
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert different(step(model), step(twin)) == []


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "tokens": lambda x: x.view(-1, x.shape[-1]),
    "other rows": lambda x: x.view(-1, x.shape[-1] // 2),
    "a part": lambda x: x[1:],
    "another order": lambda x: x.transpose(0, 1),
    "another dtype": lambda x: x.view(torch.float16),
    "what was written": lambda x: x.mul_(3),
    "a copy": torch.clone,
}


PLAN = CastPlan(Float8ExpertsConfig().linear.recipe.schemes["input"])


@pytest.mark.parametrize("view", VIEWS)
def test_views_share_a_cast_of_the_same_values(view: str) -> None:
    x = torch.randn(4, 4, 64).to(torch.bfloat16)
    (first,) = cast_input(x, PLAN, keeps=True)
    y = VIEWS[view](x)
    (found,), (expected,) = cast_input(y, PLAN), cast_copies(y.reshape(-1, y.shape[-1]), PLAN)[1]
    assert same_bits(found.qdata, expected.qdata)
    assert same_bits(found.scales[0], expected.scales[0])
    assert (found.qdata is first.qdata) is (view in ("itself", "tokens"))


def test_parts_of_a_tensor_have_casts_of_their_own() -> None:
    parts = torch.randn(8, 64).chunk(2)
    found = [cast_input(part, PLAN, keeps=True)[0].qdata for part in parts]
    expected = [cast_copies(part, PLAN)[1][0].qdata for part in parts]
    assert all(map(same_bits, found, expected))


def test_a_transposed_copy_is_made_from_the_cast() -> None:
    """A GPU's linear layer takes one for grad_weight."""
    both, x = PLAN._replace(of=(0, 0), transposed=(False, True)), torch.randn(48, 64)
    (first,) = cast_input(x, PLAN, keeps=True)
    made, expected = cast_input(x, both), cast_copies(x, both)[1]
    assert made[0].qdata is first.qdata
    for one, other in zip(made, expected, strict=True):
        assert same_bits(one.qdata, other.qdata)
        assert one.qdata.stride() == other.qdata.stride()
    assert cast_input(x, both)[1].qdata is made[1].qdata


def test_a_kept_cast_ends_with_its_input() -> None:
    x = torch.randn(48, 64)
    data = ref(cast_input(x.view(6, 8, 64), PLAN, keeps=True)[0].qdata)
    assert data() is not None
    del x
    assert data() is None
