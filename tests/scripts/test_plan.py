"""scripts/plan: what it counts under fake tensors is what real ranks count, byte for byte."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline
from ranks import RankPool, RankPools, device_mesh

from scripts.common.blocks import read_block
from scripts.common.candidates import TORCHAO
from scripts.common.llama import MODELS, LlamaConfig
from scripts.plan import __main__ as plan
from scripts.plan import run
from scripts.plan.step import PEER, Collectives, Plan, Step, make_mesh, run_step
from scripts.plan.tables import collectives_table, growth_table, memory_table
from scripts.plan.world import fake_world

WORLD = 4
SMALL = LlamaConfig(64, 2, 8, 4, 96, vocab_size=128, max_seq_len=32)
# Feed-forward weights of 90 rows: 4 FSDP2 shards of them are uneven.
UNEVEN = replace(SMALL, ffn_dim=90)
# No shard of 2 x 2 ranks cuts a block of 128.
WHOLE_BLOCKS = LlamaConfig(512, 1, 4, 4, 512, vocab_size=128, max_seq_len=256)
DP_TP, DP, TP = {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}
PEERS = [PEER] if PEER in TORCHAO else []
PLANS = [
    *(Plan(SMALL, DP_TP, variant, 2, 32) for variant in ("bf16", "rowwise_folded", *PEERS)),
    *(Plan(SMALL, TP, variant, 2, 32) for variant in ("tensorwise", "delayed")),
    *(Plan(SMALL, DP, variant, 2, 32) for variant in ("tensorwise", "rowwise_with_gw_hp")),
    *(Plan(SMALL, DP_TP, variant, 2, 32) for variant in ("blockwise", "mxfp8")),
    *(Plan(UNEVEN, DP, variant, 2, 32) for variant in ("rowwise_folded", "mxfp8")),
    Plan(WHOLE_BLOCKS, DP_TP, "blockwise", 1, 256),
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
    if PLANS[position].axes["tp"] == 1:  # tensor parallelism has the norms on all ranks
        assert kept == 4 * fake.parameters
    assert fake.weights == real[0].weights == 7 * PLANS[position].model.n_layers


def test_scales_of_blocks_that_no_shard_cuts_cost_no_reduction_in_the_step(
    planned: list[Step],
) -> None:
    rows = planned[[plan.model for plan in PLANS].index(WHOLE_BLOCKS)].collectives
    reduced = {
        row.phase: row.bytes for row in rows if (row.op, row.dtype) == ("all_reduce", "uint8")
    }
    assert reduced == {}
    gathered = {
        (axis, dtype): sum(r.bytes for r in rows if (r.axis, r.dtype) == (axis, dtype))
        for axis in ("dp", "tp")
        for dtype in ("float8_e4m3fn", "uint8")
    }
    # In forward and in backward: 7 weights of 4 x 4 blocks, half of each, and their exponents.
    assert gathered["dp", "float8_e4m3fn"] == 2 * 7 * 512 * 512 // 2
    assert gathered["dp", "uint8"] == 2 * 7 * 16 // 2
    assert gathered["tp", "float8_e4m3fn"] == 128 * gathered["tp", "uint8"] == 4 * 256 * 512


def row(op: str, axis: str, count: int, nbytes: int, dtype: str = "bfloat16") -> Collectives:
    return Collectives("forward", op, axis, dtype, count, nbytes)


def test_tables() -> None:
    rows = [row("all_gather", "dp", 2, 4000, "float8_e4m3fn"), row("all_gather", "dp", 0, 24)]
    first = Plan(SMALL, DP_TP, "tensorwise", 2, 32)
    runs = [
        (first, Step(rows, {"parameters": 1234, "gradients": 5})),
        (replace(first, variant="bf16"), Step([], {"parameters": 1234, "gradients": 0})),
    ]
    shown = [collectives_table(runs), memory_table(runs), growth_table(runs)]
    assert_expected_inline(
        "\n\n".join(shown),
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

| ranks | mesh      | variant    | all_gather | reduce_scatter | all_reduce | of them precompute | float8 GB | all GB | precompute bytes |
| ----- | --------- | ---------- | ---------: | -------------: | ---------: | -----------------: | --------: | -----: | ---------------: |
| 4     | dp=2,tp=2 | tensorwise |          2 |              0 |          0 |                  0 |       0.0 |    0.0 |                0 |
| 4     | dp=2,tp=2 | bf16       |          0 |              0 |          0 |                  0 |       0.0 |    0.0 |                0 |""",
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
        ("--mesh dp:2", "argument --mesh: dp:2: 'dp:2' is not dp=SIZE or tp=SIZE"),
        ("--mesh dp=0", "argument --mesh: dp=0: 'dp=0' is not dp=SIZE or tp=SIZE"),
        ("--mesh shard=2", "argument --mesh: shard=2: 'shard=2' is not dp=SIZE or tp=SIZE"),
        ("--seq-len 8193", "--seq-len 8193 is above the model's max_seq_len=8192"),
        ("--batch-size 0", "argument --batch-size: 0 is not positive"),
        ("--write", "--write needs --scale: the growth table is part of the page"),
    ],
)
def test_options_that_are_refused(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    assert refused(capsys, *argv.split()) == message


def test_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], documents: Path
) -> None:
    monkeypatch.setitem(MODELS, "debug", SMALL)
    monkeypatch.setattr(plan, "WORLDS", (8,))
    argv = ["--model", "debug", "--mesh", "dp=2,tp=2", "--seq-len", "16", "--scale", "--write"]
    assert plan.main(argv) == 0
    shown, page = capsys.readouterr().out, documents / "plan.md"
    for name in ("model", "collectives", "memory", "growth"):
        assert read_block(page, name).partition("\n\n")[2] in shown
    growth = [[c.strip() for c in x.split("|")] for x in read_block(page, "growth").splitlines()]
    assert [tuple(line[1:4]) for line in growth[4:]] == [
        (ranks, mesh, variant)
        for ranks, mesh in (("4", "dp=2,tp=2"), ("8", "dp=4,tp=2"))
        for variant in ("tensorwise", "bf16", *PEERS)
    ]
    # One all-reduce of a number per weight, at both sizes.
    assert [line[7] for line in growth[4:] if line[3] == "tensorwise"] == ["1", "1"]
    assert [line[10] for line in growth[4:] if line[3] == "tensorwise"] == [str(4 * 14)] * 2


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
