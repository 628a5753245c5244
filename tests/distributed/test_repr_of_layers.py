"""``repr`` of layers under FSDP2, at each moment of a step: no collectives, no waits, no changes."""

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8_dist import Float8LinearConfig, convert_to_float8_training, update_float8_scales
from fp8_dist.debug import comm_audit


class Watched(nn.Module):
    """Notes the repr of its layer before and after the layer, forward and backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"forward: {self.layer!r}")
        x = self.layer(x)
        x.register_hook(lambda grad: self.seen.append(f"backward: {self.layer!r}"))
        return x


def reprs_of_a_step(recipe: str, float8: bool) -> tuple[list[str], int]:
    """Runs on every rank: what the layer says, and the collectives of saying it between steps."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    if float8:
        config = replace(config, enable_fsdp_float8_all_gather=True)
    model = Watched(convert_to_float8_training(nn.Linear(16, 32, bias=False), config=config))
    fully_shard(model, mesh=device_mesh(dp=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = comm_audit()

    def note(when: str) -> None:
        with audit:
            shown = repr(model.layer)
        assert repr(model.layer) == shown
        model.seen.append(f"{when}: {shown}")

    note("new")
    update_float8_scales(model)
    note("updated")
    model(torch.ones(2, 16)).sum().backward()
    note("after backward")
    optimizer.step()
    note("after the optimizer")
    update_float8_scales(model)
    note("updated again")
    lines = [
        line.replace("Float8Linear(in_features=16, out_features=32", "") for line in model.seen
    ]
    return [line.replace(", bias=False, ", "").removesuffix(")") for line in lines], audit.count()


def test_at_each_moment_of_a_step(ranks: RankPools) -> None:
    texts = []
    for recipe, float8 in (("tensorwise", True), ("tensorwise", False), ("delayed", True)):
        lines, collectives = ranks(2).run_same(reprs_of_a_step, recipe, float8)
        texts += lines
        assert collectives == 0
    assert_expected_inline(
        "\n".join(texts),
        """\
new: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=unknown
updated: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=pending
forward: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=fresh
backward: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=fresh
after backward: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=fresh
after the optimizer: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=stale
updated again: recipe=tensorwise, float8_gathers=weight|input|grad_output, scale=pending
new: recipe=tensorwise, float8_gathers=input|grad_output, scale=unknown
updated: recipe=tensorwise, float8_gathers=input|grad_output, scale=unknown
forward: recipe=tensorwise, float8_gathers=input|grad_output, scale=unknown
backward: recipe=tensorwise, float8_gathers=input|grad_output, scale=fresh
after backward: recipe=tensorwise, float8_gathers=input|grad_output, scale=unknown
after the optimizer: recipe=tensorwise, float8_gathers=input|grad_output, scale=unknown
updated again: recipe=tensorwise, float8_gathers=input|grad_output, scale=unknown
new: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (0 of 16 amaxes)
updated: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (0 of 16 amaxes)
forward: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (0 of 16 amaxes)
backward: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (0 of 16 amaxes)
after backward: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (0 of 16 amaxes)
after the optimizer: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (0 of 16 amaxes)
updated again: recipe=delayed, float8_gathers=weight|input|grad_output, scale=delayed (1 of 16 amaxes)""",
    )
