"""Tensor-parallel plans of transformers models on ranks, compared with one device.

In an unconverted model, the gradient of each parameter must have an SQNR of at least 80 dB. In
float8, sums in another order round rare values to other codes, and such differences may grow. There
logits and the gradient of all parameters must have 35 dB, and that of each parameter 12 dB. A
gradient that lacks one rank's part, or is summed twice, has 6 dB or less.
"""

import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from hf_models import SMALL, batch, build, converted
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch_releases import uneven_sequence_viewed
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from fp8_dist import convert_to_float8_training, float8_layers
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import apply_tp_plan, check_tp_plan, llama_tp_plan

# The number of gathers in high precision in a step with sequence parallelism, without those of the
# head's input, the logits and the embedding's gradient. Routed experts: input and output gradient.
# Phi-3: outputs of fused layers, and gradients of layers that split their input.
OTHER_GATHERS = {"mixtral": 4, "qwen3_moe": 4, "glm4_moe": 2, "llama4": 4, "phi3": 8}
# The number of blocks that gather their input and their output gradient in float8.
BLOCKS = {"mixtral": 2, "qwen3_moe": 2, "glm4_moe": 3, "llama4": 2}
# Elements of bias gradients that row-parallel Float8Linears all-reduce in the backward.
BIAS_GRADIENTS = {"phi": 4 * 64}


def long(*values: Any) -> Any:
    """Parameters of a test that only ``scripts/test.sh --all`` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


class Step(NamedTuple):
    """A step on ranks, compared with one device; SQNR in dB."""

    loss: float  # the difference
    logits: float
    gradient: float  # of all parameters together
    worst: float  # of the parameter with the worst gradient
    worst_plain: float  # the same in the unconverted model
    # Elements by kind of collective over the tensor-parallel axis, without amaxes.
    moved: Counter[str]
    moved_plain: Counter[str]
    gathers: Counter[str]  # number of gathers over that axis, by dtype
    weights: Counter[str]  # elements that FSDP2 gathered, by dtype
    expected: Counter[str]  # elements that it should gather


def planned(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Parallelize a model with its plan, except routed experts, which have their own tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hf_tp_plan leaves routed experts")
        return apply_tp_plan(model, mesh, hf_tp_plan(model, **options))


def sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2 to the layers and the rest of a model, if there are data-parallel ranks."""
    if mesh["dp"].size() > 1:
        for layer in (*getattr(model, "model", model).layers, model):
            fully_shard(layer, mesh=mesh["dp"])
    return model


