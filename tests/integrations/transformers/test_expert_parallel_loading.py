"""Experts that transformers divides among ranks while it loads a model, with float8 messages."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hf_experts import IDS, step
from hf_models import build
from nets import full
from ranks import RankPools
from reference import raised, same_bits, sqnr
from trainer_runs import launched
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from fp8_dist.debug import comm_audit
from fp8_dist.integrations.transformers import Fp8DistConfig
from fp8_dist.moe import convert_experts_to_float8_training, float8_experts

E4M3 = torch.float8_e4m3fn


def load(folder: str, experts_recipe: str | None, **sizes: int) -> Any:
    # Linear layers with one scale per token, since the tokens of a rank are not one device's.
    config = Fp8DistConfig("rowwise_folded", experts_recipe=experts_recipe)
    distributed = DistributedConfig(**sizes, ep_implementation="fp8_dist") if sizes else None
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, distributed_config=distributed
    )


def saved(kind: str, folder: Path) -> str:
    build(kind).save_pretrained(folder)
    return str(folder)


def loaded(folder: str, sizes: dict[str, int]) -> list[object]:
    """Differences from one device, and the fraction of token bytes that are sent in float8."""
    with launched():
        model, twin = load(folder, "rowwise_folded", **sizes), load(folder, "rowwise_folded")
        parts, wrong = sizes["fsdp_size"], []
        part = dist.get_rank()
        with comm_audit() as audit:
            logits, grads = step(model, IDS.chunk(parts)[part])
        expected, twin_grads = step(twin)
        if not same_bits(logits, expected.chunk(parts)[part]):
            wrong.append("logits")
        wrong += [n for n in twin_grads if sqnr(twin_grads[n], parts * full(grads[n])) < 90]
        sent = {row.dtype: row.elements for row in audit.rows if row.op == "all_to_all"}
        model.save_pretrained(f"{folder}/again")
    weights = dict(AutoModelForCausalLM.from_pretrained(f"{folder}/again").named_parameters())
    wrong += [f"{n}, saved" for n, p in twin.named_parameters() if not same_bits(p, weights[n])]
    return [wrong, len(float8_experts(model)), sent[E4M3] > 0]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}),
        ("qwen3_moe", {"fsdp_size": 4, "ep_size": 2}),
    ],
)
def test_loaded_by_transformers(
    ranks: RankPools, tmp_path: Path, kind: str, sizes: dict[str, int]
) -> None:
    assert ranks(sizes["fsdp_size"]).run_same(loaded, saved(kind, tmp_path), sizes) == [[], 2, True]


def refused(folder: str) -> list[str]:
    convert_experts_to_float8_training(build("qwen3_moe"))  # registers the implementation
    recipes = None, ("mxfp8", "tensorwise")[dist.get_rank()]
    with launched():
        return [
            *(
                raised(ValueError, lambda: load(folder, recipe, fsdp_size=2, ep_size=2))  # noqa: B023
                for recipe in recipes
            ),
        ]


def test_what_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    plain, differing = ranks(2).run_same(refused, folder)
    assert_expected_inline(
        plain,
        """ep_implementation='fp8_dist' is for experts in float8, but those of a Qwen3MoeExperts are not converted; call convert_experts_to_float8_training, or load the model with quantization_config=Fp8DistConfig(experts_recipe=...)""",
    )
    assert differing.startswith("from_pretrained of model.layers.0.mlp.experts: the ranks of ")
    assert "mxfp9" in raised(ValueError, lambda: load(folder, "mxfp9"))
    partly = Fp8DistConfig(modules_to_not_convert=["layers.0.mlp"], experts_recipe="mxfp8")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=partly)
    assert list(float8_experts(model)) == ["model.layers.1.mlp.experts"]
