"""Float8 entries in checkpoints of other libraries are read as they were meant, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build
from reference import raised, same_bits
from safetensors.torch import save_file
from torch import nn

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    dequantized,
    float8_state_dict,
    freeze_to_float8,
    load_float8_checkpoint,
)
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training

N, K = 192, 320
Entries = dict[str, torch.Tensor]
each_store = pytest.mark.parametrize("frozen", [False, True])


def net(recipe: str, frozen: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(K, N, bias=False), nn.LayerNorm(N))
    config = Float8LinearConfig.from_recipe_name(recipe, **options)
    convert_to_float8_training(found, config=config)
    if frozen:
        found[0].requires_grad_(False)
        freeze_to_float8(found)
    return found


def coded(scales: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, and their values with one scale per block."""
    codes = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    whole = scales.double().reshape(-(-N // block[0]), -(-K // block[1]))
    whole = whole.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:N, :K]
    return codes, (codes.double() * whole).float()


def loaded(net: Any, entries: Entries, folder: Path, **options: Any) -> Any:
    norm = {"1.weight": torch.ones(N), "1.bias": torch.zeros(N)}
    entries = {name: each.contiguous() for name, each in (norm | entries).items()}
    save_file(entries, folder / "model.safetensors")
    return load_float8_checkpoint(net, folder, **options)


WHOLE, ROW, BLOCK = (N, K), (1, K), (128, 128)
POWERS = torch.exp2(torch.arange(N) % 7 - 9.0)


@each_store
@pytest.mark.parametrize(
    ("recipe", "scales", "block"),
    [
        ("tensorwise", torch.tensor(0.3), WHOLE),
        ("tensorwise", torch.tensor([0.3], dtype=torch.bfloat16), WHOLE),
        ("tensorwise", torch.tensor([[0.3]], dtype=torch.float16), WHOLE),
        ("tensorwise", torch.tensor([[[0.3]]]), WHOLE),
        ("rowwise_folded", POWERS.view(N, 1), ROW),
        ("rowwise_folded", POWERS.bfloat16(), ROW),
        ("blockwise", POWERS[:6].view(2, 3).to(torch.float8_e8m0fnu), BLOCK),
        ("blockwise", POWERS[:6].view(2, 3), BLOCK),
        ("mxfp8", POWERS[:60].view(6, 10), (32, 32)),
    ],
)
def test_scales_of_a_certain_meaning(
    tmp_path: Path,
    frozen: bool,
    recipe: str,
    scales: torch.Tensor,
    block: tuple[int, int],
) -> None:
    codes, expected = coded(scales, block)
    name = "weight_scale" if frozen else "weight_scale_inv"
    entries = {"0.weight": codes, f"0.{name}": scales}
    # Entries for inference with static scales, which are ignored. "k_scale" is for a KV cache.
    calibrated = {f"{each}_scale": torch.ones(()) for each in ("0.activation", "0.input", "k")}
    model = net(recipe, frozen)
    assert loaded(model, entries | calibrated, tmp_path) == ([], [])
    assert same_bits(dequantized(model[0]), expected)
    if frozen:
        assert torch.equal(model[0].weight.plain.view(torch.uint8), codes.view(torch.uint8))


ONES = {"0.weight_scale": torch.ones(2, 3)}


@each_store
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "are none. It needs one tensor, 0.weight_scale_inv or 0.weight_scale; rename its"),
        ({"0.weight_scaling": torch.ones(())}, "are 0.weight_scaling. It needs one tensor"),
        ({"0.qscale_weight": torch.ones(())}, "float8, and its scales in the checkpoint are none"),
        (ONES | {"0.weight_scale_inv": torch.ones(())}, "are 0.weight_scale, 0.weight_scale_inv."),
        (ONES | {"0.weight_scale_2": torch.ones(())}, "are 0.weight_scale, 0.weight_scale_2."),
        (ONES | {"0.weight_zero_point": torch.ones(())}, "are 0.weight_scale, 0.weight_zero_po"),
        (ONES | {"0.zero_point": torch.ones(())}, "are 0.weight_scale, 0.zero_point"),
        ({"0.weight_scale": torch.ones(2, 3).byte()}, "has the dtype torch.uint8; scales are"),
        ({"0.weight_scale": torch.ones(2, 3).int()}, "has the dtype torch.int32; scales are"),
        ({"0.weight_scale": torch.ones(2, 3).double()}, "has the dtype torch.float64; scales"),
        ({"0.weight_scale": -torch.ones(2, 3)}, "has negative scales"),
        ({"0.weight_scale": torch.ones(3, 2)}, r"0.weight_scale is \[3, 2\], "),
        ({"0.weight_scale": torch.ones(6)}, r"0.weight_scale is \[6\], "),
        ({"0.weight_scale": torch.ones(1, 6)}, r"0.weight_scale is \[1, 6\], "),
        ({"0.weight_scale": torch.ones(1, K)}, r"0.weight_scale is \[1, 320\], "),
        ({"0.weight_scale": torch.ones(K)}, r"0.weight_scale is \[320\], "),
        ({"0.weight_scale": torch.ones(N, 3)}, r"0.weight_scale is \[192, 3\], "),
        (
            ONES | {"0.weight": torch.ones(N, K).char()},
            "codes and integers are not read as values. Dequantize the",
        ),
        (
            ONES | {"0.weight": torch.ones(N, K)},
            "too; whether its values are to be multiplied is not",
        ),
        (
            ONES | {"0.weight": torch.ones(K, N).to(torch.float8_e4m3fn)},
            r"of shape \[320, 192\], and",
        ),
        (ONES | {"1.weight": torch.ones(N).to(torch.float8_e4m3fn)}, "1.weight is in float8, and"),
        (ONES | {"1.bias": torch.ones(N).to(torch.float8_e8m0fnu)}, "1.bias is in F8_E8M0 in the"),
    ],
)
def test_entries_that_are_refused_by_name(
    tmp_path: Path, frozen: bool, change: Entries, text: str
) -> None:
    model = net("blockwise", frozen)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change = {"0.weight": torch.ones(N, K).to(torch.float8_e4m3fn)} | change
    with pytest.raises(ValueError, match=text):
        loaded(model, change, tmp_path, strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (value, before[name]))), name