def backward(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> Any:
    output = model(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    return output


def gradients(model: nn.Module, twin: nn.Module) -> tuple[float, float]:
    """The SQNR of the gradient of all parameters, and of the worst one, compared with a twin."""
    found, expected = dict(model.named_parameters()), dict(twin.named_parameters())
    assert found.keys() == expected.keys()
    pairs = [(full(p.grad), full(found[name].grad)) for name, p in expected.items()]
    together = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
    return sqnr(*together), min(sqnr(*pair) for pair in pairs)


def counted(audit: CommAudit) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Elements moved over tp, the number of gathers over tp, and elements that FSDP2 gathers."""
    moved, gathers, weights = Counter[str](), Counter[str](), Counter[str]()
    for row in audit.rows:
        dtype = str(row.dtype).removeprefix("torch.")
        if row.axis == "tp":
            moved[row.op] += row.elements if dtype != "int32" else 0
        if row.op == "all_gather":
            (gathers if row.axis == "tp" else weights)[dtype] += (
                row.count if row.axis == "tp" else row.elements
            )
    return moved, gathers, weights


def checkpointed(model: Any, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        older = getattr(model, "gradient_checkpointing_enable", None)  # in earlier releases
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": reentrant})
    model.train()


def step(
    kind: str,
    dp: int = 1,
    length: int = 16,
    reentrant: bool | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Step:
    """Compare a step with one device; called on ``2 * dp`` ranks.

    reentrant: kind of checkpointing, which is enabled before or after the plan is applied.
    options: options of the plan.
    """
    mesh, ids = device_mesh(dp=dp, tp=2), batch(0, length=length)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    own, pairs = mesh.get_local_rank("dp"), list(zip(ids.chunk(dp), mask.chunk(dp), strict=True))
    losses, logits, both, audits = [], [], [], []
    expected: Counter[str] = Counter()
    for is_float8 in (True, False):
        make = converted if is_float8 else build
        fsdp: dict[str, Any] = {"fsdp": dp > 1} if is_float8 else {}
        twin, model = make(kind, **config or {}), make(kind, **fsdp, **config or {})
        if reentrant:
            checkpointed(model, True)
        if not is_float8:
            options.pop("reduce_transport", None)
        planned(model, mesh["tp"], **options)
        if reentrant is False:
            checkpointed(model, False)
        if is_float8 and dp > 1:
            float8 = {f"{name}.weight" for name in float8_layers(twin)}
            for name, parameter in model.named_parameters():
                dtype = "float8_e4m3fn" if name in float8 else "float32"
                # FSDP2 gathers layers again for the backward.
                times = 2 if ".layers." in name else 1
                expected[dtype] += times * local_tensor(parameter).numel()
        sharded(model, mesh)
        divided = loss_parallel() if "loss_parallel" in options else nullcontext()
        with comm_audit(mesh) as audit, divided:
            output = backward(model, pairs[own][0], attention_mask=pairs[own][1])
        twin_outputs = [twin(input_ids=i, labels=i, attention_mask=m) for i, m in pairs]
        (sum(each.loss for each in twin_outputs) / dp).backward()
        losses.append(abs(full(output.loss).item() - twin_outputs[own].loss.item()))
        logits.append(sqnr(twin_outputs[own].logits, full(output.logits)))
        both.append(gradients(model, twin))
        audits.append(counted(audit))
    (moved, gathers, weights), (moved_plain, *_) = audits
    float8_results = (moved, moved_plain, gathers, weights, expected)
    return Step(losses[0], logits[0], *both[0], both[1][1], *float8_results)


def gathers_of(kind: str) -> dict[str, int]:
    """The expected number of gathers in a step with sequence parallelism, by dtype."""
    blocks = BLOCKS.get(kind, 4)
    high = 3 + OTHER_GATHERS.get(kind, 0)
    return {"float8_e4m3fn": blocks, "float8_e5m2": blocks, "float32": high}


def check(kind: str, found: Step) -> None:
    assert found.loss < 1e-3
    assert found.logits > 35
    assert found.gradient > 35
    assert found.worst > 12
    assert found.worst_plain > 80
    # The same elements as in the unconverted model are moved, though partly in float8.
    biases = {"all_reduce": BIAS_GRADIENTS.get(kind, 0)}
    assert found.moved == found.moved_plain + Counter(biases)
    assert found.weights == found.expected


@pytest.mark.parametrize(
    ("kind", "dp"),
    [
        *(("llama", 1), ("phi", 1), ("phi3", 1), ("glm4_moe", 1), ("llama4", 1), ("llama_tied", 2)),
        *(long("mixtral", 2), long("gemma3", 1)),
    ],
)
def test_sequence_parallel(ranks: RankPools, kind: str, dp: int) -> None:
    for found in ranks(2 * dp).run(step, kind, dp):
        check(kind, found)
        assert found.gathers == gathers_of(kind)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_without_sequence_parallelism(ranks: RankPools, kind: str) -> None:
    for found in ranks(2).run(step, kind, sequence_parallel=False):
        check(kind, found)
        assert found.gathers == {"float32": 9 if kind == "phi3" else 1}
        assert set(found.moved) == {"all_reduce", "all_gather"}


@pytest.mark.parametrize(("kind", "length"), [("llama", 15), ("glm4_moe", 3)])
def test_sequences_that_ranks_cannot_share_evenly(ranks: RankPools, kind: str, length: int) -> None:
    with uneven_sequence_viewed():  # by the head
        for found in ranks(2).run(step, kind, length=length):
            check(kind, found)


def table_of_a_step() -> str:
    mesh = device_mesh(tp=2)
    model = planned(converted("llama", num_hidden_layers=1), mesh)
    with comm_audit(mesh) as audit:
        backward(model, batch(0))
    return audit.table()


def test_all_collectives_of_a_step(ranks: RankPools) -> None:
    """A step has the collectives that the page shows."""
    rows, total, _ = ranks(2).run_same(table_of_a_step).partition("total")
    assert rows.count("\n") == 6
    assert total
    assert indent(rows, "    ") in (Path(__file__).parents[3] / "docs/transformers.md").read_text()


# ---- other uses of a parallelized model


def generate(kind: str, sequence_parallel: bool) -> tuple[list[list[int]], list[list[int]]]:
    """The texts that two ranks generate, and those of one device; called on both ranks."""
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


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"), [("llama", True), ("gemma3", False), long("mixtral", True)]
)
def test_generate(ranks: RankPools, kind: str, sequence_parallel: bool) -> None:
    with uneven_sequence_viewed() if kind == "mixtral" else nullcontext():
        for found, expected in ranks(2).run(generate, kind, sequence_parallel):
            assert found == expected


@pytest.mark.parametrize(("kind", "reentrant"), [("llama", True), ("gemma3", False)])
def test_gradient_checkpointing(ranks: RankPools, kind: str, reentrant: bool) -> None:
    for found in ranks(2).run(step, kind, reentrant=reentrant):
        check(kind, found)


def test_reductions_in_float8(ranks: RankPools) -> None:
    """Blocks send outputs and input gradients in float8; embedding and head use reduce-scatters."""
    for found in ranks(2).run(step, "llama", reduce_transport="float8"):
        assert 20 < found.logits < 60
        assert found.gradient > 19
        assert found.moved["all_to_all"] > found.moved["reduce_scatter"] > 0


def test_loss_parallel(ranks: RankPools) -> None:
    for found in ranks(2).run(step, "llama", loss_parallel=True):
        check("llama", found)
        # The logits are not gathered.
        assert found.gathers == gathers_of("llama") | {"float32": 2}


@on_ranks(2)
def test_model_without_a_head() -> None:
    """Also with embeddings as inputs."""
    for length in (16, 15):
        model, twin = planned(converted("llama_base"), device_mesh(tp=2)), converted("llama_base")
        ids = batch(0, length=length)
        outputs = [each(input_ids=ids).last_hidden_state for each in (model, twin)]
        assert not isinstance(outputs[0], DTensor)
        for output in outputs:
            output[:, -1].square().mean().backward()
        given = model(inputs_embeds=twin.embed_tokens(ids).detach()).last_hidden_state
        assert min(sqnr(outputs[1], each) for each in (outputs[0], given)) > 35
        assert gradients(model, twin)[0] > 35


# ---- plans, in one process


def show(plan: dict[str, ParallelStyle]) -> dict[str, Any]:
    """The name and layouts of each style in a plan."""
    layouts = ("input_layouts", "output_layouts")
    return {
        name: (type(style).__name__, *(vars(style).get(key) for key in layouts))
        for name, style in plan.items()
    }


def test_unconverted_layers_are_gathered_in_high_precision() -> None:
    model = build("qwen3")
    keep = ("model.layers.0.self_attn.k_proj", "lm_head")
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in keep)
    plan = hf_tp_plan(model)
    names = ("self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.k_norm", "mlp")
    assert [type(plan[f"model.layers.0.{name}"]).__name__ for name in names] == [
        "BlockInput",
        "Float8ColwiseParallel",
        "ColwiseParallel",
        "SequenceParallel",
        "Float8BlockInput",
    ]
    assert type(plan["model.layers.1.self_attn"]).__name__ == "Float8BlockInput"


def test_routed_experts_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="leaves routed experts as they are.* model.layers.*.mlp"):
        hf_tp_plan(converted("glm4_moe"))


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3", "phi3"])
def test_plans_that_transformers_4_declares(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lack embedding, head and norms of heads, repeat names, and call styles otherwise."""
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


def refused(model: nn.Module, **options: Any) -> list[str]:
    """The lines of an error of hf_tp_plan that list unknown modules, without the first and last."""
    first, *lines, last = raised(
        NotImplementedError, lambda: hf_tp_plan(model, **options)
    ).splitlines()
    assert first == f"hf_tp_plan does not know all of this {type(model).__name__}:"
    assert last.endswith("a plan of your own (a dict of module names to styles) for apply_tp_plan")
    return [line.removeprefix("  - ") for line in lines]


def test_models_and_styles_that_are_not_known() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    modern = ModernBertForMaskedLM(ModernBertConfig(num_attention_heads=4, pad_token_id=0, **sizes))
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, **experts))
    qwen: Any = build("qwen3")
    qwen._tp_plan = qwen._tp_plan | {
        "model.layers.*.self_attn.q_norm": "mystery",
        "model.layers.*.mlp": "colwise",
        "model.layers.*.self_attn.o_proj.weight": "rowwise",
    }
    assert_expected_inline(
        "\n".join([*refused(modern), *refused(deepseek), *refused(qwen)]),
        """\
it declares no plan: neither _tp_plan nor base_model_tp_plan of its config
model.layers.*.self_attn: a DeepseekV3Attention without a style
model.layers.*.self_attn.q_norm: the style 'mystery'
model.layers.*.mlp: the style 'colwise' of a Qwen3MLP
model.layers.*.self_attn.o_proj.weight: the style 'rowwise' of a parameter""",
    )
    remedy = raised(NotImplementedError, lambda: hf_tp_plan(deepseek)).splitlines()[-1]
    assert remedy.startswith("Try sequence_parallel=False, or write a plan")


