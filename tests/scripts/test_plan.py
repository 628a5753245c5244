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
from scripts.plan.step import (
    ERRORS,
    PEER,
    Collectives,
    Gradients,
    Plan,
    Step,
    make_hierarchy,
    make_mesh,
    run_step,
)
from scripts.plan.tables import (
    collectives_table,
    differences_table,
    growth_table,
    memory_table,
)
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
    Plan(SMALL, DP_TP, "tensorwise", 2, 32, Gradients("bf16", reduce_transport="float8")),
    Plan(UNEVEN, DP, "bf16", 2, 32, Gradients("bf16")),
    Plan(UNEVEN, DP, "tensorwise", 2, 32, Gradients("float8", error_feedback=True)),
    Plan(SMALL, DP, "tensorwise", 2, 32, Gradients("float8", nodes=2)),
    Plan(SMALL, DP_TP, "tensorwise", 2, 32, Gradients("float8")),
]


def plan_name(plan: Plan) -> str:
    mesh = "-".join(f"{name}{size}" for name, size in plan.axes.items())
    return f"{plan.name}-{mesh}-ffn{plan.model.ffn_dim}"


def on_real_ranks(plan: Plan) -> Step:
    hierarchy = None
    if plan.gradients is not None and plan.gradients.nodes > 1:
        hierarchy = device_mesh(node=2, local=2, tp=1)["node", "local"]
    return run_step(plan, device_mesh(**plan.axes), fake_tensors=False, hierarchy=hierarchy)


def on_fake_ranks() -> list[Step]:
    """Takes the default group's place for good."""
    dist.destroy_process_group()
    with fake_world(WORLD):
        meshes = {tuple(plan.axes.items()): make_mesh(plan) for plan in PLANS}
        return [
            run_step(plan, meshes[tuple(plan.axes.items())], True, make_hierarchy(plan))
            for plan in PLANS
        ]


@pytest.fixture(scope="module")
def planned() -> list[Step]:
    """By the position in `PLANS`."""
    pool = RankPool(1)  # a process used for nothing else
    try:
        return pool.run(on_fake_ranks, timeout=480)[0]
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


