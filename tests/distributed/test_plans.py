"""The provided tensor-parallel plans and their checked application, to tied parameters too."""

import copy
import dataclasses
import re
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from documented import run_shown
from expecttest import assert_expected_inline
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import all_warnings, raised, sqnr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch_releases import uneven_sequence_viewed

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    skip_head,
)
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8ExpertParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
    llama_tp_plan,
)
from fp8_dist.tensor_parallel.plans import Float8ResidualRowwiseParallel, ResidualRowwiseParallel
from scripts.common.llama import Llama, LlamaConfig

TINY = LlamaConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64, max_seq_len=16
)
OFF = CastConfig(scaling_type=ScalingType.DISABLED)
HIGH_PRECISION = Float8LinearConfig(
    cast_config_input=OFF, cast_config_weight=OFF, cast_config_grad_output=OFF
)


def llama(*unconverted: str) -> Llama:
    """A converted model; modules named here, and the head, stay as they are."""
    model = Llama(TINY)
    keep = ("output", *unconverted)
    return convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in keep)


def show(plan: dict[str, ParallelStyle]) -> str:
    """One line per entry outside of layers.1: name, style, and where it moves what."""
    lines = []
    for name, style in plan.items():
        if name.startswith("layers.1."):
            continue
        given = vars(style)
        moves = [
            f"{key.removesuffix('_layouts')}={','.join(map(short, given[key]))}"
            for key in ("input_layouts", "desired_input_layouts", "output_layouts")
            if given.get(key) and not (key.startswith("desired") and "output_layouts" in given)
        ]
        writes_residual = isinstance(style, ResidualRowwiseParallel)  # its name implies its output
        if not (getattr(style, "use_local_output", True) or writes_residual):
            moves.append("DTensor out")
        lines.append(f"{name:<26}{' '.join([type(style).__name__, *moves])}")
    return "\n".join(lines)


def short(placement: object) -> str:
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R"


def test_plan_of_a_model():
    converted = show(llama_tp_plan(llama()))
    # The plan of an unconverted model has torch's styles in the same places.
    assert show(llama_tp_plan(Llama(TINY))) == converted.replace("Float8", "")
    assert_expected_inline(
        converted,
        """\
tok_embeddings            EmbeddingRowwiseParallel input=R output=S(1)
layers.0.attention_norm   SequenceParallel DTensor out
layers.0.attention        PrepareFloat8ModuleInput input=S(1) desired_input=R DTensor out
layers.0.attention.wq     Float8ColwiseParallel input=R output=S(-1)
layers.0.attention.wk     Float8ColwiseParallel input=R output=S(-1)
layers.0.attention.wv     Float8ColwiseParallel input=R output=S(-1)
layers.0.attention.wo     Float8ResidualRowwiseParallel input=S(-1) output=S(1)
layers.0.ffn_norm         SequenceParallel DTensor out
layers.0.feed_forward     PrepareFloat8ModuleInput input=S(1) desired_input=R DTensor out
layers.0.feed_forward.w1  Float8ColwiseParallel input=R output=S(-1)
layers.0.feed_forward.w3  Float8ColwiseParallel input=R output=S(-1)
layers.0.feed_forward.w2  Float8ResidualRowwiseParallel input=S(-1) output=S(1)
norm                      SequenceParallel DTensor out
output                    ColwiseParallel input=S(1) output=R""",
    )
    lines = [line for line in converted.splitlines() if "SequenceParallel" not in line]
    without_sequences = show(llama_tp_plan(llama(), sequence_parallel=False))
    assert without_sequences.splitlines() == [line.replace("S(1)", "R") for line in lines]
    plan = llama_tp_plan(Llama(TINY), loss_parallel=True)
    head = show({"output": plan["output"]}).split(maxsplit=1)[1]
    assert head == "ColwiseParallel input=S(1) output=S(-1) DTensor out"


def test_input_travels_in_high_precision_when_one_consumer_needs_it():
    plan = llama_tp_plan(llama("layers.0.attention.wk", "layers.0.feed_forward.w2"))
    usual = show(llama_tp_plan(llama())).splitlines()
    assert [line for line in show(plan).splitlines() if line not in usual] == [
        "layers.0.attention        PrepareModuleInput input=S(1) desired_input=R DTensor out",
        "layers.0.attention.wk     ColwiseParallel input=R output=S(-1)",
        "layers.0.feed_forward.w2  ResidualRowwiseParallel input=S(-1) output=S(1)",
    ]
    other = {type(style) for name, style in plan.items() if name.startswith("layers.1.attention.")}
    assert other == {Float8ColwiseParallel, Float8ResidualRowwiseParallel}


