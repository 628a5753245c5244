"""scripts/plan: its counts with fake tensors equal those on real ranks, byte for byte."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from expecttest import assert_expected_inline
from ranks import RankPool, RankPools, device_mesh
from torch import nn

from fp8_dist import float8_layers
from fp8_dist.debug import CommRow
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from scripts.common.candidates import TORCHAO
from scripts.common.llama import MODELS, Latent, LlamaConfig
from scripts.common.mixture import Mixture
from scripts.plan import __main__ as plan
from scripts.plan import own_model, pace, run, tables
from scripts.plan.own_model import OwnModel
from scripts.plan.step import PEER, Collectives, Plan, Step, TimedAudit, make_mesh, run_step
from scripts.plan.world import fake_world

WORLD = 4
SMALL = LlamaConfig(64, 2, 8, 4, 96, vocab_size=128, max_seq_len=32)
# Feed-forward weights of 90 rows: 4 FSDP2 shards of them are uneven.
UNEVEN = replace(SMALL, ffn_dim=90)
DP_TP, DP = {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}
EP, EP_TP = {"dp": 2, "ep": 2, "tp": 1}, {"dp": 1, "ep": 2, "tp": 2}
# FSDP2 has more ranks than an EP rank has experts.
FEW = replace(SMALL, mixture=Mixture(2, 2, 64))
LATENT = replace(
    SMALL, mixture=Mixture(8, 2, 64, shared=1, first_dense=1), latent=Latent(32, 46, 16, 16, 16)
)
PEERS = [PEER] if PEER in TORCHAO else []
PACKED_OR_NOT = ("mxfp8", "mxfp8+mxfp4")
BLOCKS = 3


class Blocks(nn.Module):
    """A model for --model: tokens [b, s] in, logits [b, s, v] out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(128, 64)
        blocks = (nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(blocks)
        self.lm_head = nn.Linear(64, 128)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


class Captions(Blocks):
    """A model with two inputs."""

    def forward(self, images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        return super().forward(captions) + images


def own_plan(model: nn.Module, **options: Any) -> dict[str, Any]:
    """The plan of Blocks; row-parallel sums are encoded as `options` say."""
    plan: dict[str, Any] = {}
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.0"] = Float8ColwiseParallel()
        plan[f"blocks.{i}.1"] = Float8RowwiseParallel(**options)
    return plan


def no_plan(model: nn.Module) -> list[str]:
    return ["blocks.0"]


def plan_that_fails(model: nn.Module) -> None:
    raise KeyError("w1")


def hf_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": BLOCKS}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config)


OWN, HF, PLAN = (f"{__name__}:{name}" for name in ("Blocks", "hf_llama", "own_plan"))
SHORT = OwnModel(OWN, layers=2, tp_plan=PLAN)
PLANS = [
    Plan(OwnModel(OWN), DP, 2, 32, "rowwise_folded"),
    Plan(OwnModel(HF), DP_TP, 2, 32, "tensorwise"),
    *(Plan(SHORT, DP_TP, 2, 32, variant) for variant in ("bf16", "tensorwise")),
    Plan(SHORT, DP_TP, 2, 32, "tensorwise", None, "float8"),
    *(Plan(SMALL, DP_TP, 2, 32, variant) for variant in ("bf16", *PEERS)),
    Plan(SMALL, DP_TP, 2, 32, "delayed", "bf16", "float8", gpus_per_node=2),
    *(Plan(SMALL, DP, 2, 32, variant) for variant in PACKED_OR_NOT),
    Plan(SMALL, DP, 2, 32, "tensorwise", "float8", gpus_per_node=2),  # in two hops
    Plan(UNEVEN, DP, 2, 32, "rowwise_folded", gpus_per_node=2),
    Plan(FEW, EP, 2, 32, "mxfp8+mxfp4"),
    Plan(LATENT, EP_TP, 2, 32, "blockwise", gpus_per_node=2),
]


def plan_name(plan: Plan) -> str:
    mesh = "-".join(f"{name}{size}" for name, size in plan.axes.items())
    if isinstance(plan.model, OwnModel):
        return f"{plan.name}-{mesh}-{plan.model.name}"
    return f"{plan.name}-{mesh}-ffn{plan.model.ffn_dim}-{plan.model.latent and 'latent'}"


def on_real_ranks(plan: Plan) -> Step:
    return run_step(plan, device_mesh(**plan.axes), fake_tensors=False)


def on_fake_ranks() -> list[Step]:
    """Run the plans in a fake world, which replaces the default group permanently."""
    dist.destroy_process_group()
    with fake_world(WORLD):
        meshes = {tuple(plan.axes.items()): make_mesh(plan) for plan in PLANS}
        return [run_step(plan, meshes[tuple(plan.axes.items())], True) for plan in PLANS]


@pytest.fixture(scope="module")
def planned() -> list[Step]:
    """The planned steps, in the order of `PLANS`."""
    pool = RankPool(1)  # a process for this alone
    try:
        return pool.run(on_fake_ranks, timeout=480)[0]
    finally:
        pool.close()


@pytest.fixture(scope="module")
def new_ranks(ranks: RankPools) -> RankPool:
    """New ranks. Plans with experts come last: once they flatten the mesh, torch sums over it."""
    ranks(WORLD).close()
    return ranks(WORLD)


@pytest.mark.parametrize("position", range(len(PLANS)), ids=[plan_name(p) for p in PLANS])
def test_a_plan_counts_what_real_ranks_count(
    new_ranks: RankPool, planned: list[Step], position: int
) -> None:
    model = PLANS[position].model
    real = new_ranks.run(on_real_ranks, PLANS[position], timeout=120)
    fake = planned[position]
    # All ranks communicate equally. (So does bf16: no list is empty.)
    assert [each.collectives for each in real] == [fake.collectives] * WORLD
    assert sum(row.count for row in fake.collectives) > 3
    assert [each.seconds for each in real] == [fake.seconds] * WORLD
    assert bool(fake.seconds) == (PLANS[position].gpus_per_node is not None)
    # The plan is for rank 0.
    assert real[0].memory == fake.memory
    kept = sum(each.memory["parameters"] for each in real)
    plan = PLANS[position]
    if plan.axes["tp"] == 1:  # with TP, norms are on all ranks
        assert kept == 4 * fake.parameters
    assert fake.weights == real[0].weights
    if isinstance(model, OwnModel):
        count = model.layers or BLOCKS
        assert (fake.weights, fake.blocks) == ((7 if model.name == HF else 2) * count, count)
        return
    if model.latent is None:  # q, k, v, o, and three in the feed-forward
        assert (fake.weights, fake.blocks) == (7 * model.n_layers, model.n_layers)
    sent = [row.axis for row in fake.collectives if row.op == "all_to_all" and row.dtype == "int64"]
    assert len(sent) == (model.mixture is not None)


def test_packed_gathers(planned: list[Step]) -> None:
    whole, packed = (planned[PLANS.index(Plan(SMALL, DP, 2, 32, name))] for name in PACKED_OR_NOT)
    steps = (whole, "float8_e4m3fn"), (packed, "float4_e2m1fn_x2")
    sizes = [sum(r.bytes for r in s.collectives if r.dtype == dtype) for s, dtype in steps]
    assert sizes[0] == 2 * sizes[1] > 0
    args = plan.parse_args(["--recipe", "mxfp8", "--weight-format", "mxfp4"])
    assert [each.variant for each in run.plans_of(args)][:2] == [*PACKED_OR_NOT]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The error message with which the script ends."""
    with pytest.raises(SystemExit, match=r"^2$"):
        plan.parse_args(list(argv))
    return capsys.readouterr().err.rpartition("error: ")[2].strip()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mesh dp=4096,tp=8", "--mesh dp=4096,tp=8: more than 16,384 ranks"),
        ("--mesh dp:2", "argument --mesh: dp:2: 'dp:2' is not dp=SIZE or ep=SIZE or tp=SIZE"),
        ("--seq-len 8193", "--seq-len 8193 is above the model's max_seq_len=8192"),
        ("--mesh dp=2,ep=2", "ep=2 needs a --model with experts"),
        (
            "--model deepseek_v3 --mesh ep=3 --recipe mxfp8",
            "ep x tp = 3 does not divide 256 experts",
        ),
        ("--model moe --mesh dp=2 --recipe delayed", "--recipe delayed is not for experts"),
        (
            "--model moe --mesh dp=2 --gradient-transport bf16",
            "--gradient-transport is not for experts, which have axes of their own",
        ),
        (
            "--recipe mxfp8 delayed --weight-format mxfp4",
            "--weight-format mxfp4 is for --recipe mxfp8 or blockwise",
        ),
        ("--gbps-between 0", "--gbps-within and --gbps-between must be above 0"),
        ("--gradient-transport bf16 --mesh tp=8", "--gradient-transport needs a dp of 2 or more"),
        (
            f"--model {OWN} --mesh dp=2",
            f"--model {OWN} does not say how many tokens it takes: give --seq-len",
        ),
        (
            f"--model {HF} --seq-len 33 --mesh dp=2",
            "--seq-len 33 is above the model's max_seq_len=32",
        ),
        (f"--tp-plan {PLAN} --mesh tp=2", "--tp-plan is for a function's model: 405b has a plan"),
        (
            f"--model {OWN} --tp-plan {PLAN} --mesh dp=2",
            "--tp-plan needs a tp of 2 or more in --mesh",
        ),
        (
            f"--model {OWN} --mesh tp=2 --tp-plan {__name__}:no_plan",
            f"--tp-plan {__name__}:no_plan: it returned a list, not names with parallel styles",
        ),
        (
            f"--model {OWN} --mesh tp=2 --tp-plan {__name__}:plan_that_fails",
            f"--tp-plan {__name__}:plan_that_fails: KeyError: 'w1'",
        ),
        (
            f"--model {OWN} --mesh dp=2 --layers 4",
            "--layers 4: the ModuleLists of the model have 3 blocks",
        ),
        (
            f"--model {__name__}:Captions --mesh dp=2",
            f"--model {__name__}:Captions: a plan gives the model one input, tokens [b, s], but "
            "its forward takes (images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor: "
            "missing a required argument: 'captions'. Return a module that makes the other inputs "
            "from tokens",
        ),
    ],
)
def test_options_that_are_refused(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    assert refused(capsys, *argv.split()) == message


def tables_of(printed: str) -> dict[str, list[list[str]]]:
    """The cells of the printed tables, by title, without headings."""
    parts = printed.split("\n\n")
    return {
        title.strip(): [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        for title, text in pairwise(parts)
        if text.startswith("|") and (lines := text.splitlines()[2:])
    }


def test_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(MODELS, "debug", SMALL)
    argv = ["--model", "debug", "--mesh", "dp=2,tp=2", "--seq-len", "16", "--layers=2"]
    assert plan.main([*argv, "--gradient-transport", "float8"]) == 0
    said = capsys.readouterr()
    count = 3 + len(PEERS)
    assert f"planning {count} steps, " in said.err
    assert f"{count} of {count} steps are planned\n" in said.err
    assert f"\n1 of {count} steps are planned, about " in said.err
    found = tables_of(said.out)
    assert found.keys() == {"summary", "axes", "collectives", "memory"}
    assert found["memory"][-1][0] == "besides, about: NCCL"
    summary = {line[0]: line for line in found["summary"]}
    encoded = "tensorwise, float8 gradients"
    assert [*summary] == ["tensorwise", "bf16", *PEERS, encoded]
    # One all-reduce, with one number per weight.
    assert (summary["tensorwise"][5], summary["tensorwise"][8]) == ("1", str(4 * 14))
    by_axis = {axis: [int(n.replace(",", "")) for n in sent] for axis, *sent in found["axes"]}
    assert by_axis.keys() == {"dp", "tp", "world"}
    assert by_axis["dp"][0] < by_axis["dp"][1]
    assert by_axis["tp"][0] < by_axis["tp"][1]


def test_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(MODELS, "debug", SMALL)
    monkeypatch.setattr(run, "TORCHAO", {})
    argv = ["--model", "debug", "--mesh", "dp=4,tp=2", "--gpus-per-node", "4"]
    # The first run is bound by links within nodes, the second by those between nodes.
    printed = []
    for slow in (["--gbps-within=1e-5"], ["--gbps-within=10", "--gbps-between=1e-5"]):
        assert plan.main([*argv, *slow]) == 0
        printed.append(tables_of(capsys.readouterr().out))
    assert_expected_inline(
        "\n".join(map(" | ".join, printed[0]["axes"])),
        """\
dp | 235,908 | 297,348
dp, sent within nodes | 88,467 | 111,507
dp, sent between nodes | 88,467 | 111,507
tp | 74,456 | 90,752
tp, sent within nodes | 37,592 | 45,696
tp, sent between nodes | 0 | 0
world | 60 | 4
world, sent within nodes | 80 | 6
world, sent between nodes | 25 | 1""",
    )
    rows = [line for found in printed for line in found["summary"]]
    assert_expected_inline(
        "\n".join(" | ".join([row[0], *row[8:]]) for row in rows),
        """\
tensorwise | 56 | 0.00013 | 8.8e-05 | 12613.9 | 0.0018 | 12613.9
bf16 | 0 | 0.00016 | 0.00011 | 15720.9 | 0.0022 | 15720.9
tensorwise | 56 | 0.00013 | 8.8e-05 | 0.013 | 8849.2 | 8849.2
bf16 | 0 | 0.00016 | 0.00011 | 0.016 | 11150.8 | 11150.8""",
    )


def test_hops_take_the_sum_of_their_times() -> None:
    audit = TimedAudit(None, Plan(SMALL, DP, 2, 32, "bf16", None, None, 2, 4.0, 1.0))
    row = CommRow("all_to_all", "dp", torch.uint8, "", False, 1, 80, 80, 80)
    audit.add(replace(row, bytes_within=40, bytes_between=3))
    audit.add(replace(row, bytes_between=20))
    assert (len(audit.rows), round(audit.seconds * 1e12)) == (1, 30_000)


def test_the_memory_of_nccl_follows_from_nodes() -> None:
    """Channels for all-to-alls lead to the ranks of the node that the axis joins."""
    sizes = {"dp": 16, "tp": 8}
    for axes, per_node, exchanging, peers in (
        ({"dp": 16}, None, ["dp"], 7),
        ({"dp": 16}, 4, ["dp"], 3),
        ({"dp": 4}, 8, ["dp"], 3),
        (sizes, 8, ["dp"], 0),  # tensor parallelism fills the node
        (sizes, 8, ["dp", "tp"], 7),
        ({"dp": 16, "tp": 2}, 8, ["dp", "tp"], 3 + 1),
        ({"dp": 16, "tp": 2}, 8, [], 0),
    ):
        planned = Plan(SMALL, axes, 1, 16, "tensorwise", gpus_per_node=per_node)
        rows = [Collectives("forward", "all_gather", axis, "uint8", 1, 1) for axis in axes]
        rows += [Collectives("backward", "all_to_all", axis, "uint8", 1, 1) for axis in exchanging]
        expected = tables.COMMUNICATOR * len(axes) + tables.PEER * peers
        assert tables._nccl_bytes(planned, Step(rows)) == expected, (axes, per_node)


def test_models_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", HF, "--recipe", "mxfp8", "--weight-format", "mxfp4"]
    assert plan.parse_args(own).mesh == {"dp": 8, "tp": 1}
    args = plan.parse_args([*own, "--mesh", "dp=2,tp=4"])
    assert (args.sizes, args.seq_len) == (OwnModel(HF), 32)
    variants = [each.variant for each in run.plans_of(args)]
    assert variants == ["mxfp8", "mxfp8+mxfp4", "bf16"]  # torchao has no plan for tp
    missing = refused(capsys, "--model", f"{__name__}:nothing")
    assert "it can't be imported: AttributeError: module" in missing
    unplanned = refused(capsys, "--model", OWN, "--mesh", "tp=2")
    assert "it declares no plan: neither _tp_plan nor base_model_tp_plan" in unplanned
    assert "name a function that makes the model's tensor-parallel plan by --tp-plan" in unplanned
    skipping = plan.parse_args(["--model", OWN, "--seq-len", "16", "--skip", "1.0", "1.1"])
    model, _ = own_model.converted("tensorwise", skipping.sizes, 1, None)
    assert [*float8_layers(model)] == [f"blocks.{i}.{j}" for i in (0, 2) for j in (0, 1)]
    assert "--skip is for a function's model" in refused(capsys, "--model", "8b", "--skip", "w1")
    own = ["--model", OWN, "--mesh", "tp=2", "--tp-plan", PLAN, "--layers", "2", "--seq-len", "16"]
    assert plan.parse_args(own).sizes == SHORT


def test_a_step_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block takes 50 s, each other one 4 s."""
    times = iter([0.0, 50.0, 54.0, 58.0, 62.0, 66.0])
    monkeypatch.setattr(pace, "monotonic", lambda: next(times))
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    step = pace.Pace("tensorwise", [*model])
    step.phase("forward")
    for block in model:
        block(torch.ones(2))
    step.phase("backward")
    step.phase("optimizer")
    assert_expected_inline(
        capsys.readouterr().err,
        """\
tensorwise: forward
tensorwise: block 2 of 5, about 42 s left
tensorwise: block 5 of 5, about 30 s left
tensorwise: backward, about 30 s left
tensorwise: optimizer, about 8 s left
""",
    )


def test_steps_that_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> Step:
        raise RuntimeError("it reads values")

    monkeypatch.setattr(run, "run_step", stopped)
    monkeypatch.setattr(run, "make_mesh", lambda plan: None)
    monkeypatch.setattr(run, "fake_world", lambda ranks: nullcontext())
    monkeypatch.setattr(run, "run_all", lambda plans: [run.run_fake(plan) for plan in plans])
    assert plan.main(["--model", OWN, "--mesh", "dp=2", "--seq-len", "16"]) == 2
    said = f"--model {OWN}: a step of tensorwise: RuntimeError: it reads values\nA model is given "
    assert f"{said}tokens [b, s], and must return logits [b, s, v]" in capsys.readouterr().err
    peer = Plan(SMALL, DP, 2, 32, PEER)
    assert run.run_fake(peer) == f"{PEER} on 4 ranks stopped: RuntimeError: it reads values"
    with pytest.raises(RuntimeError, match="it reads values"):
        run.run_fake(replace(peer, variant="bf16"))
