"""Tensor-parallel plans of transformers' models, on ranks, against one device.

An unconverted model has a gradient of at least 80 dB (SQNR) for each parameter on ranks. In float8, a
sum in another order makes a rare value round to another code, which may grow: logits and the
gradient of all parameters have at least 35 dB, and that of each parameter 12 dB. A gradient of one
of two ranks alone, or one that is summed twice, has 6 dB or less.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill, indent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hf_models import (
    KINDS,
    SMALL,
    VOCABULARY,
    batch,
    batch_with_images,
    build,
    build_with_images,
    converted,
)
from nets import full
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
)

from fp8_dist import (
    convert_to_float8_training,
    float8_layers,
    skip_head,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit
from fp8_dist.debug.communication.table import CommRow
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan

# Gathers in high precision in a step with sequence parallelism, besides those of the head's input,
# the logits, and the embedding's gradient. Routed experts: input, and gradient of the output.
# Phi-3: outputs of fused layers, and gradients of the layers that split their input.
OTHER_GATHERS = {"mixtral": 4, "qwen3_moe": 4, "glm4_moe": 2, "llama4": 4, "phi3": 8}
# Blocks, of which each gathers its input and the gradient of its output in float8.
BLOCKS = {"mixtral": 2, "qwen3_moe": 2, "glm4_moe": 3, "llama4": 2}
# Elements of the bias's gradients that row-parallel Float8Linears sum in the backward.
BIAS_GRADIENTS = {"phi": 4 * 64}
WITH_HEAD = [kind for kind in KINDS if kind != "llama_base"]


@dataclass
class Step:
    """A step on ranks beside the same on one device.

    Attributes:
        loss: its difference.
        logits, gradient: SQNR in dB; of all parameters together.
        worst, worst_plain: SQNR of the gradient of the worst parameter. And in the unconverted model.
        moved, moved_plain: elements by kind of collective, without amaxes; the same of the
            unconverted model.
        gathers: how many all-gathers over the tensor-parallel axis, by dtype.
    """

    loss: float
    logits: float
    gradient: float
    worst: float
    worst_plain: float
    moved: Counter[str]
    moved_plain: Counter[str]
    gathers: Counter[str]


def planned(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The model, parallelized; routed experts are a test of their own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hf_tp_plan leaves routed experts")
        return apply_tp_plan(model, mesh, hf_tp_plan(model, **options))


def backward(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> Any:
    output = model(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    return output


def gradients(model: nn.Module, twin: nn.Module) -> tuple[float, float]:
    """SQNR against the gradient of a model's twin: of all parameters together, and of the worst."""
    found, expected = dict(model.named_parameters()), dict(twin.named_parameters())
    assert found.keys() == expected.keys()
    pairs = [(p.grad, full(found[name].grad)) for name, p in expected.items()]
    together = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
    return sqnr(*together), min(sqnr(*pair) for pair in pairs)


def without_amaxes(rows: list[CommRow]) -> Counter[str]:
    """Elements by kind of collective."""
    moved: Counter[str] = Counter()
    for row in rows:
        moved[row.op] += row.elements if row.dtype != torch.int32 else 0
    return moved


def gathers(rows: list[CommRow], axis: str = "tp") -> Counter[str]:
    """How many all-gathers over an axis, by dtype."""
    found: Counter[str] = Counter()
    for row in rows:
        if row.op == "all_gather" and row.axis == axis:
            found[str(row.dtype).removeprefix("torch.")] += row.count
    return found


def step(kind: str, length: int = 16, config: dict[str, Any] | None = None, **options: Any) -> Step:
    """Runs on two ranks; ``options`` are those of the plan."""
    mesh, config = device_mesh(tp=2), config or {}
    ids = batch(0, length=length)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    losses, logits, worst, audits = [], [], [], []
    for make in (converted, build):
        model, twin = planned(make(kind, **config), mesh, **options), make(kind, **config)
        with comm_audit(mesh) as audit:
            output = backward(model, ids, attention_mask=mask)
        expected = backward(twin, ids, attention_mask=mask)
        losses.append(abs(output.loss.item() - expected.loss.item()))
        logits.append(sqnr(expected.logits, output.logits))
        worst.append(gradients(model, twin))
        audits.append(audit.rows)
    return Step(
        loss=losses[0],
        logits=logits[0],
        gradient=worst[0][0],
        worst=worst[0][1],
        worst_plain=worst[1][1],
        moved=without_amaxes(audits[0]),
        moved_plain=without_amaxes(audits[1]),
        gathers=gathers(audits[0]),
    )