def test_plan_of_another_model():
    model = nn.ModuleDict({"output": nn.Linear(4, 4), "layers": nn.ModuleList([nn.Linear(4, 4)])})
    text = raised(ValueError, lambda: llama_tp_plan(model))
    assert "llama_tp_plan does not know this ModuleDict: it has no module tok_embeddings" in text
    assert "layers.0.feed_forward.w2. Rename the modules, or write a plan of your own" in text
    model["layers"].append(nn.Linear(4, 4))
    text = raised(ValueError, lambda: llama_tp_plan(model))
    assert "layers.*.feed_forward.w2 (2). Rename the modules" in text
    with pytest.raises(ValueError, match=r"layers\.0\.attention_norm"):
        llama_tp_plan(nn.Linear(4, 4))


def test_mesh_with_more_than_one_axis(fake_world):
    model = Llama(TINY)
    text = raised(ValueError, lambda: apply_tp_plan(model, fake_world, llama_tp_plan(model)))
    assert "needs a 1-D mesh, got one with shape (2, 4) and axes ('dp', 'tp')" in text
    assert "such as mesh['tp']" in text
    text = raised(TypeError, lambda: apply_tp_plan(model, fake_world["tp"], [("layers.0", None)]))
    assert "(model, mesh, plan): plan must be a dict of module names to styles, got a list" in text
    experts = nn.Module()
    for style in (Float8ExpertParallel(), Float8ColwiseParallel()):
        text = raised(ValueError, partial(parallelize_module, experts, fake_world, style))
        assert "parallelize_module needs a 1-D mesh, got one with shape (2, 4)" in text


def test_all_offenders_are_listed_and_nothing_is_changed(fake_world):
    model = llama(
        "layers.1.attention.wq",
        "layers.1.feed_forward.w1",
        "layers.1.feed_forward.w3",
        "layers.1.feed_forward.w2",
    )
    plan = {
        "layers.0.attention.wo": Float8RowwiseParallel(),
        "layers.*.attention.w_query": ColwiseParallel(),
        "layer.0.attention.wq": ColwiseParallel(),
        "layers.*.attention.wq": Float8ColwiseParallel(),
        "output": Float8RowwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward": PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
    }
    text = raised(ValueError, lambda: apply_tp_plan(model, fake_world["tp"], plan))
    first, *offenders = text.splitlines()
    assert first == "this tensor-parallel plan does not fit the model:"
    heads = "has n_kv_heads=2, which 4 tensor-parallel ranks cannot share evenly"
    linear = "needs a Float8Linear, found a Linear; convert it first"
    expected = [
        "'layers.*.attention.w_query', 'layer.0.attention.wq' match no module: a name has one part",
        f"'layers.*.attention' {heads}: use a tensor-parallel size that divides it (2)",
        f"'layers.1.attention.wq': Float8ColwiseParallel {linear}",
        f"'output': Float8RowwiseParallel {linear}",
        "'layers.0.attention.wo' is matched by two entries, 'layers.0.attention.wo' and "
        "'layers.*.attention.wo': leave one",
        "'layers.1.feed_forward': PrepareFloat8ModuleInput: this FeedForward contains no "
        "Float8Linear; convert the model first",
    ]
    assert all(a.startswith(f"  - {b}") for a, b in zip(offenders, expected, strict=True)), text
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_what_is_not_a_style(fake_world):
    plan = {"output": ColwiseParallel}
    text = raised(TypeError, lambda: apply_tp_plan(Llama(TINY), fake_world["tp"], plan))
    assert "not a parallel style: give an instance, such as ColwiseParallel()" in text


def test_wildcards_reach_every_layer(fake_world):
    model = apply_tp_plan(
        Llama(TINY),
        fake_world["dp"],
        {"layers.*.feed_forward.w[13]": ColwiseParallel(), "layers.1.*.wo": RowwiseParallel()},
    )
    assert [name for name, p in model.named_parameters() if isinstance(p, DTensor)] == [
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w3.weight",
        "layers.1.attention.wo.weight",
        "layers.1.feed_forward.w1.weight",
        "layers.1.feed_forward.w3.weight",
    ]


def test_a_plan_from_before_the_conversion_is_warned_of(fake_world: DeviceMesh) -> None:
    model = Llama(TINY)
    plan = llama_tp_plan(model)
    convert_to_float8_training(model, module_filter_fn=skip_head(model))
    with pytest.warns(
        UserWarning, match=r"14 converted layers, such as 'layers\.0\.attention\.wq'"
    ):
        apply_tp_plan(model, fake_world["dp"], plan)


def test_a_head_of_any_name_has_the_style_of_torch(fake_world: DeviceMesh) -> None:
    layers = {"tok": nn.Embedding(256, 64), "up": nn.Linear(64, 128), "unembed": nn.Linear(64, 256)}
    model = nn.ModuleDict(layers)
    convert_to_float8_training(model, module_filter_fn=skip_head(model))
    plan = {"up": Float8ColwiseParallel(), "unembed": ColwiseParallel(output_layouts=Replicate())}
    with all_warnings() as texts:
        apply_tp_plan(model, fake_world["tp"], plan)
    assert texts == []


