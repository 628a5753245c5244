"""transformers models with frozen weights stored in float8: bases of adapters, and experts."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import run_shown
from hf_experts import IDS, Step, different, made, step
from hf_models import batch, build
from nets import full
from peft import LoraConfig, get_peft_model
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_bits
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from trainer_runs import SequentialTrainer, dataset, launched, llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    dequantized,
    float8_quantization_config,
    float8_state_dict,
    freeze_to_float8,
    iter_float8_weights,
    skip_head,
    unfreeze_from_float8,
)
from fp8_dist.debug import GemmStats, float8_stats
from fp8_dist.integrations.transformers import Float8Callback
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.tensor_parallel import Float8ExpertParallel, Float8ExpertTensorParallel
from fp8_dist.weight.weights import float8_weights

CONFIG = Float8LinearConfig.from_recipe_name("blockwise")


def base() -> LlamaForCausalLM:
    model = llama()
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=CONFIG)
    return model.requires_grad_(False)


def trained(store: bool, folder: Path) -> list[float]:
    torch.manual_seed(1)
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if store:
        assert len(freeze_to_float8(model)) == 14
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
    )
    with launched():
        trainer = SequentialTrainer(
            model=model, args=arguments, train_dataset=dataset(), callbacks=[Float8Callback()]
        )
        trainer.train()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
def test_the_trainer(tmp_path: Path) -> None:
    plain, stored = (trained(store, tmp_path / str(store)) for store in (False, True))
    assert len(plain) == 6
    assert stored == plain


def test_generation() -> None:
    model, ids = base(), torch.arange(10)[None]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    freeze_to_float8(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("tensorwise", "llama"), ("blockwise", "llama"), ("blockwise", "qwen3_moe")],
)
def test_plain_transformers_loads_what_is_saved(tmp_path: Path, recipe: str, kind: str) -> None:
    """As in docs/frozen.md: stored bytes for recipes of blocks, high precision for others."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    model: Any = build(kind, **{k: v for k, v in sizes.items() if k[0] != "m" or kind != "llama"})
    config = Float8LinearConfig.from_recipe_name(recipe)
    if kind != "llama":
        convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
    freeze_to_float8(model.requires_grad_(False))
    expected = {fqn: w.high_precision() for fqn, w in float8_weights(model).items()}
    if recipe == "blockwise":
        model.config.quantization_config = float8_quantization_config(model)
        model.save_pretrained(tmp_path, state_dict=float8_state_dict(model))
    else:
        unfreeze_from_float8(model)
        model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for fqn, values in expected.items():
        assert torch.equal(plain.get_parameter(fqn), values), fqn


# Experts


def with_experts(kind: str, recipe: str, store: bool = True) -> Any:
    """A model with frozen linear layers and experts, but not routers, norms and biases."""
    fields = {"weight_format": "mxfp4"} if recipe == "mxfp4" else {}
    model = made(kind, "mxfp8" if fields else recipe, dense=True, **fields)
    for weight in float8_weights(model).values():
        weight.parameter().requires_grad_(False)
    if store and fields:
        is_of_experts = lambda module, _: "float8_experts_config" in module.__dict__  # noqa: E731
        freeze_to_float8(model, format="mxfp4", module_filter_fn=is_of_experts)
    if store:
        freeze_to_float8(model)
    return model


KINDS = [("qwen3_moe", "tensorwise"), ("qwen3_moe", "blockwise"), ("qwen3_moe", "mxfp4")]
KINDS += [("gpt_oss", "rowwise_folded"), ("gpt_oss", "mxfp4")]