def test_unknown_modules() -> None:
    model: Any = build("qwen3")
    del model._tp_plan["model.layers.*.self_attn.o_proj"]
    model.model.layers[0].adapter = nn.Linear(64, 64)
    model.model.layers[0].gain = nn.Parameter(torch.ones(64))
    model.model.layers[1].mlp.gain = nn.Linear(64, 1)
    model.model.layers[1].mlp.norm = nn.RMSNorm(128)  # over features that are divided
    model.model.layers[1].self_attn.v_norm = nn.RMSNorm(64)  # over all heads
    model.model.projection = nn.Linear(64, 64)
    model.projector = nn.Linear(64, 64)
    model._tp_plan["projector"] = "rowwise"
    lines = refused(model)
    assert_expected_inline(
        "\n".join(lines),
        """\
model.layers.*.self_attn: the styles colwise, replicated_with_grad_allreduce do not make a block, of layers that read its input and layers that write its output
model.layers.*.self_attn.o_proj: a Linear in a divided block, without a style
model.layers.*.self_attn.v_norm: an RMSNorm in a divided block, without a style
model.layers.*.mlp.gain: a Linear in a divided block, without a style
model.layers.*.mlp.norm: an RMSNorm in a divided block, without a style
model.layers.*: parameters of its own: ['gain']
model.layers.*.adapter: a Linear without a style
model.projection: a Linear beside the layers
projector: the style 'rowwise' outside of the layers""",
    )
    # Without SP, every rank computes the full gradient of modules that are not divided.
    assert refused(model, sequence_parallel=False) == [*lines[:5], lines[8]]