def test_gradients_that_travel_in_fewer_bytes(planned: list[Step]) -> None:
    def of(plan: Plan) -> Step:
        return planned[PLANS.index(plan)]

    def sent(plan: Plan) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for r in of(plan).collectives:
            is_sum = r.op in ("reduce_scatter", "all_to_all")
            if is_sum and r.phase == "backward" and r.axis != "tp":
                found[r.op, r.axis] = found.get((r.op, r.axis), 0) + r.bytes
        return found

    flat, tp, nodes = PLANS[4 + 1], PLANS[-1], PLANS[-2]
    whole = sent(flat)["reduce_scatter", "dp"]
    assert nodes == replace(flat, gradients=Gradients("float8", nodes=2))
    first = sent(nodes)["all_to_all", "local"]
    # Rows of this small model have exponents of blocks that are not full, and norms in fp32.
    assert 0.25 * whole < first < 0.28 * whole
    # A rank has the sums of its node for both nodes.
    assert sent(nodes) == {("all_to_all", "local"): first, ("all_to_all", "node"): first // 2}
    assert sent(tp).keys() == {("all_to_all", "dp")}
    assert of(nodes).memory[ERRORS] == of(tp).memory[ERRORS] == 0
    kept = of(PLANS[-3])
    rounded = kept.memory["parameters"] // 4 * WORLD
    assert rounded < kept.memory[ERRORS] < 1.05 * rounded


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
        ("--nodes 2", "--nodes needs --gradient-transport"),
        ("--error-feedback", "--error-feedback needs --gradient-transport"),
        ("--reduce-transport bf16", "--reduce-transport needs --gradient-transport"),
        (
            "--gradient-transport bf16 --reduce-transport bf16 --recipe bf16",
            "--reduce-transport is for tensor parallelism of converted layers",
        ),
        (
            "--gradient-transport bf16 --scale",
            "--scale plans other worlds, --gradient-transport other gradients: not both",
        ),
        (
            "--gradient-transport bf16 --mesh tp=8",
            "--gradient-transport needs a --mesh with dp: nothing else reduces gradients",
        ),
        ("--gradient-transport bf16 --nodes 3", "--nodes 3 must be 2 or more, and divide dp=2048"),
        ("--gradient-transport bf16 --nodes 1", "--nodes 1 must be 2 or more, and divide dp=2048"),
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


def test_a_run_of_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], documents: Path
) -> None:
    monkeypatch.setitem(MODELS, "debug", SMALL)
    argv = "--model debug --mesh dp=8,tp=2 --seq-len 16 --write --gradient-transport bf16 float8"
    more = "--nodes 4 --error-feedback --reduce-transport float8"
    assert plan.main([*argv.split(), *more.split()]) == 0
    shown = read_block(documents / "plan.md", "gradients").partition("\n\n")[2]
    assert shown in capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")][1:-1] for line in shown.splitlines()[2:]]
    assert [line[0] for line in cells] == [
        "tensorwise",
        "tensorwise, bf16 gradients",
        "tensorwise, float8 gradients",
        "tensorwise, float8 gradients, 4 nodes",
        "tensorwise, float8 gradients, error feedback",
        "tensorwise, float8 gradients, float8 in TP",
    ]
    found = [[own.split(":")[0] for own in line[1].split("; ")] for line in cells]
    float8 = "float8_e4m3fn + float32 + uint8"
    assert found == [
        ["reduce_scatter tp bfloat16", "reduce_scatter dp float32"],
        ["all_to_all dp bfloat16 + float32"],
        [f"all_to_all dp {float8}"],
        [f"all_to_all local {float8}", f"all_to_all node {float8}"],
        [f"all_to_all dp {float8}"],
        [
            "all_to_all tp float8_e4m3fn + uint8",
            "reduce_scatter tp bfloat16",
            f"all_to_all dp {float8}",
        ],
    ]
    total = [int(line[3].replace(",", "")) for line in cells]
    assert total[0] > total[1] > total[3] > total[2] == total[4] > total[5]


def test_a_plan_of_fewer_blocks() -> None:
    sizes = plan.parse(["--layers", "2"]).sizes
    assert sizes == replace(MODELS["405b"], n_layers=2)
    assert {each.model.n_layers for each in plan.plans_of(plan.parse(["--layers", "3"]))} == {3}
    assert plan.parse([]).sizes == MODELS["405b"]


def test_table_of_differences() -> None:
    first = Plan(SMALL, DP, "tensorwise", 2, 32)
    nodes = replace(first, gradients=Gradients("float8", nodes=2))
    gather = row("all_gather", "dp", 2, 6000)
    stages = [
        row("all_to_all", "local", 2, 400, "uint8"),
        row("all_to_all", "node", 2, 200, "uint8"),
    ]
    runs = [
        (first, Step([gather, row("reduce_scatter", "dp", 2, 4000, "float32")], {})),
        (nodes, Step([gather, *stages], {ERRORS: 1010})),
    ]
    assert_expected_inline(
        differences_table(runs),
        """\
| variant                               | its own collectives                                                 | mean bytes for a rank | bytes of all collectives | of the first | errors kept, B |
| ------------------------------------- | ------------------------------------------------------------------- | --------------------: | -----------------------: | -----------: | -------------: |
| tensorwise                            | reduce_scatter dp float32: 2 (4,000 B)                              |                   500 |                   10,000 |        1.000 |              0 |
| tensorwise, float8 gradients, 2 nodes | all_to_all local uint8: 2 (400 B); all_to_all node uint8: 2 (200 B) |               100; 50 |                    6,600 |        0.660 |          1,010 |""",
    )


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