@pytest.mark.parametrize(("kind", "recipe"), KINDS)
def test_bits_of_stored_experts(kind: str, recipe: str) -> None:
    model = with_experts(kind, recipe)
    expected = step(with_experts(kind, recipe, store=False))
    copied = copy.deepcopy(model)
    # (Scales of stored weights have neither a counterpart nor gradients.)
    assert different(step(model), expected) == []
    assert different(step(copied), expected) == []
    state = model.state_dict()
    loaded = with_experts(kind, recipe)
    with torch.no_grad():
        for parameter in loaded.parameters():
            getattr(parameter, "plain", parameter).view(torch.uint8).zero_()
    loaded.load_state_dict(state)
    assert different(step(loaded), expected) == []
    assert all(same_bits(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    # Entries in high precision are cast, also for weights that are stored as [E, K, N].
    recast = with_experts(kind, recipe)
    recast.load_state_dict(with_experts(kind, recipe, store=False).state_dict())
    assert all(same_bits(tensor, state[name]) for name, tensor in recast.state_dict().items())
    experts = model.model.layers[0].mlp.experts
    values = dequantized(experts, "down_proj")
    unfreeze_from_float8(model)
    assert same_bits(experts.down_proj.detach(), values)
    assert all("scale_inv" not in name for name in model.state_dict())


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_gemms_of_stored_experts_are_measured(kind: str) -> None:
    """Against the dequantized values, which other layers have, and cast to the same data."""
    stored, plain = with_experts(kind, "rowwise_folded"), with_experts(kind, "rowwise_folded")
    unfreeze_from_float8(plain)
    found = []
    for model in (stored, plain):
        with float8_stats(model, gemms=True) as stats:
            step(model)
        rows = [row for row in stats.rows if isinstance(row, GemmStats) and "experts" in row.fqn]
        found.append({(row.fqn, row.gemm): row.sqnr for row in rows})
    assert {gemm for _, gemm in found[0]} == {"output", "grad_input"}
    assert found[0] == pytest.approx(found[1], abs=0.01)


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def by_features(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.ndim == 3 and parameter.shape[1] % 2 == 0 else 0)


def experts_on(model: Any, way: str) -> Any:
    if way in ("EP", "EP x FSDP2"):
        mesh = device_mesh(ep=2) if way == "EP" else device_mesh(dp=2, ep=2)
        for each in experts_of(model):
            parallelize_module(each, mesh["ep"], Float8ExpertParallel())
            if way != "EP":
                fully_shard(each, mesh=mesh["dp"])
    elif way == "TP":
        for each in experts_of(model):
            parallelize_module(each, device_mesh(tp=2)["tp"], Float8ExpertTensorParallel())
    else:
        placement = by_features if way == "FSDP2 of features" else None
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=device_mesh(dp=2), shard_placement_fn=placement)
    return model


def compared(way: str, recipe: str, rank: int) -> None:
    ids = IDS if way == "TP" else batch(rank)
    found: list[Step] = []
    for store in (False, True):
        model = experts_on(with_experts("qwen3_moe", recipe, store), way)
        logits, gradients = step(model, ids)
        local = {name: None if g is None else local_tensor(g) for name, g in gradients.items()}
        found.append((logits, local))
    assert different(found[1], found[0]) == [], (way, recipe)


WAYS = {2: ["EP", "TP", "FSDP2", "FSDP2 of features"], 4: ["EP x FSDP2"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", WAYS)
@pytest.mark.parametrize("recipe", ["rowwise_folded", "mxfp4"])
@on_ranks("size")
def test_stored_experts_on_meshes(size: int, recipe: str) -> None:
    for way in WAYS[size]:
        compared(way, recipe, torch.distributed.get_rank())


# The code of docs/frozen.md, unchanged.

DOCS = Path(__file__).parents[3] / "docs"
PAGE, SERVING = (DOCS / "frozen.md").read_text(), (DOCS / "serving.md").read_text()
LORA, SHARDED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block_config(**options: Any) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name("blockwise", scale_format="fp32", **options)


def lora(code: str) -> list[torch.Tensor]:
    """The adapters after the page's training; called on each rank."""
    torch.manual_seed(3)
    batches = [{key: ids[None] for key, ids in row.items()} for row in dataset(8)]
    scope: dict[str, Any] = {"model": llama(), "batches": batches}
    # Without the line that stores weights, a warning about gathers in high precision is given.
    run_shown(code, scope, expected="" if code == LORA else ".* in high precision, because")
    assert {type(weight.parameter()) for weight in float8_weights(scope["model"]).values()} == {
        DTensor
    }
    return [full(p.detach()) for p in scope["model"].parameters() if p.requires_grad]


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_those_beside_a_base_in_high_precision(ranks: RankPools) -> None:
    usual = "\n".join(line for line in LORA.splitlines() if line != "freeze_to_float8(model)")
    assert usual != LORA
    found, expected = (ranks(2).run(lora, code)[0] for code in (LORA, usual))
    assert len(found) == 8
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert any(tensor.any() for tensor in found[1::2])  # B begins with zeros


def exported(folder: Path) -> LlamaForCausalLM:
    model = llama()
    convert_to_float8_training(model, config=block_config(), module_filter_fn=skip_head(model))
    model.config.quantization_config = float8_quantization_config(model)
    model.save_pretrained(folder, state_dict=float8_state_dict(model))
    return model


def load_sharded(folder: str) -> dict[str, torch.Tensor]:
    """The state dict of the page's model; called on each rank."""
    scope: dict[str, Any] = {"make_model": llama, "folder": folder, "device": "cpu", "ranks": 4}
    run_shown(SHARDED, scope)
    return float8_state_dict(scope["model"], full_state_dict=True)


def check_files(found: dict[str, torch.Tensor], folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name].contiguous(), tensor), name


@pytest.mark.filterwarnings("ignore")
def test_loading_on_a_mesh(ranks: RankPools, tmp_path: Path) -> None:
    exported(tmp_path)
    for found in ranks(4).run(load_sharded, str(tmp_path)):
        check_files(found, tmp_path)


def test_names_of_a_stream_with_adapters() -> None:
    """The names are those that docs/serving.md shows."""
    _, loop, _ = re.findall(r"```python\n(.*?)```", SERVING, re.DOTALL)
    model: Any = build("qwen3")
    config = Float8LinearConfig.from_recipe_name("blockwise")
    convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
    model.requires_grad_(False)
    freeze_to_float8(model)
    expected = [name for name, *_ in iter_float8_weights(model)]
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    names = [name for name, *_ in iter_float8_weights(model)]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {f"{layer}.base_layer.weight", f"{layer}.lora_A.default.weight"} < {*names}
    sent: list[str] = []
    send = lambda name, *_: sent.append(name)  # noqa: E731
    run_shown(loop, {"model": model, "iter_float8_weights": iter_float8_weights, "send": send})
    assert sent == expected