@each_store
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["0.weight.zero_point", "0.weight_zero_point", "0.zero_point"])
def test_zero_points_of_four_bit_weights_are_refused(
    tmp_path: Path, frozen: bool, blocks: bool, name: str
) -> None:
    model = net("mxfp8", False)
    if frozen:
        freeze_to_float8(model.requires_grad_(False), format="mxfp4", block_size=(1, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    codes, exponents = torch.ones(N, K // 2).byte(), torch.full((N, K // 32), 127).byte()
    entries = {"0.weight": codes.char(), "0.scale": exponents.view(torch.float8_e8m0fnu)}
    if blocks:
        entries = {"0.weight_blocks": codes.view(N, -1, 16), "0.weight_scales": exponents}
    (key, _), (scales, _) = entries.items()
    loaded(model, entries, tmp_path)
    model.load_state_dict(before)
    entries |= {name: torch.zeros(N, K // 32)}
    for strict in (True, False):
        error = raised(ValueError, lambda: loaded(model, entries, tmp_path, strict=strict))  # noqa: B023
        assert f"{key} is in MXFP4, which has one tensor of exponents and no zero points" in error
        assert f"but the checkpoint has {scales}, {name}; dequantize" in error
        for fqn, value in model.state_dict().items():
            assert same_bits(value.view(torch.uint8), before[fqn].view(torch.uint8)), fqn


def test_a_layer_of_other_code_keeps_its_codes(tmp_path: Path) -> None:
    """The codes stay codes if the module itself multiplies them by a scale parameter."""
    model = nn.Sequential(nn.Linear(K, N, bias=False), nn.LayerNorm(N)).requires_grad_(False)
    model[0].weight = nn.Parameter(torch.zeros(N, K).to(torch.float8_e4m3fn), False)
    model[0].weight_scale_inv = nn.Parameter(torch.zeros(()), False)
    codes, _ = coded(torch.ones(()), WHOLE)
    scale = torch.tensor(0.3)
    assert loaded(model, {"0.weight": codes, "0.weight_scale_inv": scale}, tmp_path) == ([], [])
    assert torch.equal(model[0].weight.view(torch.uint8), codes.view(torch.uint8))
    assert model[0].weight_scale_inv == scale
    other = {"0.weight": codes.float().to(torch.float8_e5m2), "0.weight_scale_inv": scale}
    with pytest.raises(ValueError, match=r"0.weight is in F8_E5M2 in the .* and in torch.float8_e"):
        loaded(model, other, tmp_path)


def with_experts(frozen: bool, recipe: Any = "blockwise", **sizes: int) -> Any:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128} | sizes
    model = build("qwen3_moe", num_hidden_layers=1, **sizes)
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))
    if frozen:
        model.requires_grad_(False)
        freeze_to_float8(model)
    return model


EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"


@each_store
@pytest.mark.parametrize("high", [[(0, "gate")], [(1, "up"), (2, "down")]])
def test_experts_of_several_dtypes(
    tmp_path: Path, frozen: bool, high: list[tuple[int, str]]
) -> None:
    entries = {k: v.contiguous() for k, v in float8_state_dict(with_experts(False)).items()}
    for key in (EXPERT.format(*each) for each in high):
        entries[key] = (entries[key].float() * entries.pop(f"{key}_scale_inv")).bfloat16()
    save_file(entries, tmp_path / "model.safetensors")
    model, expected = with_experts(frozen), with_experts(True)
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "plain", parameter).view(torch.uint8).zero_()
    assert load_float8_checkpoint(model, tmp_path) == ([], [])
    for name in ("gate_up_proj", "down_proj"):
        found, right = (dequantized(m.model.layers[0].mlp.experts, name) for m in (model, expected))
        assert same_bits(found, right), name


@pytest.mark.parametrize("mixed", [False, True])
def test_experts_whose_entries_share_scales(tmp_path: Path, mixed: bool) -> None:
    """The model has one scale for gate and up together; the checkpoint has one for each."""
    model = with_experts(True, "tensorwise")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    entries = {}
    for key, value in float8_state_dict(with_experts(False)).items():
        entries[key] = value.contiguous()
        if key.endswith("_scale_inv"):
            entries[key] = torch.ones(())
    if mixed:
        entries[EXPERT.format(0, "gate")] = torch.ones(128, 128)
        del entries[EXPERT.format(0, "gate") + "_scale_inv"]
    save_file(entries, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="that shares a scale with other parts"):
        load_float8_checkpoint(model, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (value, before[name]))), name