def several_names() -> nn.Module:
    """A module whose layer ``a`` is also ``b`` and ``inner.c``."""
    model = nn.Module()
    model.a = nn.Linear(16, 16)
    model.b = model.a
    model.inner = nn.ModuleDict({"c": model.a})
    return model


def test_a_module_with_several_names_has_all_of_them(fake_world: DeviceMesh) -> None:
    for name in ("a", "b", "inner.c", "[ab]"):
        model = apply_tp_plan(several_names(), fake_world["tp"], {name: ColwiseParallel()})
        assert model.b.weight.placements == (Shard(0),)


def logits_loss_gradients(
    model: Llama, length: int, vocabulary_sharded: bool = False
) -> dict[str, torch.Tensor]:
    """The whole logits and loss of two rows of `length` tokens, and every parameter's gradient."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(model.config.vocab_size, (2, length + 1), generator=generator)
    logits = model(text[:, :-1])
    with loss_parallel() if vocabulary_sharded else nullcontext():
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: full(tensor) for name, tensor in found.items()}


# What is left unconverted, and the config of the other layers; None: nothing is converted.
KINDS: dict[str, tuple[list[str], Float8LinearConfig] | None] = {
    "unconverted": None,
    "high precision": ([], HIGH_PRECISION),
    "float8": (["output"], Float8LinearConfig()),
    "float8, some writers not": (
        ["layers.0.attention.wo", "layers.1.feed_forward.w2"],
        Float8LinearConfig(),
    ),
}


def model_of(kind: str, tp: int = 2) -> Llama:
    """A model of a kind in `KINDS` whose heads the ranks can share."""
    model = Llama(dataclasses.replace(TINY, n_kv_heads=tp))
    if (conversion := KINDS[kind]) is not None:
        keep, config = conversion
        convert_to_float8_training(
            model, module_filter_fn=lambda _, name: name not in keep, config=config
        )
    return model


def parallel_results(
    kind: str, tp: int, length: int, vocabulary_sharded: bool, sequence_parallel: bool
) -> dict[str, torch.Tensor]:
    """Runs on every rank: `logits_loss_gradients` under the provided plan."""
    model = model_of(kind, tp)
    plan = llama_tp_plan(
        model, sequence_parallel=sequence_parallel, loss_parallel=vocabulary_sharded
    )
    apply_tp_plan(model, device_mesh(tp=tp), plan)
    return logits_loss_gradients(model, length, vocabulary_sharded)


@pytest.mark.parametrize(
    ("kind", "tp", "length", "vocabulary_sharded", "sequence_parallel"),
    [
        ("float8", 2, 16, False, True),
        ("high precision", 2, 16, True, True),
        ("float8, some writers not", 2, 16, False, False),
        # Sequences that tp does not divide.
        ("high precision", 2, 7, False, True),
        ("unconverted", 2, 7, False, False),
        ("float8, some writers not", 2, 5, True, True),
        # Some ranks have no token.
        ("float8", 4, 3, False, True),
        ("unconverted", 4, 2, False, True),
    ],
)
def test_a_parallel_model_computes_what_one_device_does(
    ranks: RankPools,
    kind: str,
    tp: int,
    length: int,
    vocabulary_sharded: bool,
    sequence_parallel: bool,
):
    expected = logits_loss_gradients(model_of(kind, tp), length)
    unquantized = logits_loss_gradients(model_of("unconverted", tp), length)
    # In float8 the order of a sum may move a value to the next code.
    limit = 40 if kind.startswith("float8") else 110
    # (Of the kind "high precision" every linear layer is converted.)
    torchs = sequence_parallel and length % tp and kind != "high precision"
    with uneven_sequence_viewed() if torchs else nullcontext():
        for result in ranks(tp).run(
            parallel_results, kind, tp, length, vocabulary_sharded, sequence_parallel
        ):
            assert result.keys() == expected.keys()
            found = {name: sqnr(expected[name], result[name]) for name in expected}
            assert min(found.values()) > limit, found
            if kind.startswith("float8"):  # float8 took effect
                assert sqnr(unquantized["logits"], result["logits"]) < 45


@on_ranks(2)
def test_the_plan_that_the_page_writes_out() -> None:
    page = Path(__file__).parents[2] / "docs/tensor_parallel.md"
    program = r"```python\n(import torch\nimport torch\.nn as nn\n.*?)```"
    (code,) = re.findall(program, page.read_text(), re.DOTALL)
    code = code.replace("torch.distributed.init_process_group()", "pass")  # the ranks have done it
    scope: dict[str, Any] = {}
    run_shown(code, scope)
    torch.manual_seed(0)
    single = scope["Model"]()
    convert_to_float8_training(single, module_filter_fn=skip_head(single))
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    short = raised(ValueError, lambda: scope["model"](tokens[:, :15]))
    assert "embedding: the plan divides dim 1 of a tensor of shape (2, 15, 64)" in short
    with comm_audit(scope["mesh"]) as audit:
        logits = scope["model"](tokens)
        logits.square().mean().backward()
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    gathers = [audit.count("all_gather", dtype=dtype) for dtype in dtypes]
    assert gathers == [2, 2]  # the input of each block, and the gradient of its output
    assert sqnr(single(tokens), logits) > 60


def test_lengths_that_ranks_do_not_divide(fake_tp: DeviceMesh) -> None:
    """Two ranks: refused if one style shards a sequence that another reads as a plain tensor."""
    plain = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    outputs = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
    local = {"use_local_input": True} | plain | outputs
    rowwise = partial(RowwiseParallel, input_layouts=Replicate())
    for plan, is_refused in (
        ({"0": rowwise(output_layouts=Shard(1))}, True),
        ({"0": rowwise(output_layouts=Shard(1), use_local_output=False)}, False),
        ({"0": rowwise(output_layouts=Shard(-1))}, False),
        ({"0": rowwise(output_layouts=Shard(0))}, False),  # which no style reads
        ({"": PrepareModuleInput(**plain, use_local_output=True)}, True),
        ({"": PrepareModuleInput(**plain)}, False),
        ({"0": PrepareModuleOutput(**outputs)}, True),
        ({"0": PrepareModuleOutput(**outputs | {"output_layouts": Shard(1)})}, False),
        ({"0": PrepareModuleInputOutput(**local)}, True),
    ):
        for reader in (SequenceParallel(), ColwiseParallel(input_layouts=Shard(-2)), None):
            net = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 8))
            at = "1" if isinstance(reader, SequenceParallel) else "2"
            apply_tp_plan(net, fake_tp, plan | ({at: reader} if reader else {}))
            for size in (5, 8):
                tokens = torch.zeros(2, size, dtype=torch.long)
                if is_refused and reader and size == 5:
                    message = raised(ValueError, partial(net, tokens))
                    assert "pad the sequence to a multiple of 2" in message, message
                else:
                    with suppress(RuntimeError):  # a DTensor in a layer without a style
                        net(tokens)


# Tied parameters stay tied, or the plan is refused.


def test_float8_layers_stay_tied(fake_tp: DeviceMesh) -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    net[1].weight, net[1].bias = net[0].weight, net[0].bias
    convert_to_float8_training(net, config=config)
    apply_tp_plan(net, fake_tp, {"*": Float8ColwiseParallel()})
    assert net[0].weight is net[1].weight
    assert net[0].bias is net[1].bias
    assert isinstance(net[0].weight, DTensor)
    assert net[1].float8_weight.parameter() is net[0].weight


class Unknown(ParallelStyle):
    """A style of the user's own, which replicates parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return SequenceParallel()._apply(module, device_mesh)


