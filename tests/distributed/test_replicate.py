"""Parameters that are whole on every rank (torch's ``replicate``), or that other code gathers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import all_warnings, same_bits
from stored_weights import frozen, run, same
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    attach_update,
    cast_to_float8,
    convert_to_float8_training,
    float8_layers,
)
from fp8_dist.debug import comm_audit

RECIPES = ["tensorwise", "delayed", "rowwise_folded", "mxfp8"]


def net(recipe: str, gather: Any = "auto") -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 65))
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(made, config=config)
    return made


def gradients(model: nn.Module, update: bool = True) -> tuple[list[torch.Tensor], str]:
    """Gradients of three steps, and collectives of the last one. Each rank has its own inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if update:
        attach_update(optimizer, model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(3):
        with comm_audit() as audit:
            model(torch.randn(32, 64, generator=generator)).square().mean().backward()
            found += [full(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return found, ", ".join(f"{row.op} {row.dtype}" for row in audit.without_modules().rows)


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2, returns=[])
def test_gradients(recipe: str) -> list[str]:
    """Gradients equal FSDP2's; only they, and amaxes of `delayed`, are communicated."""
    mesh, wrong = device_mesh(dp=2), []
    expected, _ = gradients(fully_shard(net(recipe), mesh=mesh))
    for gather in ("auto", False):
        found, sent = gradients(replicate(net(recipe, gather), mesh=mesh))
        if not all(map(same_bits, found, expected)):
            wrong.append(f"gather {gather}: gradients")
        history = ", all_reduce torch.int32" if recipe == "delayed" else ""
        if sent != "all_reduce torch.float32" + history:
            wrong.append(f"gather {gather}: {sent}")
    return wrong


@on_ranks(2, returns=[True, True])
def test_weights_that_are_stored_in_float8() -> list[bool]:
    expected = run(frozen("blockwise"))
    return [
        same(run(shard(frozen("blockwise"), mesh=device_mesh(dp=2))), expected)
        for shard in (replicate, fully_shard)
    ]


@on_ranks(4)
def test_gathers_in_high_precision_that_nobody_chose() -> None:
    """They warn once, if "auto" would gather in float8."""

    def said(model: nn.Sequential, shard: Any = fully_shard, **options: Any) -> list[str]:
        x = torch.randn(32, model[0].in_features, dtype=model[0].weight.dtype)
        with all_warnings() as texts, torch.no_grad():
            model = shard(model, **{"mesh": device_mesh(dp=4)} | options)
            for _ in range(2):
                model(x)
        return [text for text in texts if "in high precision, because" in text]

    for recipe in (each.value for each in Float8LinearRecipeName):
        scheme = Float8LinearConfig.from_recipe_name(recipe).recipe.gather_scheme["weight"]
        can = scheme is not None
        texts = said(net(recipe, None))
        assert len(texts) == can, recipe
        assert all(text.startswith("0 and layers like it: FSDP2 gathers th") for text in texts)
        assert said(net(recipe, "auto")) == said(net(recipe, False)) == []
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    convert_to_float8_training(tied, module_filter_fn=lambda _, fqn: fqn == "0")
    assert said(tied) == said(frozen("tensorwise")) == []
    assert said(net("tensorwise", None), replicate) == []
    assert said(net("tensorwise", None), reshard_after_forward=2) == []
    assert said(net("tensorwise", None), mesh=device_mesh(dp=4, one=1)["one"]) == []


def simple_fsdp(model: nn.Module, cast: bool) -> nn.Module:
    """Shard weights, and gather them in a property, as torchtitan's SimpleFSDP does."""
    for layer in float8_layers(model).values():
        sharded = distribute_tensor(layer.weight, device_mesh(dp=2), [Shard(0)])
        layer.weight = nn.Parameter(sharded)

        def gathered(self: Any) -> torch.Tensor:
            weight = self._parameters["weight"]
            if cast:
                weight = cast_to_float8(weight, self.config.cast_config_weight)
            return weight.redistribute(placements=[Replicate()]).to_local(
                grad_placements=[Partial()]
            )

        layer.__class__ = type("SimpleFSDP", (type(layer),), {"weight": property(gathered)})
    return model


@on_ranks(2)
def test_weights_that_a_property_gathers() -> None:
    expected, _ = gradients(fully_shard(net("tensorwise"), mesh=device_mesh(dp=2)))
    for gather, cast in ((True, False), ("auto", False), (False, False), (False, True)):
        with all_warnings() as texts:
            model = simple_fsdp(net("tensorwise", gather), cast)
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
            with comm_audit() as audit:
                model(x).square().mean().backward()
        texts = [text for text in texts if "no effect" in text]
        gathers = [row for row in audit.rows if row.op == "all_gather"]
        assert {row.dtype for row in gathers} == {torch.float8_e4m3fn if cast else torch.float32}
        assert sum(row.count for row in gathers) == 2  # one for each layer
        for i, layer in enumerate(float8_layers(model).values()):
            weight: Any = layer._parameters["weight"]
            found = weight.grad.full_tensor() / 2
            assert same_bits(found, expected[2 * i])
        if gather is False:
            assert texts == []
        else:
            (text,) = texts
            assert text.startswith(f"0: enable_fsdp_float8_all_gather={gather!r} has no effect on")
            assert "Call fully_shard on the model" in text
