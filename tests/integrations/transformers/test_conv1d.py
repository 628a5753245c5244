"""Conv1D layers (GPT-2): converted, trained, saved and loaded under their names and shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from nets import full
from peft import LoraConfig, get_peft_model
from ranks import RankPools, device_mesh
from reference import raised, same_bits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    attach_update,
    auto_filter,
    conversion_summary,
    convert_to_float8_training,
    convert_to_linear,
    float8_layers,
    freeze_to_float8,
    skip_head,
    unfreeze_from_float8,
)
from fp8_dist.integrations.transformers import Fp8DistConfig
from fp8_dist.integrations.transformers.quantizer import Fp8DistQuantizer

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
TOKENS = torch.arange(32).view(2, 16)
LAYERS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def gpt2(seed: int = 0) -> PreTrainedModel:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ).eval()


def float8_gpt2(seed: int = 0, config: Float8LinearConfig | None = None) -> Any:
    model = gpt2(seed)
    return convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)


def linear_twin(model: nn.Module) -> nn.Module:
    """The same model of nn.Linear layers, written out."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(child.nx, child.nf)
                linear.weight = nn.Parameter(child.weight.detach().T.contiguous())
                linear.bias = child.bias
                setattr(module, name, linear)
    return model


def check_same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    assert [
        name for name, value in expected.items() if not same_bits(full(found[name]), value)
    ] == []


def test_a_converted_model_trains_as_one_of_linear_layers() -> None:
    model, twin = float8_gpt2(), linear_twin(gpt2())
    convert_to_float8_training(twin, module_filter_fn=skip_head(twin))
    assert list(float8_layers(model)) == [
        f"transformer.h.{i}.{n}" for i in range(2) for n in LAYERS
    ]
    check_same(dict(model.named_parameters()), dict(twin.named_parameters()))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for _ in range(2):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    check_same(dict(model.named_parameters()), dict(twin.named_parameters()))
    logits = model(TOKENS).logits
    convert_to_linear(model)
    assert not any(isinstance(m, Float8Linear | Conv1D) for m in model.modules())
    assert same_bits(model(TOKENS).logits, convert_to_linear(twin)(TOKENS).logits)
    assert not same_bits(model(TOKENS).logits, logits)
    shapes = {name: value.shape for name, value in gpt2().state_dict().items()}
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    plain = gpt2()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(TOKENS).logits, model(TOKENS).logits)


def test_filters_and_the_summary_know_conv1d() -> None:
    model = gpt2()
    rows = {row.name: row for row in conversion_summary(model).rows}
    assert rows["transformer.h.1.mlp.c_fc"].shape == (256, 64)
    seen: list[str] = []
    text = raised(
        ValueError,
        lambda: convert_to_float8_training(model, module_filter_fn=lambda m, n: seen.append(n)),
    )
    assert seen == [*(f"transformer.h.{i}.{n}" for i in range(2) for n in LAYERS), "lm_head"]
    assert "h.1.mlp.c_fc: module_filter_fn returned False" in text
    small = auto_filter("tensorwise", model=model)
    assert "out <= 1024 and in <= 4096" in raised(
        ValueError, lambda: convert_to_float8_training(model, module_filter_fn=small)
    )
    rows = {row.name: row for row in conversion_summary(model).rows}
    assert "auto_filter: out <= 1024" in rows["transformer.h.1.mlp.c_fc"].reason
    block = model.transformer.h[0]
    block.mlp.c_fc.also = nn.Module()
    block.mlp.c_fc.also.register_parameter("table", block.mlp.c_fc.weight)
    text = raised(ValueError, lambda: convert_to_float8_training(model))
    assert "the weight of a Conv1D is transposed, but transformer.h.0.mlp.c_fc.weight is" in text


