"""scripts/measure/memory.py: what it counts, its figures and its verdict."""

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8_dist import CastConfig, cast_to_float8
from scripts.common.blocks import read_block
from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.models import build
from scripts.common.saved_bytes import OTHER, saved_bytes
from scripts.measure import memory
from scripts.measure.gradient_memory import (
    WAYS,
    Taken,
    checks_of_gradients,
    gradients_table,
    of_gradients,
    peak_bytes,
)
from scripts.measure.memory import SHARD, WEIGHT, Held


def test_what_autograd_saves() -> None:
    parameter = torch.ones(4, 2, requires_grad=True)
    leaf = torch.ones(3, 4, requires_grad=True)
    freed: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        x = leaf * 1
        y = (x @ parameter).exp()  # saves x, the parameter, and its result
        same = y.view(6).sin()  # y again
        gathered = torch.ones(6)
        freed.append(gathered)
        return same * gathered  # and this

    saved = saved_bytes(forward, {12: WEIGHT})
    x, y = 4 * 12, 4 * 6
    assert saved == {WEIGHT: x, OTHER: 4 * 8 + y + y}
    assert saved_bytes(forward, {}, [parameter]) == {OTHER: x + y + y}

    def freeing() -> torch.Tensor:
        output = forward()
        freed[-1].untyped_storage().resize_(0)  # as FSDP2 frees what it gathered
        return output

    assert saved_bytes(freeing, {}, [parameter]) == {OTHER: x + y}
    copies = [torch.ones(8, dtype=torch.uint8), freed[0]]
    cached = saved_bytes(freeing, {8: SHARD}, [parameter], lambda: copies)
    assert cached == {OTHER: x + y + y, SHARD: 8}


def test_wrappers_are_what_they_hold() -> None:
    config = CastConfig()
    leaf = torch.ones(4, 16, requires_grad=True)

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(cast_to_float8(x, config))
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    saved = saved_bytes(lambda: Saves.apply(leaf), {64: WEIGHT})
    assert saved == {WEIGHT: 64, OTHER: 4}  # bytes, and a scale


def test_what_selective_checkpointing_keeps() -> None:
    leaf = torch.ones(100, requires_grad=True)
    kept: list[Any] = []

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = func is torch.ops.aten.exp.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, Any]:
        caching, cached = create_selective_checkpoint_contexts(policy)
        kept.append(caching.storage)
        return caching, cached

    def forward() -> torch.Tensor:
        return checkpoint(
            lambda x: x.exp().sin().cos(), leaf * 1, use_reentrant=False, context_fn=contexts
        )

    # The input and the result of exp.
    assert memory.kept_by(forward, nn.Module(), {}, kept)[OTHER] == 800


def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's float8 GEMM, which torchao's layers call, takes seconds for larger ones on a CPU.
    monkeypatch.setattr(memory, "ROWS", 128)
    monkeypatch.setattr(memory, "FEATURES", 256)
    kept = {name: memory.of_layer(name) for name in (BF16, *OURS, *TORCHAO)}
    x, w = memory.ROWS * memory.FEATURES, memory.FEATURES**2
    for name, held in kept.items():
        if name in OURS and name != memory.HIGH_PRECISION_INPUT:
            assert x <= held[OTHER] <= memory.LIMIT * 2 * x, name
        else:
            assert 2 * x <= held[OTHER] <= 2.02 * x, name
        assert held[WEIGHT] in ((w, 2 * w) if name in OURS else (0,)), name


def test_blocks() -> None:
    """Checkpointing keeps less, and the same for all but scales."""
    kept = {
        name: {mode: memory.of_block(name, mode) for mode in memory.MODES}
        for name in (BF16, "tensorwise")
    }
    for by_mode in kept.values():
        plain, selective, full = (by_mode[mode][OTHER] for mode in memory.MODES)
        assert plain > 1.5 * selective > 1.5 * full
    x = memory.BATCH * memory.SEQUENCE * memory.CONFIG.dim
    assert kept[BF16]["full"][OTHER] == 2 * x
    assert 2 * x <= kept["tensorwise"]["full"][OTHER] <= 2 * x + 1000
    assert kept[BF16]["plain"][WEIGHT] == 0
    sizes = [p.numel() for p in memory.Block(memory.CONFIG).parameters() if p.ndim > 1]
    assert kept["tensorwise"]["plain"][WEIGHT] == sum(sizes)


