"""``repr`` of layers under FSDP2, at each moment of a step: no collectives, no waits, no changes."""

from dataclasses import replace

import torch
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


def scales_of_a_step(recipe: str, float8: bool) -> list[str]:
    """How a layer shows its scale, moment by moment; and that saying so communicates nothing."""
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
    gathers = "weight|input|grad_output" if float8 else "input|grad_output"
    assert all(f"recipe={recipe}, float8_gathers={gathers}" in line for line in model.seen)
    assert audit.count() == 0
    return [line.partition("scale=")[2].removesuffix(")") for line in model.seen]


def test_at_each_moment_of_a_step(ranks: RankPools) -> None:
    """New, updated, forward, backward, after it, after the optimizer, updated again."""
    run = ranks(2).run_same
    fresh = ["fresh"] * 3
    assert run(scales_of_a_step, "tensorwise", True) == [
        *("unknown", "pending", *fresh, "stale", "pending")
    ]
    assert run(scales_of_a_step, "tensorwise", False) == [
        *("unknown", "unknown", "unknown", "fresh", "unknown", "unknown", "unknown")
    ]
    amaxes = [f"delayed ({count} of 16 amaxes)" for count in (0, 0, 0, 0, 0, 0, 1)]
    assert run(scales_of_a_step, "delayed", True) == amaxes