def tied() -> nn.ModuleDict:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16)
    head.weight = embedding.weight
    return nn.ModuleDict({"embedding": embedding, "norm": nn.LayerNorm(16), "head": head})


def test_plans_that_would_untie_are_refused_by_name(fake_tp: DeviceMesh) -> None:
    row, column = RowwiseParallel(), ColwiseParallel()
    texts = {
        "embedding.weight whole, head.weight S(0).": {"head": column, "norm": SequenceParallel()},
        "embedding.weight S(0), head.weight S(1).": {"head": row, "embedding": row},
        "embedding.weight R, head.weight S(0).": {"head": column, "embedding": SequenceParallel()},
        "embedding.weight S(0), head.weight R.": {"head": Unknown(), "embedding": row},
    }
    for placed, plan in texts.items():
        text = raised(ValueError, lambda: apply_tp_plan(tied(), fake_tp, plan))  # noqa: B023
        assert "'embedding.weight' and 'head.weight' are one parameter (tied), which the" in text
        assert f"would untie: {placed} Give its modules entries that divide it alike" in text


def test_plans_that_leave_or_divide_ties_alike_are_applied(fake_tp: DeviceMesh) -> None:
    placed = {
        "whole": {"norm": SequenceParallel()},
        str(Shard(0)): {"embedding": RowwiseParallel(), "head": ColwiseParallel()},
        str(Shard(1)): {"embedding": ColwiseParallel(), "head": RowwiseParallel()},
        str(Replicate()): {"embedding": SequenceParallel(), "head": Unknown()},
    }
    for place, plan in placed.items():
        model = tied()
        apply_tp_plan(model, fake_tp, copy.copy(plan))
        weight = model["head"].weight
        assert weight is model["embedding"].weight
        assert place == (str(weight.placements[0]) if isinstance(weight, DTensor) else "whole")
