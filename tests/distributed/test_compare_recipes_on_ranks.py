"""compare_recipes under FSDP2: one device's numbers, alike on all ranks; what it refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Distributed, Net
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8_dist import Float8LinearConfig, convert_to_float8_training, update_float8_scales
from fp8_dist.debug import compare_recipes

RECIPES = ["tensorwise", "rowwise_folded"]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed))


def sharded(converted: bool, each_layer: bool = False) -> Net:
    net = Net()
    if converted:
        convert_to_float8_training(net)
    layers = [m for m in net.modules() if isinstance(m, nn.Linear)] if each_layer else []
    for module in (*layers, *net.layers, net):
        fully_shard(module, mesh=device_mesh(dp=2), reshard_after_forward=True)
    return net


def found(converted: bool, each_layer: bool, same_batch: bool) -> list[dict[str, Any]]:
    net = sharded(converted, each_layer)
    x = batch(0 if same_batch else dist.get_rank())
    return compare_recipes(net, x, recipes=RECIPES).to_dicts()


@pytest.mark.parametrize(("converted", "each_layer"), [(False, True), (True, False)])
def test_the_numbers_of_one_device(ranks: RankPools, converted: bool, each_layer: bool) -> None:
    mine = ranks(2).run_same(found, converted, each_layer, True)
    its = compare_recipes(Net(), batch(0), recipes=RECIPES).to_dicts()
    assert len(mine) == len(its) == 2 * (6 + 10)
    for row, expected in zip(mine, its, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == (pytest.approx(value, abs=1e-3) if value else value), name


def test_the_batches_of_ranks_are_parts_of_one(ranks: RankPools) -> None:
    mine = ranks(2).run_same(found, False, False, False)
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    exact, float8 = Net(), convert_to_float8_training(Net(), config=config)
    outputs: list[torch.Tensor] = []
    for net in (exact, float8):
        w1: Any = net.layers[0].w1  # type: ignore[union-attr]
        outputs.append(torch.cat([w1(batch(rank)) for rank in range(2)]))
        for rank in range(2):  # gradients add up
            net(batch(rank)).square().mean().backward()
    first = next(row for row in mine if row.get("fqn") == "layers.0.w1")
    assert first["recipe"] == "tensorwise"
    assert first["output"] == pytest.approx(sqnr(*outputs), abs=1e-3)
    gradients = {row["name"]: row["sqnr"] for row in mine[12:22]}
    for (name, x), y in zip(exact.named_parameters(), float8.parameters(), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert gradients[name] == pytest.approx(sqnr(x.grad, y.grad), abs=1e-2)


def trained(when: str | None) -> list[float]:
    """Losses of steps around a comparison that ends well, or with an error, or isn't there."""
    net = sharded(converted=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    for step in range(3):
        optimizer.zero_grad()
        loss = net(batch(step)).square().mean()
        loss.backward()
        gradients = [p.grad for p in net.parameters()]
        if step == 1 and when == "well":
            compare_recipes(net, batch(7), recipes=RECIPES)
        elif step == 1 and when:
            layer: Any = net.layers[1].w2  # type: ignore[union-attr]
            handle = layer.register_forward_pre_hook(fail) if when == "in the middle" else None
            with pytest.raises(RuntimeError, match="on purpose"):
                compare_recipes(net, batch(7), loss=None if handle else fail)
            if handle:
                handle.remove()
        assert all(isinstance(p, DTensor) for p in net.parameters())
        assert all(a is b.grad for a, b in zip(gradients, net.parameters(), strict=True))
        optimizer.step()
        update_float8_scales(net)
        losses.append(loss.item())
    return losses


def test_training_goes_on_as_before(ranks: RankPools) -> None:
    expected = ranks(2).run_same(trained, None)
    assert len(set(expected)) == 3
    for when in ("well", "in the loss", "in the middle"):
        assert ranks(2).run_same(trained, when) == expected, when


@pytest.mark.parametrize(("dp", "tp", "kind"), [(2, 1, "Float8Tensor"), (1, 2, "DTensor")])
@on_ranks(2)
def test_float8_gathers_and_tensor_parallelism_are_refused_by_name(
    dp: int, tp: int, kind: str
) -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=dp > 1)
    world = Distributed(dp=dp, tp=tp, config=config)
    x = world.mine(torch.randn(2, 8, 64))
    text = raised(NotImplementedError, lambda: compare_recipes(world.net, x, recipes=RECIPES))
    assert not any("forward" in vars(module) for module in world.net.modules())
    world.net(x).sum().backward()  # the model still runs
    message = text
    start = f"compare_recipes: layers.0.w1 computes on a {kind} weight"
    assert message.startswith(start), message
    assert "Tensor parallelism and float8 gathers are not supported: compare before" in message