def test_heads_that_ranks_cannot_share(fake_world: DeviceMesh) -> None:
    model = converted("llama")
    plan = hf_tp_plan(model)
    forward = model(input_ids=batch(0)).logits
    message = raised(ValueError, lambda: apply_tp_plan(model, fake_world["tp"], plan))
    first, *lines = message.splitlines()
    assert first == "this tensor-parallel plan does not fit the model:"
    assert lines == [
        f"  - 'model.layers.*.self_attn': '{name}_proj' has 2 heads (or features), which 4 "
        "tensor-parallel ranks cannot share evenly: use a tensor-parallel size that divides them "
        "(2)"
        for name in "kv"
    ]
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert torch.equal(model(input_ids=batch(0)).logits, forward)


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("qwen2", True), ("glm4_moe", False)])
@on_ranks(2)
def test_plans_pass_the_check(kind: str, sequence_parallel: bool) -> None:
    model = converted(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hf_tp_plan leaves routed experts")
        plan = hf_tp_plan(model, sequence_parallel=sequence_parallel)
    inputs = {"input_ids": batch(0), "labels": batch(0)}
    check_tp_plan(model, device_mesh(tp=2), plan, inputs)


def test_a_projection_that_is_declared_by_head_is_not_warned_of(fake_world: DeviceMesh) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=1, vocab_size=64)
    model = GPTNeoXForCausalLM(config)
    plan = hf_tp_plan(model)
    assert "gpt_neox.layers.0.attention.query_key_value" in plan
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "apply_tp_plan: ")
        apply_tp_plan(model, fake_world["tp"], plan)


def test_options_that_a_plan_does_not_have() -> None:
    model, base = converted("llama"), converted("llama_base")
    plain = build("llama")
    messages = [
        raised(ValueError, lambda: hf_tp_plan(plain, reduce_transport="float8")),
        raised(ValueError, lambda: hf_tp_plan(base, loss_parallel=True)),
        raised(ValueError, lambda: llama_tp_plan(model)),
    ]
    assert_expected_inline(
        "\n".join(messages),
        """\
hf_tp_plan: reduce_transport='float8' applies to the sums of converted layers, which this model doesn't have: convert it before
hf_tp_plan: loss_parallel=True needs a head, and the plan of this LlamaModel has none: leave it out
llama_tp_plan does not know the module names of this LlamaForCausalLM, a model of transformers: use fp8_dist.integrations.transformers.hf_tp_plan(model)""",
    )