def test_files_that_are_damaged_or_twice(tmp_path: Path) -> None:
    model, path = net("blockwise", False), tmp_path / "model.safetensors"
    loaded(model, net("blockwise", False).state_dict(), tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"<html>" * 99):
        path.write_bytes(damaged)
        error = raised(ValueError, lambda: load_float8_checkpoint(model, tmp_path))
        assert f"{path} can't be read" in error
        assert "incomplete or damaged: download it, or save it, again" in error
    path.write_bytes(whole)
    (tmp_path / "copy.safetensors").write_bytes(whole)
    error = raised(ValueError, lambda: load_float8_checkpoint(model, tmp_path))
    assert "which another file has too; pass the files of one checkpoint" in error
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\xff"):
        index.write_text(text, encoding="latin-1")
        error = raised(ValueError, lambda: load_float8_checkpoint(model, tmp_path))
        assert "index.json can't be read" in error
    index.write_text(json.dumps({"weight_map": {"0.weight": path.name}}))
    assert load_float8_checkpoint(model, tmp_path) == ([], [])


@pytest.mark.parametrize("files", [None, 3, [None], {"a": 1}])
def test_what_is_no_path(files: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a directory with .* pass a path, or a list of"):
        load_float8_checkpoint(net("blockwise", False), files)


class OddNames(nn.Module):
    """Entries whose names look like those of blocks or adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.base_layer_norm = nn.LayerNorm(32)
        self.register_buffer("num_blocks", torch.tensor(3))
        self.memory_blocks = nn.Parameter(torch.randn(2, 3, 16))


def test_names_that_look_like_blocks_or_adapters(tmp_path: Path) -> None:
    saved, model = OddNames(), OddNames()
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    load_float8_checkpoint(model, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name
