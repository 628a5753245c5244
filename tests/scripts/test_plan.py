"""scripts/plan: what it counts under fake tensors is what real ranks count, byte for byte."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from ranks import RankPool, RankPools, device_mesh
from torch import nn

from scripts.common.blocks import read_block
from scripts.common.candidates import TORCHAO
from scripts.common.llama import MODELS, LlamaConfig
from scripts.plan import __main__ as plan
from scripts.plan import run
from scripts.plan.links import Collectives, Links, ranks_along, seconds_of, total_seconds
from scripts.plan.meter import IN_BLOCKS, OTHER, WEIGHTS, MemoryMeter, bytes_of
from scripts.plan.step import PEER, Plan, Step, make_mesh, run_step
from scripts.plan.tables import collectives_table, growth_table, memory_table, time_table
from scripts.plan.world import fake_world

WORLD = 4
SMALL = LlamaConfig(64, 2, 8, 4, 96, vocab_size=128, max_seq_len=32)
# Feed-forward weights of 90 rows: 4 FSDP2 shards of them are uneven.
UNEVEN = replace(SMALL, ffn_dim=90)
DP_TP, DP, TP = {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}
HSDP = {"replicate": 2, "shard": 2, "tp": 1}
PEERS = [PEER] if PEER in TORCHAO else []
PLANS = [
    *(Plan(SMALL, DP_TP, variant, 2, 32) for variant in ("bf16", "rowwise_folded", *PEERS)),
    *(Plan(SMALL, TP, variant, 2, 32) for variant in ("tensorwise", "delayed")),
    *(Plan(SMALL, DP, variant, 2, 32) for variant in ("tensorwise", "rowwise")),
    Plan(SMALL, HSDP, "rowwise_with_gw_hp", 2, 32),
    Plan(UNEVEN, DP, "rowwise_folded", 2, 32),
]


def plan_name(plan: Plan) -> str:
    mesh = "-".join(f"{name}{size}" for name, size in plan.axes.items())
    return f"{plan.variant}-{mesh}-ffn{plan.model.ffn_dim}"


def on_real_ranks(plan: Plan) -> Step:
    return run_step(plan, device_mesh(**plan.axes), fake_tensors=False)


def on_fake_ranks() -> list[Step]:
    """Takes the default group's place for good."""
    dist.destroy_process_group()
    with fake_world(WORLD):
        meshes = {tuple(plan.axes.items()): make_mesh(plan) for plan in PLANS}
        return [
            run_step(plan, meshes[tuple(plan.axes.items())], fake_tensors=True) for plan in PLANS
        ]


@pytest.fixture(scope="module")
def planned() -> list[Step]:
    """By the position in `PLANS`."""
    pool = RankPool(1)  # a process used for nothing else
    try:
        return pool.run(on_fake_ranks, timeout=240)[0]
    finally:
        pool.close()


@pytest.mark.parametrize("position", range(len(PLANS)), ids=[plan_name(p) for p in PLANS])
def test_a_plan_counts_what_real_ranks_count(
    ranks: RankPools, planned: list[Step], position: int
) -> None:
    real = ranks(WORLD).run(on_real_ranks, PLANS[position], timeout=120)
    fake = planned[position]
    # All ranks send the same. (bf16 sends too: nothing here is an empty list.)
    assert [each.collectives for each in real] == [fake.collectives] * WORLD
    assert sum(row.count for row in fake.collectives) > 3
    # Rank 0 is the one that is planned.
    assert real[0].memory == fake.memory
    kept = sum(each.memory["parameters"] for each in real)
    copies = PLANS[position].axes.get("replicate", 1)
    if PLANS[position].axes["tp"] == 1:  # tensor parallelism has the norms on all ranks
        assert kept == 4 * fake.parameters * copies
    assert (fake.weights, real[0].weights) == (14, 14)