def gathers_of(kind: str) -> dict[str, int]:
    """Gathers of a step with sequence parallelism, by dtype."""
    blocks = BLOCKS.get(kind, 4)
    high = 3 + OTHER_GATHERS.get(kind, 0)
    return {"float8_e4m3fn": blocks, "float8_e5m2": blocks, "float32": high}


def check(kind: str, found: Step) -> None:
    assert found.loss < 1e-3
    assert found.logits > 35
    assert found.gradient > 35
    assert found.worst > 12
    assert found.worst_plain > 80
    # What the unconverted model moves, some of it in float8.
    biases = {"all_reduce": BIAS_GRADIENTS.get(kind, 0)}
    assert found.moved == found.moved_plain + Counter(biases)


@pytest.mark.parametrize("kind", WITH_HEAD)
def test_sequence_parallel(ranks: RankPools, kind: str) -> None:
    for found in ranks(2).run(step, kind):
        check(kind, found)
        assert found.gathers == gathers_of(kind)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3", "glm4_moe"])
def test_without_sequence_parallelism(ranks: RankPools, kind: str) -> None:
    for found in ranks(2).run(step, kind, sequence_parallel=False):
        check(kind, found)
        assert found.gathers == {"float32": 9 if kind == "phi3" else 1}
        assert set(found.moved) == {"all_reduce", "all_gather"}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi", "glm4_moe"])
@pytest.mark.parametrize("length", [15, 3])
def test_sequences_that_ranks_cannot_share_evenly(ranks: RankPools, kind: str, length: int) -> None:
    for found in ranks(2).run(step, kind, length):
        check(kind, found)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_eager_attention(ranks: RankPools, kind: str) -> None:
    for found in ranks(2).run(step, kind, config={"attn_implementation": "eager"}):
        check(kind, found)


def test_all_collectives_of_a_step(ranks: RankPools) -> None:
    first, second = ranks(2).run(table_of_a_step)
    assert first == second
    page = (Path(__file__).parents[3] / "docs/transformers.md").read_text()
    assert indent(first.partition("total")[0], "    ") in page
    assert_expected_inline(
        first,
        """\
op              axis  dtype          count  elements    bytes
reduce_scatter  tp    float32            6    24,576   98,304
all_reduce      tp    int32             15        18       72
all_gather      tp    float8_e4m3fn      2     8,192    8,192
all_gather      tp    float32            3    24,576   98,304
all_gather      tp    float8_e5m2        2     8,192    8,192
total                                   28            213,064
  float8                                               16,384
  other                                               196,680""",
    )


def table_of_a_step() -> str:
    mesh = device_mesh(tp=2)
    model = planned(converted("llama", num_hidden_layers=1), mesh)
    with comm_audit(mesh) as audit:
        backward(model, batch(0))
    return audit.table()


# ---- with FSDP2