@pytest.mark.parametrize("config", [None, GATHERED])
def test_checkpoints_are_those_of_the_unconverted_model(
    config: Float8LinearConfig | None, tmp_path: Path
) -> None:
    plain, model = gpt2(), float8_gpt2(config=config)
    check_same(model.state_dict(), plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    check_same(loaded.state_dict(), plain.state_dict())
    for assign in (False, True):
        other = float8_gpt2(1, config)
        other.load_state_dict(plain.state_dict(), assign=assign)
        check_same(other.state_dict(), plain.state_dict())
        assert all(weight.is_contiguous() for weight in other.parameters())
        assert same_bits(other(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("freeze", [False, True])
def test_fp8_dist_config_converts_them(freeze: bool, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    config = Fp8DistConfig("tensorwise", modules_to_not_convert=["h.0"], freeze=freeze)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=config)
    assert list(float8_layers(model)) == [f"transformer.h.1.{name}" for name in LAYERS]
    twin = gpt2()
    skips = skip_head(twin)
    convert_to_float8_training(
        twin, module_filter_fn=lambda m, name: "h.0" not in name and skips(m, name)
    )
    assert same_bits(model(TOKENS).logits, twin(TOKENS).logits)
    if freeze:
        unfreeze_from_float8(model)
    model.save_pretrained(tmp_path / "again")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "again")
    check = (lambda found, expected: None) if freeze else check_same
    check(again.state_dict(), gpt2().state_dict())


def test_a_model_with_conv1d_layers_is_not_distributed_while_it_is_loaded() -> None:
    model = gpt2()
    model.config.distributed_config = object()
    quantizer = Fp8DistQuantizer(Fp8DistConfig("tensorwise"))
    text = raised(
        NotImplementedError, lambda: quantizer._process_model_before_weight_loading(model)
    )
    assert "the Conv1D layers of this GPT2LMHeadModel can't be distributed while they are" in text


def test_merged_adapters_are_those_of_linear_layers() -> None:
    """In both orders: adapters around a Conv1D, which transpose, and around a converted layer."""
    merged = []
    for adapters_first in (True, False):
        lora = LoraConfig(r=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=adapters_first)
        model: Any = gpt2()
        skips = skip_head(model)
        if not adapters_first:
            convert_to_float8_training(model, module_filter_fn=skips)
        torch.manual_seed(0)
        model = get_peft_model(model, lora)
        if adapters_first:
            convert_to_float8_training(model, module_filter_fn=skip_head(model))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(0))
        merged.append(model.merge_and_unload())
    for model in merged:
        assert len(float8_layers(model)) == 8
    check_same(merged[0].state_dict(), merged[1].state_dict())
    weight = merged[0].state_dict()["transformer.h.0.attn.c_attn.weight"]
    assert weight.shape == (64, 192)
    assert not same_bits(weight, gpt2().state_dict()["transformer.h.0.attn.c_attn.weight"])


def test_stored_weights_are_saved_as_stored() -> None:
    model = float8_gpt2().requires_grad_(False)
    freeze_to_float8(model)
    state = model.state_dict()
    name = "transformer.h.0.attn.c_attn.weight"
    assert state[name].shape == (192, 64)
    assert state[name].dtype == torch.float8_e4m3fn
    other = float8_gpt2(1).requires_grad_(False)
    freeze_to_float8(other)
    other.load_state_dict(state)
    assert same_bits(other(TOKENS).logits, model(TOKENS).logits)


def differing_under_fsdp2(folder: str) -> list[str]:
    mesh = device_mesh(dp=2)

    def sharded(seed: int) -> Any:
        model = float8_gpt2(seed, GATHERED)
        for block in (*model.transformer.h, model):
            fully_shard(block, mesh=mesh)
        return model

    def differing(state: Any, expected: Any) -> list[str]:
        return [name for name, value in expected.items() if not same_bits(full(state[name]), value)]

    model, twin = sharded(0), float8_gpt2()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, twin)]
    attach_update(optimizers[0], model)
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        each(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    expected = twin.state_dict()
    options = StateDictOptions(full_state_dict=True)
    wrong = differing(get_model_state_dict(model, options=options), expected)
    other = sharded(1)
    set_model_state_dict(other, dict(expected), options=options)
    wrong += differing(other.state_dict(), expected)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    third = sharded(2)
    dcp.load(third.state_dict(), checkpoint_id=folder)  # in place
    wrong += differing(third.state_dict(), expected)
    convert_to_linear(model)
    return wrong + differing(model.state_dict(), expected)


def test_fsdp2_and_its_checkpoints(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(2).run_same(differing_under_fsdp2, str(tmp_path)) == []
