"""FP8 checkpoints are loaded without a cast, on any mesh, and saved again byte for byte."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_cast
from hf_models import batch, build
from nets import full
from ranks import RankPools, device_mesh
from reference import raised, same_bits
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    dequantized,
    float8_layers,
    float8_state_dict,
    freeze_to_float8,
    load_float8_checkpoint,
    skip_head,
)
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertParallel, apply_tp_plan
from fp8_dist.weight.weights import float8_weights

SIZES = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}  # not multiples of blocks
IDS = batch(7)
Files = dict[str, torch.Tensor]


def config_of(form: str) -> Float8LinearConfig:
    fp32 = {"scale_format": "fp32"} if form != "ue8m0" else {}
    return Float8LinearConfig.from_recipe_name("blockwise", **fp32)


def converted(form: str, device: str = "cpu", frozen: bool = True) -> Any:
    """A Qwen3 with random values, or on "meta"; if ``frozen``, weights are stored in float8."""
    with torch.device(device):
        model = build("qwen3", **SIZES)
    convert_to_float8_training(model, config=config_of(form), module_filter_fn=skip_head(model))
    if frozen:
        model.requires_grad_(False)
        freeze_to_float8(model)
    return model


def by_reference(form: str, scale_dtype: torch.dtype = torch.float32) -> Files:
    """A checkpoint in DeepSeek's layout, cast by the formulas of an inference engine."""
    model, files = build("qwen3", **SIZES), {}
    for name, value in model.state_dict().items():
        files[name] = value.clone()
        if value.ndim == 2 and "layers" in name:
            files[name], scales = engine_cast(value, form, 128, 128)
            files[f"{name}_scale_inv"] = scales.to(scale_dtype)
    return files


def written(files: Files, folder: Path) -> Path:
    """Write a checkpoint as two files and an index."""
    names = list(files)
    parts = {f"model-{i + 1}-of-2.safetensors": names[i::2] for i in range(2)}
    for file, own in parts.items():
        save_file({name: files[name].contiguous() for name in own}, folder / file)
    weight_map = {name: file for file, own in parts.items() for name in own}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def with_buffers(model: nn.Module) -> nn.Module:
    """Fill in buffers that checkpoints lack, such as frequencies of rotary embeddings."""
    for (_, own), (_, known) in zip(
        model.named_buffers(), build("qwen3", **SIZES).named_buffers(), strict=True
    ):
        own.copy_(known)
    return model


def different(found: Files, expected: Files) -> list[str]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [k for k, v in expected.items() if v.dtype != found[k].dtype or not _same(found[k], v)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_bits(*(x.contiguous().view(torch.uint8) if x.itemsize == 1 else x for x in (a, b)))


def on_mesh(form: str, dp: int, tp: int, frozen: bool) -> Any:
    model = converted(form, "meta", frozen)
    mesh = device_mesh(dp=dp, tp=tp)
    if tp > 1:
        apply_tp_plan(model, mesh["tp"], hf_tp_plan(model))
    if dp > 1:
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    return model


def loads(folder: str, form: str, dp: int, tp: int) -> Iterator[str]:
    """Differences from one device with the same checkpoint; called on each rank."""
    files = {
        k: v
        for path in sorted(Path(folder).glob("*"))
        if path.suffix != ".json"
        for k, v in load_file(path).items()
    }
    for frozen in (True, False):
        one, many = converted(form, frozen=frozen), on_mesh(form, dp, tp, frozen)
        assert load_float8_checkpoint(one, folder) == ([], [])
        assert load_float8_checkpoint(many, folder) == ([], [])
        with_buffers(many)
        for name, layer in float8_layers(one).items():
            expected = dequantized(layer)
            if not same_bits(full(dequantized(many.get_submodule(name))), expected):
                yield f"{name}, {frozen=}"
            scales = files[f"{name}.weight_scale_inv"].to(torch.float64)
            scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            codes = files[f"{name}.weight"].to(torch.float64)
            exact = codes * scales[: codes.shape[0], : codes.shape[1]]
            if not same_bits(exact.to(torch.float32).to(expected.dtype), expected):
                yield f"values of {name}, {frozen=}"
        with torch.no_grad():
            logits = [full(m(input_ids=IDS).logits) for m in (one, many)]
        if tp == 1 and not same_bits(*logits):
            yield f"logits, {frozen=}"
        torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
        if frozen:
            yield from different(float8_state_dict(many, full_state_dict=True), files)


@pytest.mark.parametrize(
    ("form", "dp", "tp"),
    [("ue8m0", 2, 1), ("vllm", 2, 2)],
)
def test_each_rank_loads_its_part(
    ranks: RankPools, tmp_path: Path, form: str, dp: int, tp: int
) -> None:
    scale_dtype = torch.float8_e8m0fnu if form == "ue8m0" else torch.float32
    written(by_reference(form, scale_dtype), tmp_path)
    assert ranks(dp * tp).run_same(listed, str(tmp_path), form, dp, tp) == []


def listed(*args: Any) -> list[str]:
    return list(loads(*args))


def with_experts(device: str, frozen: bool, kind: str = "qwen3_moe") -> Any:
    with torch.device(device):
        model = build(kind)
    config = Float8ExpertsConfig("mxfp8")
    convert_experts_to_float8_training(model, config=config)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("mxfp8"),
        module_filter_fn=skip_head(model),
    )
    if frozen:
        model.requires_grad_(False)
        freeze_to_float8(model)
    return model