def sharded(kind: str, **config: Any) -> tuple[nn.Module, DeviceMesh, dict[str, int]]:
    """A model on four ranks, FSDP2 over its layers and the rest; elements per tp rank by name."""
    mesh = device_mesh(dp=2, tp=2)
    model = planned(converted(kind, fsdp=True, **config), mesh["tp"])
    sizes = {name: local(p).numel() for name, p in model.named_parameters()}
    for layer in (*getattr(model, "model", model).layers, model):
        fully_shard(layer, mesh=mesh["dp"])
    return model, mesh, sizes


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(ids: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The rows of a data-parallel rank."""
    return ids.chunk(2)[mesh.get_local_rank("dp")]


@dataclass
class ShardedStep:
    """As in Step; ``weights`` and ``expected``: elements that FSDP2 gathered, by dtype."""

    logits: float
    gradient: float
    worst: float
    gathers: Counter[str]
    weights: Counter[str]
    expected: Counter[str]


def fsdp_step(kind: str) -> ShardedStep:
    """Runs on four ranks."""
    model, mesh, sizes = sharded(kind)
    twin, ids = converted(kind), batch(0)
    with comm_audit(mesh) as audit:
        output = backward(model, part(ids, mesh))
    halves = [twin(input_ids=half, labels=half) for half in ids.chunk(2)]
    (sum(each.loss for each in halves) / 2).backward()
    together, worst = gradients(model, twin)
    weights: Counter[str] = Counter()
    for row in audit.rows:
        if row.op == "all_gather" and row.axis == "dp":
            weights[str(row.dtype)] += row.elements
    float8 = {f"{name}.weight" for name in float8_layers(twin)}
    expected: Counter[str] = Counter()
    for name, size in sizes.items():
        # Layers are gathered again for the backward.
        times = 2 if ".layers." in name else 1
        expected["torch.float8_e4m3fn" if name in float8 else "torch.float32"] += times * size
    return ShardedStep(
        sqnr(halves[mesh.get_local_rank("dp")].logits, output.logits),
        together,
        worst,
        gathers(audit.rows),
        weights,
        expected,
    )


@pytest.mark.parametrize("kind", WITH_HEAD)
def test_fsdp_and_sequence_parallel(ranks: RankPools, kind: str) -> None:
    for found in ranks(4).run(fsdp_step, kind):
        assert found.logits > 35
        assert found.gradient > 35
        assert found.worst > 12
        assert found.gathers == gathers_of(kind)
        assert found.weights == found.expected


STEPS = 20


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, mesh: DeviceMesh | None = None) -> list[float]:
    """The losses of some steps, the means over all data-parallel ranks."""
    optimizer, losses = optimizer_of(model), []
    for number in range(STEPS):
        ids = batch(number, rows=8, length=32)
        loss = backward(model, part(ids, mesh) if mesh else ids).loss.detach()
        if mesh:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(model)
        losses.append(loss.item())
    return losses


def train_on_mesh() -> list[float]:
    model, mesh, _ = sharded("llama")
    return train(model, mesh)


def test_losses_of_a_run(ranks: RankPools) -> None:
    losses = ranks(4).run_same(train_on_mesh)
    expected = train(converted("llama"))
    distances = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
    assert expected[-1] < 0.8 * expected[0]
    assert max(distances) <= 1e-2
    assert fmean(distances) <= 2e-3


def save_on_mesh(kind: str, folder: str) -> tuple[float, bool]:
    """A step, then the checkpoint: the loss that comes next, and whether weights are tied."""
    model, mesh, _ = sharded(kind)
    optimizer = optimizer_of(model)
    backward(model, part(batch(0), mesh))
    optimizer.step()
    update_float8_scales(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    with torch.no_grad():
        loss = model(input_ids=batch(1), labels=batch(1)).loss.item()
    return loss, model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_save_and_load_in_plain_transformers(ranks: RankPools, kind: str, tmp_path: Path) -> None:
    loss, tied = ranks(4).run_same(save_on_mesh, kind, str(tmp_path))
    assert tied == (kind == "llama_tied")
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert plain(input_ids=batch(1), labels=batch(1)).loss.item() == pytest.approx(
            loss, rel=1e-3
        )
        convert_to_float8_training(plain, module_filter_fn=skip_head(plain))
        assert plain(input_ids=batch(1), labels=batch(1)).loss.item() == pytest.approx(
            loss, rel=1e-5
        )


# ---- what users do with a model


def generate(kind: str, sequence_parallel: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Runs on two ranks: what the ranks write, and what one device does."""
    texts = []
    for model in (converted(kind), converted(kind)):
        if not texts:
            planned(model, device_mesh(tp=2), sequence_parallel=sequence_parallel)
        model.eval()
        ids = batch(0, rows=2, length=7)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        short = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        again = model.generate(ids[:, :3], max_new_tokens=4, do_sample=False, use_cache=False)
        texts.append([*short.tolist(), *again.tolist()])
    return texts[0], texts[1]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_generate(ranks: RankPools, kind: str, sequence_parallel: bool) -> None:
    for found, expected in ranks(2).run(generate, kind, sequence_parallel):
        assert found == expected


def with_images(kind: str) -> tuple[str, float, float]:
    """Runs on two ranks: the refusal, and then gradients, as they are and in float8."""
    mesh, inputs, found = device_mesh(tp=2), batch_with_images(kind), []
    message = raised(ValueError, lambda: hf_tp_plan(build_with_images(kind)))
    for is_converted in (False, True):
        model, twin = build_with_images(kind), build_with_images(kind)
        if is_converted:
            for each in (model, twin):
                convert_to_float8_training(each, module_filter_fn=skip_head(each))
        planned(model, mesh, sequence_parallel=False)
        for each in (model, twin):
            each(**inputs).loss.backward()
        found.append(gradients(model, twin))
    return message, found[0][1], found[1][0]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_models_of_text_and_images(ranks: RankPools, kind: str) -> None:
    for message, worst, together in ranks(2).run(with_images, kind):
        assert message == (
            f"hf_tp_plan: {type(build_with_images(kind)).__name__} merges other inputs, such as "
            "images, into its embeddings, which needs the whole sequence: give "
            "sequence_parallel=False"
        )
        assert worst > 80
        assert together > 35


def checkpointed_step(kind: str, reentrant: bool) -> tuple[float, float]:
    """Runs on two ranks. Checkpointing is enabled before, or after, the plan is applied."""
    model, twin, mesh = converted(kind), converted(kind), device_mesh(tp=2)
    if not reentrant:
        planned(model, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        older = getattr(model, "gradient_checkpointing_enable", None)  # in earlier releases
        enable = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": reentrant})
    if reentrant:
        planned(model, mesh)
    backward(model.train(), batch(0))
    backward(twin, batch(0))
    return gradients(model, twin)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(ranks: RankPools, kind: str, reentrant: bool) -> None:
    for together, worst in ranks(2).run(checkpointed_step, kind, reentrant):
        assert together > 35
        assert worst > 12


def encoded(kind: str) -> tuple[float, float, Counter[str]]:
    """Against the same model with torch's reduce-scatters: logits, gradients; the sums of a step."""
    mesh, ids = device_mesh(tp=2), batch(0)
    model = planned(converted(kind), mesh, reduce_transport="float8")
    other, counts = planned(converted(kind), mesh), Counter[str]()
    with comm_audit(mesh) as audit:
        output = backward(model, ids)
    expected = backward(other, ids)
    for row in audit.rows:
        counts[row.op] += row.count
    ours = torch.cat([full(p.grad).flatten() for p in model.parameters()])
    theirs = torch.cat([full(p.grad).flatten() for p in other.parameters()])
    return sqnr(expected.logits, output.logits), sqnr(theirs, ours), counts


# Of each block the output, and the gradient of the input. Two of Llama 4's blocks stand in replicated
# ones, and all-reduce.
@pytest.mark.parametrize(("kind", "sums"), [("llama", 8), ("llama4", 4)])
def test_reductions_in_float8(ranks: RankPools, kind: str, sums: int) -> None:
    for logits, gradients_of_all, counts in ranks(2).run(encoded, kind):
        assert 20 < logits < 60
        assert gradients_of_all > 20
        assert (counts["all_to_all"], counts["reduce_scatter"]) == (sums, 2)


def test_reductions_that_a_plan_does_not_have() -> None:
    assert_expected_inline(
        refusal(
            ValueError,
            lambda: hf_tp_plan(
                converted("llama"), sequence_parallel=False, reduce_transport="float8"
            ),
        ),
        """\
hf_tp_plan: reduce_transport='float8' applies to the reduce-scatters of converted layers, which
this plan doesn't have: convert the model before, with sequence_parallel=True""",
    )


def loss_parallel_step() -> tuple[float, float, tuple[int, ...]]:
    """Runs on two ranks: SQNR of the gradient, the loss's difference, the logits' local shape."""
    model, twin = (
        planned(converted("llama"), device_mesh(tp=2), loss_parallel=True),
        converted("llama"),
    )
    with loss_parallel():
        output = backward(model, batch(0))
    expected = backward(twin, batch(0))
    difference = abs(full(output.loss).item() - expected.loss.item())
    return gradients(model, twin)[0], difference, tuple(output.logits.to_local().shape)


def test_loss_parallel(ranks: RankPools) -> None:
    for gradient, difference, shape in ranks(2).run(loss_parallel_step):
        assert gradient > 35
        assert difference < 1e-3
        assert shape == (4, 16, VOCABULARY // 2)


def base_model_step(length: int) -> tuple[float, float, float]:
    """Runs on two ranks: a model without a head, and with embeddings that the user gives."""
    model, twin = planned(converted("llama_base"), device_mesh(tp=2)), converted("llama_base")
    ids = batch(0, length=length)
    outputs = [each(input_ids=ids).last_hidden_state for each in (model, twin)]
    assert not isinstance(outputs[0], DTensor)
    for output in outputs:
        output[:, -1].square().mean().backward()
    embedded = twin.embed_tokens(ids).detach()
    given = model(inputs_embeds=embedded).last_hidden_state
    return sqnr(outputs[1], outputs[0]), gradients(model, twin)[0], sqnr(outputs[1], given)


@pytest.mark.parametrize("length", [16, 15])
def test_model_without_a_head(ranks: RankPools, length: int) -> None:
    for found in ranks(2).run(base_model_step, length):
        assert min(found) > 35


# ---- plans, in one process


@pytest.fixture
def fake_world() -> Iterator[DeviceMesh]:
    """A mesh of 4 ranks in one process; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def show(plan: dict[str, ParallelStyle]) -> str:
    """One line per entry outside of layers.1: name, style, and where it moves what."""
    lines = []
    for name, style in plan.items():
        moves = [
            f"{key.removesuffix('_layouts')}={','.join(map(short, vars(style)[key]))}"
            for key in ("input_layouts", "output_layouts")
            if key in vars(style)
        ]
        if ".1" not in name:
            lines.append(" ".join([name, type(style).__name__, *moves]))
    return "\n".join(lines)


def short(placement: object) -> str:
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R"


def filled(text: str) -> str:
    """In lines of at most 95 characters."""
    return "\n".join(fill(line, 95) for line in text.splitlines())


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    return filled(raised(error, call))


def test_plan_of_a_llama() -> None:
    plan = show(hf_tp_plan(converted("llama")))
    assert show(hf_tp_plan(build("llama"))) == plan.replace("Float8", "")
    assert_expected_inline(
        plan,
        """\
model.embed_tokens SequenceEmbedding input=R output=S(1)
model.layers.0 StreamInput
model.layers.0.input_layernorm StreamNorm
model.layers.0.post_attention_layernorm StreamNorm
model.norm LastNorm
model.layers.0.self_attn Float8BlockInput input=S(1)
model.layers.0.self_attn.q_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.self_attn.k_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.self_attn.v_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.self_attn.o_proj Float8ResidualRowwiseParallel input=S(-1) output=S(1)
model.layers.0.mlp Float8BlockInput input=S(1)
model.layers.0.mlp.gate_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.mlp.up_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.mlp.down_proj Float8ResidualRowwiseParallel input=S(-1) output=S(1)
lm_head ColwiseParallel input=S(1) output=R""",
    )


def test_plan_of_experts() -> None:
    model = converted("glm4_moe", first_k_dense_replace=0)
    with pytest.warns(UserWarning, match="routed experts") as caught:
        plan = hf_tp_plan(model)
    assert_expected_inline(
        show({k: v for k, v in plan.items() if ".0.mlp" in k}),
        """\
model.layers.0.mlp ReplicatedBlock
model.layers.0.mlp.shared_experts Float8BlockInput input=R
model.layers.0.mlp.shared_experts.gate_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.mlp.shared_experts.up_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.mlp.shared_experts.down_proj Float8ResidualRowwiseParallel input=S(-1) output=R""",
    )
    assert_expected_inline(
        filled(str(caught[0].message)),
        """\
hf_tp_plan leaves routed experts as they are: every tensor-parallel rank keeps all of those in
model.layers.*.mlp, and computes all tokens""",
    )


def test_unconverted_layers_are_gathered_in_high_precision() -> None:
    model = build("qwen3")
    keep = ("model.layers.0.self_attn.k_proj", "lm_head")
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in keep)
    plan = hf_tp_plan(model)
    names = ("self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.k_norm", "mlp")
    assert_expected_inline(
        show({n: plan[n] for n in (f"model.layers.0.{x}" for x in names)}),
        """\
model.layers.0.self_attn BlockInput input=S(1)
model.layers.0.self_attn.q_proj Float8ColwiseParallel input=R output=S(-1)
model.layers.0.self_attn.k_proj ColwiseParallel input=R output=S(-1)
model.layers.0.self_attn.k_norm SequenceParallel
model.layers.0.mlp Float8BlockInput input=S(1)""",
    )


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3", "phi3"])
def test_plans_that_transformers_4_declares(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without embedding, head and norms of heads; every name twice; other names of styles."""
    names = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
    model = build(kind)
    expected = show(hf_tp_plan(model))
    declared = {
        name: names.get(style, style)
        for name, style in model._tp_plan.items()
        if ".layers." in name and not name.endswith("_norm")
    }
    model._tp_plan = {name.removeprefix("model."): s for name, s in declared.items()} | declared
    monkeypatch.setattr(type(model), "_tp_plan", {"lm_head": "colwise_rep"})
    assert show(hf_tp_plan(model)) == expected


def test_tied_head_that_the_model_does_not_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_tp_plan", None)
    for kind, divided in (("llama", False), ("llama_tied", True)):
        model = build(kind)
        model._tp_plan.pop("lm_head", None)
        assert ("lm_head" in hf_tp_plan(model)) == divided


def test_model_without_a_plan() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    model = BertForMaskedLM(BertConfig(num_attention_heads=4, **sizes))
    assert_expected_inline(
        refusal(NotImplementedError, lambda: hf_tp_plan(model)),
        """\
hf_tp_plan does not know all of this BertForMaskedLM:
  - it declares no plan: neither _tp_plan nor base_model_tp_plan of its config
Write a plan of your own (a dict of module names to styles) for apply_tp_plan""",
    )


def test_unknown_styles() -> None:
    model = build("qwen3")
    model._tp_plan = model._tp_plan | {
        "model.layers.*.self_attn.q_norm": "mystery",
        "model.layers.*.mlp": "colwise",
        "model.layers.*.self_attn.o_proj.weight": "rowwise",
    }
    assert_expected_inline(
        refusal(NotImplementedError, lambda: hf_tp_plan(model)),
        """\
hf_tp_plan does not know all of this Qwen3ForCausalLM:
  - model.layers.*.self_attn.q_norm: the style 'mystery'
  - model.layers.*.mlp: the style 'colwise' of a Qwen3MLP
  - model.layers.*.self_attn.o_proj.weight: the style 'rowwise' of a parameter
Write a plan of your own (a dict of module names to styles) for apply_tp_plan""",
    )


def test_unknown_modules() -> None:
    model = build("qwen3")
    del model._tp_plan["model.layers.*.self_attn.o_proj"]
    model.model.layers[0].adapter = nn.Linear(64, 64)
    model.model.layers[0].gain = nn.Parameter(torch.ones(64))
    model.model.layers[1].mlp.gain = nn.Linear(64, 1)
    model.model.layers[1].mlp.norm = nn.RMSNorm(128)  # of features that are divided
    model.model.layers[1].self_attn.v_norm = nn.RMSNorm(64)  # of all heads
    model.model.projection = nn.Linear(64, 64)
    model.projector = nn.Linear(64, 64)
    model._tp_plan["projector"] = "rowwise"
    refused = refusal(NotImplementedError, lambda: hf_tp_plan(model))
    assert_expected_inline(
        refused,
        """\
hf_tp_plan does not know all of this Qwen3ForCausalLM:
  - model.layers.*.self_attn: the styles colwise, replicated_with_grad_allreduce do not make a
block, of layers that read its input and layers that write its output
  - model.layers.*.self_attn.o_proj: a Linear in a divided block, without a style
  - model.layers.*.self_attn.v_norm: a RMSNorm in a divided block, without a style
  - model.layers.*.mlp.gain: a Linear in a divided block, without a style
  - model.layers.*.mlp.norm: a RMSNorm in a divided block, without a style
  - model.layers.*: parameters of its own: ['gain']
  - model.layers.*.adapter: a Linear without a style
  - model.projection: a Linear beside the layers
  - projector: the style 'rowwise' outside of the layers
Write a plan of your own (a dict of module names to styles) for apply_tp_plan""",
    )
    # Of a whole stream, every rank finds the whole gradient of what is not divided.
    whole = refusal(NotImplementedError, lambda: hf_tp_plan(model, sequence_parallel=False))
    assert set(whole.splitlines()) < set(refused.splitlines())
    assert_expected_inline(
        "\n".join(line for line in refused.splitlines() if line not in whole.splitlines()),
        """\
  - model.layers.*: parameters of its own: ['gain']
  - model.layers.*.adapter: a Linear without a style
  - model.projection: a Linear beside the layers""",
    )


def test_attention_without_a_plan() -> None:
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(**SMALL, n_routed_experts=4, n_group=1, topk_group=1)
    )
    assert_expected_inline(
        refusal(NotImplementedError, lambda: hf_tp_plan(model)),
        """\
hf_tp_plan does not know all of this DeepseekV3ForCausalLM:
  - model.layers.*.self_attn: a DeepseekV3Attention without a style
Try sequence_parallel=False, or write a plan of your own (a dict of module names to styles) for
apply_tp_plan""",
    )


def test_heads_that_ranks_cannot_share(fake_world: DeviceMesh) -> None:
    model = converted("llama")
    plan = hf_tp_plan(model)
    forward = model(input_ids=batch(0)).logits
    assert_expected_inline(
        refusal(ValueError, lambda: apply_tp_plan(model, fake_world, plan)),
        """\
this tensor-parallel plan does not fit the model:
  - 'model.layers.0.self_attn.k_proj' has 2 heads (or features), which 4 tensor-parallel ranks
cannot share evenly: use a tensor-parallel size that divides them
  - 'model.layers.0.self_attn.v_proj' has 2 heads (or features), which 4 tensor-parallel ranks
cannot share evenly: use a tensor-parallel size that divides them
  - 'model.layers.1.self_attn.k_proj' has 2 heads (or features), which 4 tensor-parallel ranks
cannot share evenly: use a tensor-parallel size that divides them
  - 'model.layers.1.self_attn.v_proj' has 2 heads (or features), which 4 tensor-parallel ranks
cannot share evenly: use a tensor-parallel size that divides them""",
    )
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert torch.equal(model(input_ids=batch(0)).logits, forward)


def test_the_plan_of_the_reference_model_names_this_one() -> None:
    assert_expected_inline(
        refusal(ValueError, lambda: llama_tp_plan(build("llama"))),
        """\
llama_tp_plan does not know the module names of this LlamaForCausalLM, a model of transformers:
use fp8_dist.integrations.transformers.hf_tp_plan(model)""",
    )


def test_loss_parallelism_without_a_head() -> None:
    model = converted("llama_base")
    assert_expected_inline(
        refusal(ValueError, lambda: hf_tp_plan(model, loss_parallel=True)),
        """\
hf_tp_plan: loss_parallel=True needs a head, and the plan of this LlamaModel has none: leave it
out""",
    )