class TwoLinear(nn.Module):
    """(rows, 8) -> (rows, 8); the second layer multiplies by a copy of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ (2 * self.second.weight).t()


def test_saved_bytes_are_those_of_activations_and_of_copied_weights() -> None:
    model, x = TwoLinear(), torch.randn(5, 8)
    meter = MemoryMeter(model, [model.first])
    with meter, meter.saving():
        output = model(x)
    # The input of each layer, fp32; the copy of a weight; parameters themselves are no copies.
    assert meter.saved == {
        IN_BLOCKS: 5 * 8 * 4,
        OTHER: 5 * 16 * 4,
        WEIGHTS: 16 * 8 * 4,
    }
    output.sum().backward()
    assert bytes_of(p.grad for p in model.parameters() if p.grad is not None) == 2 * 16 * 8 * 4


def row(op: str, axis: str, count: int, nbytes: int, dtype: str = "bfloat16") -> Collectives:
    return Collectives("forward", op, axis, dtype, count, nbytes)


def test_ranks_along_an_axis() -> None:
    axes = {"replicate": 2, "shard": 3, "tp": 2}
    assert ranks_along("tp", axes) == [0, 1]
    assert ranks_along("shard", axes) == [0, 2, 4]
    assert ranks_along("replicate", axes) == [0, 6]
    assert sorted(ranks_along("replicate+tp", axes)) == [0, 1, 6, 7]
    assert sorted(ranks_along("world", axes)) == list(range(12))
    with pytest.raises(ValueError, match="'dp', which is not an axis"):
        ranks_along("dp", axes)


def test_seconds_of_collectives() -> None:
    links = Links(4, launch_us=10, intra_us=1, inter_us=5, intra_gb=100, inter_gb=10)
    axes = {"dp": 8, "tp": 4}
    # Inside a node: 2 hops of a tree; 3/4 of the buffers at 100 GB/s.
    tp = seconds_of(row("all_gather", "tp", 3, 4_000_000), axes, links)
    assert tp == pytest.approx(3 * (10e-6 + 2 * 1e-6) + 3e6 / 100e9)
    # One rank on each of 8 nodes: 3 hops, one network link.
    dp = seconds_of(row("reduce_scatter", "dp", 1, 8_000_000), axes, links)
    assert dp == pytest.approx(10e-6 + 3 * 5e-6 + 7e6 / 10e9)
    # 4 ranks on each of 8 nodes: 4 network links; an all-reduce goes twice.
    world = seconds_of(row("all_reduce", "world", 1, 32_000_000), axes, links)
    assert world == pytest.approx(10e-6 + 2 * (2e-6 + 15e-6) + 2 * 31e6 / 40e9)
    # Bytes in other messages cost no hops; a group of one costs nothing.
    mixed = seconds_of(row("all_gather", "tp", 0, 4_000_000), axes, links)
    assert mixed == pytest.approx(3e6 / 100e9)
    assert seconds_of(row("all_gather", "dp", 1, 100), {"dp": 1, "tp": 4}, links) == 0
    gather = row("all_gather", "tp", 3, 4_000_000)
    assert total_seconds([gather] * 2, axes, links) == pytest.approx(2 * tp)
    with pytest.raises(ValueError, match="not broadcast"):
        seconds_of(row("broadcast", "tp", 1, 1), axes, links)


def test_tables() -> None:
    rows = [row("all_gather", "dp", 2, 4000, "float8_e4m3fn"), row("all_gather", "dp", 0, 24)]
    first = Plan(SMALL, DP_TP, "tensorwise", 2, 32)
    runs = [
        (first, Step(rows, {"parameters": 1234, "gradients": 5})),
        (replace(first, variant="bf16"), Step([], {"parameters": 1234, "gradients": 0})),
    ]
    links = Links(2, launch_us=10, intra_us=1, inter_us=5, intra_gb=100, inter_gb=10)
    shown = [collectives_table(runs), memory_table(runs), time_table(runs, links)]
    assert_expected_inline(
        "\n\n".join([*shown, growth_table(runs, links)]),
        """\
| phase          | axis | op         | dtype         |  tensorwise |
| -------------- | ---- | ---------- | ------------- | ----------: |
| forward        | dp   | all_gather | bfloat16      |    + (24 B) |
| forward        | dp   | all_gather | float8_e4m3fn | 2 (4,000 B) |
| all of forward |      |            |               | 2 (4,024 B) |
| all            |      |            |               | 2 (4,024 B) |

| bytes on rank 0 | tensorwise |  bf16 |
| --------------- | ---------: | ----: |
| parameters      |      1,234 | 1,234 |
| gradients       |          5 |     0 |

| predicted ms             | group of rank 0  | tensorwise |
| ------------------------ | ---------------- | ---------: |
| dp: all_gather           | 2 ranks, 2 nodes |      0.030 |
| dp: all                  | 2 ranks, 2 nodes |      0.030 |
| all, one after the other |                  |      0.030 |