def loads_experts(folder: str) -> list[str]:
    """Load experts divided by expert parallelism, and by FSDP2; called on each rank."""
    one = with_experts("cpu", True)
    load_float8_checkpoint(one, folder)
    expected, wrong = float8_state_dict(one), []
    for way in ("ep", "fsdp"):
        many = with_experts("meta", True)
        mesh = device_mesh(**{way: 2})
        for experts in float8_experts(many).values() if way == "ep" else ():
            parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
        for block in (*many.model.layers, many) if way == "fsdp" else ():
            fully_shard(block, mesh=mesh["fsdp"])
        many.to_empty(device="cpu")
        load_float8_checkpoint(many, folder)
        wrong += different(float8_state_dict(many, full_state_dict=True), expected)
    return wrong


def test_experts(ranks: RankPools, tmp_path: Path) -> None:
    files = float8_state_dict(with_experts("cpu", False))
    save_file({k: v.contiguous() for k, v in files.items()}, tmp_path / "model.safetensors")
    model = with_experts("meta", True)
    model.to_empty(device="cpu")
    assert load_float8_checkpoint(model, tmp_path) == ([], [])
    assert different(float8_state_dict(model), files) == []
    assert ranks(2).run_same(loads_experts, str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_exported_experts_of_other_names_and_layouts(tmp_path: Path, kind: str) -> None:
    """Mixtral's routers have other names in files; GPT-OSS's experts are stacked ``[E, K, N]``."""
    source: Any = with_experts("cpu", False, kind)
    expected = float8_state_dict(source)
    source.save_pretrained(tmp_path, state_dict=dict(expected))
    assert kind != "mixtral" or "model.layers.0.mlp.gate.weight" in expected
    frozen, trained = with_experts("cpu", True, kind), with_experts("cpu", False, kind)
    for model in (frozen, trained):
        with torch.no_grad():
            for parameter in model.parameters():
                getattr(parameter, "plain", parameter).view(torch.uint8).zero_()
        assert load_float8_checkpoint(model, tmp_path) == ([], [])
    assert different(float8_state_dict(frozen), expected) == []
    frozen.save_pretrained(tmp_path / "again", state_dict=float8_state_dict(frozen))
    files = [load_file(at / "model.safetensors") for at in (tmp_path, tmp_path / "again")]
    assert different(*files) == []
    found = dict(trained.named_parameters())
    assert len(found) == len(dict(source.named_parameters()))
    for name, weight in float8_weights(frozen).items():
        assert same_bits(found[name].detach(), weight.high_precision()), name


def test_high_precision_entries_are_cast(tmp_path: Path) -> None:
    source = build("qwen3", **SIZES)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = converted("vllm", "meta")
    model.to_empty(device="cpu")
    load_float8_checkpoint(model, tmp_path / "model.safetensors")
    assert different(float8_state_dict(model), by_reference("vllm")) == []


def test_names(tmp_path: Path) -> None:
    files = by_reference("ue8m0")
    del files["model.norm.weight"]
    written(files | {"mtp.weight": torch.ones(2)}, tmp_path)
    model = converted("ue8m0")
    before = model.model.embed_tokens.weight.clone()
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    with pytest.raises(ValueError, match="the checkpoint and the model have other names: mis"):
        load_float8_checkpoint(model, tmp_path)
    assert same_bits(model.model.embed_tokens.weight, before + 1)
    found = load_float8_checkpoint(model, tmp_path, strict=False)
    assert found == (["model.norm.weight"], ["mtp.weight"])
    assert same_bits(model.model.embed_tokens.weight, before)


def test_the_reader_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(by_reference("ue8m0"), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="reads safetensors files: pip install"):
        load_float8_checkpoint(converted("ue8m0"), tmp_path)


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_inside_of_wrappers(tmp_path: Path, frozen: bool) -> None:
    """A wrapper for activation checkpointing adds to the names of layers, but not to keys."""
    written(by_reference("vllm"), tmp_path)
    plain, wrapped = converted("vllm", frozen=frozen), converted("vllm", frozen=frozen)
    for i, block in enumerate(wrapped.model.layers):
        wrapped.model.layers[i] = checkpoint_wrapper(block)
    for model in (plain, wrapped):
        assert load_float8_checkpoint(model, tmp_path) == ([], [])
    for one, other in zip(
        float8_layers(plain).values(), float8_layers(wrapped).values(), strict=True
    ):
        assert same_bits(dequantized(one), dequantized(other))


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            (NAME, torch.zeros(320, 192).to(torch.float8_e5m2)),
            "e5m2, and the layer's recipe stores",
        ),
        ((f"{NAME}_scale_inv", torch.full((3, 2), 1.1)), "are not powers of two, and the layer's"),
    ],
)
def test_what_the_recipe_does_not_store(
    tmp_path: Path, entry: tuple[str, torch.Tensor], expected: str
) -> None:
    written(by_reference("ue8m0") | dict([entry]), tmp_path)
    model = converted("ue8m0")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=expected):
        load_float8_checkpoint(model, tmp_path)
    assert different(dict(model.state_dict()), before) == []


def test_bad_files(tmp_path: Path) -> None:
    model = converted("ue8m0")
    assert "no safetensors file at" in raised(
        ValueError, lambda: load_float8_checkpoint(model, tmp_path)
    )
    written(by_reference("ue8m0"), tmp_path)
    meta = converted("ue8m0", "meta")
    error = raised(ValueError, lambda: load_float8_checkpoint(meta, tmp_path))
    assert "is on the meta device; call model.to_empty first" in error