def test_sizes_tell_kinds_apart() -> None:
    """No activation, nor embedding, has as many elements as a weight or a shard of one."""
    config = memory.CONFIG
    sizes = memory.weight_sizes(memory.Block(config))
    sizes |= {size // memory.RANKS for size in sizes}
    for batch in (memory.BATCH, memory.BATCH // memory.RANKS):
        tokens = batch * memory.SEQUENCE
        heads = batch * config.n_heads * memory.SEQUENCE
        activations = {tokens, heads, heads * config.head_dim // 2}
        activations |= {tokens * width for width in (config.dim, config.ffn_dim, config.vocab_size)}
        assert not activations & sizes
    embedding = config.vocab_size * config.dim
    assert not {embedding, embedding // memory.RANKS} & sizes
    assert memory.ROWS != memory.FEATURES


def test_depths(ranks: RankPools) -> None:
    names = [BF16, "tensorwise"]
    first, second = ranks(2).run(memory.of_depths, names, (1, 2, 3))
    assert first == second
    (shards,) = {len({s}) and s for s in memory.per_layer(first["tensorwise"], SHARD)}
    weights = sum(p.numel() for p in memory.Block(memory.CONFIG).parameters() if p.ndim > 1)
    assert shards == weights // 2
    for name in names:
        added = memory.per_layer(first[name], OTHER)
        assert added[0] == added[1] > 0
        assert all(held[WEIGHT] == 0 for held in first[name].values()), name
    assert memory.per_layer(first[BF16], SHARD) == [0, 0]


def kept_unsharded() -> Held:
    """What a block keeps that FSDP2 does not reshard after its forward."""
    mesh = device_mesh(dp=2, tp=1)
    model = build(BF16, memory.CONFIG, mesh)
    model.layers[0].set_reshard_after_forward(False)
    tokens = torch.randint(256, (1, memory.SEQUENCE))
    kinds = dict.fromkeys(memory.weight_sizes(memory.Block(memory.CONFIG)), WEIGHT)
    return memory.kept_by(lambda: model(tokens), model, kinds)


def test_an_unsharded_weight_is_noticed(ranks: RankPools) -> None:
    weights = sum(p.numel() for p in memory.Block(memory.CONFIG).parameters() if p.ndim > 1)
    assert [held[WEIGHT] for held in ranks(2).run(kept_unsharded)] == [2 * weights] * 2


def held(activations: int, weight: int = 0, shard: int = 0) -> Held:
    return {OTHER: activations, WEIGHT: weight, SHARD: shard}


LAYERS = {BF16: held(1000)} | dict.fromkeys(OURS, held(540, 262144))
LAYERS[memory.HIGH_PRECISION_INPUT] = held(1001, 524288)
BLOCKS = {
    name: {"plain": held(9000, 100), "selective": held(3000), "full": held(size)}
    for name, size in ((BF16, 1000), ("tensorwise", 1010))
}
FLAT = {2: held(2500, 0, 200), 4: held(4500, 0, 400), 8: held(8500, 0, 800)}
DEPTHS = dict.fromkeys((BF16, *OURS), FLAT)


def test_tables() -> None:
    layers = {name: LAYERS[name] for name in (BF16, "tensorwise")}
    tables = [memory.layer_table(layers), memory.block_table(BLOCKS)]
    tables.append(memory.depth_table({BF16: FLAT, "tensorwise": FLAT}))
    assert_expected_inline(
        "\n\n".join(tables),
        """\
| layer      | activations, B | of bf16 | copies of the weight, B |
| ---------- | -------------: | ------: | ----------------------: |
| bf16       |          1,000 |   1.000 |                       0 |
| tensorwise |            540 |   0.540 |                 262,144 |

| block      | plain, B | of bf16 | selective, B | of bf16 | full, B | of bf16 | copies of weights, B |
| ---------- | -------: | ------: | -----------: | ------: | ------: | ------: | -------------------: |
| bf16       |    9,000 |   1.000 |        3,000 |   1.000 |   1,000 |   1.000 |                  100 |
| tensorwise |    9,000 |   1.000 |        3,000 |   1.000 |   1,010 |   1.010 |                  100 |

| model      | 2 layers, B | 4 layers, B | 8 layers, B | each layer, B | of bf16 | float8 shards of each, B | unsharded weights, B |
| ---------- | ----------: | ----------: | ----------: | ------------: | ------: | -----------------------: | -------------------: |
| bf16       |       2,500 |       4,500 |       8,500 |         1,000 |   1.000 |                      100 |            0 / 0 / 0 |
| tensorwise |       2,500 |       4,500 |       8,500 |         1,000 |   1.000 |                      100 |            0 / 0 / 0 |""",
    )


def test_verdicts() -> None:
    found = memory.checks(LAYERS, DEPTHS)
    assert all(check.holds for check in found)
    assert_expected_inline(
        "\n".join(check.sentence for check in found if "tensorwise" in check.sentence),
        """\
tensorwise: a layer keeps 0.540 of bf16, at most 0.55
tensorwise: each layer adds 1,100 B at any depth
tensorwise: 0 B of unsharded weights outlive their layer, at most 0""",
    )
    growing = {2: held(2500), 4: held(4500), 8: held(8600)}
    kept = {2: held(2500, 10), 4: held(4500, 20), 8: held(8500, 40)}
    for layers, depths, sentence in (
        ({"rowwise": held(551)}, {}, "rowwise: a layer keeps 0.551 of bf16, at most 0.55"),
        ({}, {"delayed": growing}, "delayed: each layer adds 1,000 B at any depth"),
        ({}, {"delayed": kept}, "delayed: 40 B of unsharded weights outlive their layer, at most"),
    ):
        (broken,) = (
            c.sentence for c in memory.checks(LAYERS | layers, DEPTHS | depths) if not c.holds
        )
        assert broken.startswith(sentence)


GRADIENTS = dict(zip(WAYS, (Taken(1000, 4000, 0),) * 3 + (Taken(1000, 9000, 1008),), strict=True))


def test_peak_of_what_is_allocated() -> None:
    def function() -> None:
        first = torch.zeros(1000)
        for _ in range(3):
            torch.zeros(5000).sum()
        first.add_(1)

    # Results of one element are allocated in lines of 64 bytes.
    assert peak_bytes(function) == pytest.approx(4 * 6000, abs=128)


def test_what_gradients_take(ranks: RankPools) -> None:
    found = ranks(2).run_same(of_gradients, memory.CONFIG)
    weights = sum(p.numel() for p in memory.Block(memory.CONFIG).parameters() if p.ndim > 1)
    assert {each.elements for each in found.values()} == {weights}
    assert [each.kept / weights for each in found.values()] == [0, 0, 0, pytest.approx(1 + 1 / 128)]
    # A message that is sent, and one that is received.
    for way, each in found.items():
        assert each.buffers > weights * {"fp32": 4, "bf16": 4}.get(way, 2), way
    assert all(check.holds for check in checks_of_gradients(found))


def test_verdict_on_errors_that_are_kept() -> None:
    def broken(**changes: int) -> list[str]:
        found = {name: each._replace(**changes) for name, each in GRADIENTS.items()}
        return [c.sentence for c in checks_of_gradients(found) if not c.holds]

    assert broken() == []
    assert_expected_inline(
        "\n".join([*broken(kept=1011), gradients_table(GRADIENTS)]),
        """\
fp32: 1.011 bytes per element of gradients are kept, at most 0
bf16: 1.011 bytes per element of gradients are kept, at most 0
float8: 1.011 bytes per element of gradients are kept, at most 0
float8, error feedback: 1.011 bytes per element of gradients are kept, at most 1.01
| gradients              | buffers, B | per element | kept, B | per element |
| ---------------------- | ---------: | ----------: | ------: | ----------: |
| fp32                   |      4,000 |       4.000 |       0 |       0.000 |
| bf16                   |      4,000 |       4.000 |       0 |       0.000 |
| float8                 |      4,000 |       4.000 |       0 |       0.000 |
| float8, error feedback |      9,000 |       9.000 |   1,008 |       1.008 |""",
    )


@pytest.mark.parametrize(("activations", "status"), [(540, 0), (560, 1)])
def test_blocks_and_status(
    activations: int, status: int, monkeypatch: pytest.MonkeyPatch, documents: Path
) -> None:
    layers = {name: held(1000 if name == BF16 else activations) for name in memory.NAMES}
    depths = dict.fromkeys(memory.NAMES, FLAT)
    monkeypatch.setattr(memory, "of_layer", layers.__getitem__)
    monkeypatch.setattr(memory, "of_block", lambda name, mode: held(2000))
    answers: dict[Any, Any] = {memory.of_depths: depths, memory.of_gradients: GRADIENTS}
    monkeypatch.setattr(memory, "run_on_ranks", lambda ranks, task, *args: [answers[task]])
    assert memory.main(["--write"]) == 0
    assert memory.main(["--write", "--assert"]) == status
    page = documents / "memory.md"
    assert memory.layer_table(layers) in read_block(page, "layer")
    assert memory.depth_table(depths) in read_block(page, "depth")
    assert "|    2,000 |   1.000 |" in read_block(page, "block")
    assert gradients_table(GRADIENTS) in read_block(page, "gradients")