| ranks | mesh      | variant    | all_gather | reduce_scatter | all_reduce | of them precompute | float8 GB | all GB | precompute bytes | predicted ms |
| ----- | --------- | ---------- | ---------: | -------------: | ---------: | -----------------: | --------: | -----: | ---------------: | -----------: |
| 4     | dp=2,tp=2 | tensorwise |          2 |              0 |          0 |                  0 |       0.0 |    0.0 |                0 |        0.030 |
| 4     | dp=2,tp=2 | bf16       |          0 |              0 |          0 |                  0 |       0.0 |    0.0 |                0 |        0.000 |""",
    )


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message that the script ends with."""
    with pytest.raises(SystemExit, match=r"^2$"):
        plan.parse(list(argv))
    return capsys.readouterr().err.rpartition("error: ")[2].strip()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mesh dp=4096,tp=8", "--mesh dp=4096,tp=8: more than 16,384 ranks"),
        ("--mesh dp=2,tp=16", "tp=16 does not divide the 8 key/value heads of the model"),
        ("--mesh dp:2", "argument --mesh: dp:2: 'dp:2' is not NAME=SIZE of a new axis"),
        ("--mesh dp=0", "argument --mesh: dp=0: 'dp=0' is not NAME=SIZE of a new axis"),
        ("--mesh dp=2,dp=2", "argument --mesh: dp=2,dp=2: 'dp=2' is not NAME=SIZE of a new axis"),
        (
            "--mesh dp=2,shard=2",
            "argument --mesh: dp=2,shard=2: use dp=..,tp=.. or replicate=..,shard=..,tp=..",
        ),
        ("--seq-len 8193", "--seq-len 8193 is above the model's max_seq_len=8192"),
        ("--batch-size 0", "argument --batch-size: 0 is not positive"),
        ("--inter-gb 0", "inter_gb=0.0: use a positive, finite number"),
        ("--write", "--write needs --scale: the growth table is part of the page"),
        (
            "--scale --mesh shard=2",
            "--scale changes dp: give a --mesh dp=..,tp=..",
        ),
        (
            "--model 7b",
            f"--model 7b: no such file, and none of {', '.join(MODELS)}",
        ),
    ],
)
def test_options_that_are_refused(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    assert refused(capsys, *argv.split()) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "a JSON object with the fields of LlamaConfig is needed"),
        ('{"width": 3}', "unexpected keyword argument 'width'"),
        (json.dumps(asdict(SMALL) | {"ffn_dim": 0}), "all sizes must be positive"),
        ('{"dim": 64}', "missing 4 required positional arguments"),
        (json.dumps(asdict(SMALL) | {"dim": 65}), "dim=65 is not a multiple of n_heads=8"),
    ],
)
def test_models_that_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    found = refused(capsys, "--model", str(path))
    assert found.startswith(f"--model {path}: ")
    assert message in found


def test_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], documents: Path
) -> None:
    model, page = documents / "small.json", documents / "plan.md"
    model.write_text(json.dumps(asdict(SMALL)))
    monkeypatch.setattr(plan, "PAGE", page)
    monkeypatch.setattr(plan, "WORLDS", (8,))
    argv = ["--model", str(model), "--mesh", "dp=2,tp=2", "--seq-len", "16", "--scale", "--write"]
    assert plan.main(argv) == 0
    shown = capsys.readouterr().out
    for name in ("model", "collectives", "memory", "time", "growth"):
        assert read_block(page, name) in shown
    growth = [[c.strip() for c in x.split("|")] for x in read_block(page, "growth").splitlines()]
    assert [tuple(line[1:4]) for line in growth[2:]] == [
        (ranks, mesh, variant)
        for ranks, mesh in (("4", "dp=2,tp=2"), ("8", "dp=4,tp=2"))
        for variant in ("tensorwise", "bf16", *PEERS)
    ]
    # One all-reduce of a number per weight, at both sizes.
    assert [line[7] for line in growth if line[3] == "tensorwise"] == ["1", "1"]
    assert [line[10] for line in growth if line[3] == "tensorwise"] == [str(4 * 14)] * 2


def test_a_run_that_torchao_cannot_make(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Step:
        raise RuntimeError("uneven shards")

    monkeypatch.setattr(run, "run_step", broken)
    monkeypatch.setattr(run, "make_mesh", lambda plan: None)
    monkeypatch.setattr(run, "fake_world", lambda ranks: nullcontext())
    peer = Plan(SMALL, DP, PEER, 2, 32)
    assert run.run_fake(peer) == f"{PEER} on 4 ranks stopped: RuntimeError: uneven shards"
    with pytest.raises(RuntimeError, match="uneven shards"):
        run.run_fake(replace(peer, variant="bf16"))
