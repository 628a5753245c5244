"""Released MXFP4 checkpoints, with one exponent per 32 values of a row, as frozen bases."""

import math
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import python_blocks, run_shown
from expecttest import assert_expected_inline
from hf_models import batch, build
from nets import full
from peft import LoraConfig, get_peft_model
from ranks import RankPools, device_mesh
from reference import all_warnings, raised, reloaded, same_bits
from safetensors.torch import load_file, save_file
from stored_weights import New
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import GptOssForCausalLM, Mxfp4Config

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_state_dict,
    freeze_to_float8,
    load_float8_checkpoint,
    skip_head,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import average_gradients_over
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertParallel

WAYS = {
    1: ["one device"],
    2: ["FSDP2", "EP"],
    3: ["FSDP2"],
    4: ["FSDP2", "HSDP", "EP", "EP x FSDP2"],
}
IN_HIGH_PRECISION = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]


def blocks_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict whose experts are random codes and exponents, over 30 octaves.

    The first 32 features of the inputs are smaller than others by 14 octaves, and their weights
    larger, so that recipes with fewer scales round other values.
    """
    generator, found = torch.Generator().manual_seed(1), {}
    for name, tensor in state.items():
        if tensor.ndim < 3:
            found[name] = tensor.clone()
            if "post_attention_layernorm" in name:
                found[name][:32] *= 2**-14
            continue
        experts, k, n = tensor.shape
        sizes = (256, (experts, n, k // 32, 16)), (16, (experts, n, k // 32))
        codes, exponents = (torch.randint(*size, generator=generator) for size in sizes)
        if "gate_up_proj" in name:
            exponents[..., 0] += 14
        found[f"{name}_blocks"] = codes.to(torch.uint8)
        found[f"{name}_scales"] = (exponents + 107).to(torch.uint8)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-OSS in MXFP4, as transformers saves it."""
    model: Any = build("gpt_oss").to(torch.bfloat16)
    path = tmp_path_factory.mktemp("gpt_oss")
    model.config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": IN_HIGH_PRECISION,
    }
    model.save_pretrained(path, state_dict=blocks_of(model.state_dict()))
    return path


def made(recipe: Any, packs: bool = True) -> Any:
    model: Any = build("gpt_oss").to(torch.bfloat16).requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are in fp32
    config = Float8ExpertsConfig(recipe, enable_fsdp_float8_all_gather=packs and "auto")
    convert_experts_to_float8_training(model, config=config)
    if packs:
        freeze_to_float8(model, format="mxfp4", block_size=(1, 32))
    return model


def distributed(model: Any, way: str) -> Any:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if way == "HSDP":
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=device_mesh(replicate=2, shard=2))
    elif way == "FSDP2":
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=device_mesh(dp=size))
    elif way != "one device":
        mesh = device_mesh(ep=size) if way == "EP" else device_mesh(dp=2, ep=2)
        for experts in float8_experts(model).values():
            parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
            if way != "EP":
                fully_shard(experts, mesh=mesh["dp"])
    return model


def loaded(folder: str | Path, way: str, recipe: Any) -> Any:
    model = distributed(made(recipe), way)
    for experts in float8_experts(model).values():
        for parameter in experts.parameters():
            getattr(local_tensor(parameter), "plain", parameter).detach().zero_()
    found = load_float8_checkpoint(model, folder)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    return model


def of_transformers(folder: str | Path) -> Any:
    config = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    ).requires_grad_(False)


@torch.no_grad()
def logits_on(folder: str, way: str) -> list[str]:
    """What differs from transformers' model and from the files; called on each rank."""
    rank = torch.distributed.get_rank() if way != "one device" else 0
    model, ids, wrong = loaded(folder, way, None), batch(rank), []
    if not same_bits(model(input_ids=ids).logits, of_transformers(folder)(input_ids=ids).logits):
        wrong.append("logits")
    files = load_file(Path(folder) / "model.safetensors")
    saved = float8_state_dict(model, full_state_dict=True, format="mxfp4")
    assert saved.keys() == files.keys()
    return wrong + [name for name in files if not same_bits(saved[name], files[name])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", WAYS)
def test_logits_and_saved_bytes(folder: Path, ranks: RankPools, size: int) -> None:
    for way in WAYS[size]:
        run: Any = logits_on if size == 1 else partial(ranks(size).run_same, logits_on)
        assert run(str(folder), way) == [], way


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_each_recipe_has_the_logits_of_its_casts(folder: Path) -> None:
    found: list[Tensor] = []
    for recipe in (None, "mxfp8", "tensorwise", "rowwise_folded"):
        plain = made(recipe, packs=False)
        load_float8_checkpoint(plain, folder)
        logits = loaded(folder, "one device", recipe)(input_ids=batch(0)).logits
        assert logits.isfinite().all()
        assert same_bits(logits, plain(input_ids=batch(0)).logits)
        assert not any(same_bits(logits, other) for other in found)
        found.append(logits)


def bytes_of(folder: str, packs: bool) -> tuple[int, str]:
    """The bytes of experts that a rank holds, and the gathers of a forward, but for small ones."""
    model = distributed(made(None, packs), "FSDP2")
    load_float8_checkpoint(model, folder)
    local = [local_tensor(p) for p in model.parameters() if p.ndim == 3]
    with comm_audit() as audit, torch.no_grad():
        model(input_ids=batch(0))
    return sum(getattr(x, "plain", x).nbytes for x in local), audit.without_modules().table()


@pytest.mark.filterwarnings("ignore")
def test_bytes(folder: Path, ranks: RankPools) -> None:
    """0.53 bytes per element of the base. Gathers of it send 0.27 of bf16's bytes."""
    (held, packed), (plain, usual) = (
        ranks(2).run_same(bytes_of, str(folder), packs) for packs in (True, False)
    )
    assert held / (plain / 2) == 0.5 + 1 / 32
    assert_expected_inline(
        f"{packed}\n{usual}",
        """\
op          axis   dtype             count  elements    bytes
all_gather  world  bfloat16              1    32,832   65,664
all_gather  world  float4_e2m1fn_x2      2   196,608   98,304
all_gather  world  bfloat16              +    28,304   56,608
all_gather  world  uint8                 +     6,144    6,144
total                                    3            226,720
  float8                                               98,304
  other                                               128,416
op          axis   dtype     count  elements    bytes
all_gather  world  bfloat16      3   257,744  515,488
total                            3            515,488
  float8                                            0
  other                                       515,488""",
    )


@pytest.mark.filterwarnings("ignore")
def test_values_are_made_once() -> None:
    """A backward too makes the float8 data of an expert and its values in bf16, nothing else."""
    mlp, x = made(None).model.layers[0].mlp, torch.randn(1, 24, 64).bfloat16().requires_grad_()
    with New() as new:
        mlp(x)[0].sum().backward()
    sizes = {p.numel() for p in (mlp.experts.gate_up_proj, mlp.experts.down_proj)}
    dtypes = [dtype for shape, dtype in new.made if math.prod(shape) in sizes]
    assert dtypes == [torch.float8_e4m3fn, torch.bfloat16] * 4


# What is refused


def stored_state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def change(files: dict[str, Tensor], which: str) -> None:
    """Damage an entry of a checkpoint."""
    name = "model.layers.1.mlp.experts.down_proj"
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if which == "no scales":
        del files[scales]
    elif which == "no blocks":
        del files[blocks]
    elif which == "NaN":
        files[scales][1, 2, 3] = 255
    elif which == "other experts":
        files[blocks], files[scales] = files[blocks][1:].clone(), files[scales][1:].clone()
    elif which == "fewer columns":
        files[blocks] = files[blocks][:, :, :3].clone()
        files[scales] = files[scales][:, :, :3].clone()
    elif which == "a row":
        files[blocks], files[scales] = files[blocks][0, 0].clone(), files[scales][0, 0].clone()
    elif which == "flat":
        files[blocks] = files[blocks].flatten(-2).clone()
    elif which == "transposed":
        files[blocks] = files[blocks].transpose(1, 2).contiguous()
    elif which == "odd scales":
        files[scales] = files[scales].float()
    elif which == "others":
        files |= {f"x_{end}": files[f"{name}_{end}"].clone() for end in ("blocks", "scales")}
    else:
        files[name] = torch.zeros(4, 128, 64)


CHANGES = ["no scales", "no blocks", "NaN", "other experts", "fewer columns", "flat", "transposed"]
CHANGES += ["odd scales", "both", "a row", "others"]


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    """Errors name the entry, before anything is written."""
    model, texts = made(None), []
    before = stored_state(model)
    for which in CHANGES:
        files = load_file(folder / "model.safetensors")
        change(files, which)
        save_file(files, tmp_path / "model.safetensors")
        texts.append(raised(ValueError, lambda: load_float8_checkpoint(model, tmp_path)))
        after = stored_state(model)
        assert all(same_bits(tensor, after[name]) for name, tensor in before.items())
    plain: Any = build("gpt_oss")
    texts.append(raised(ValueError, lambda: load_float8_checkpoint(plain, folder)))
    squares: Any = build("gpt_oss")
    config = Float8ExpertsConfig("mxfp8", weight_format="mxfp4")
    convert_experts_to_float8_training(squares, config=config).requires_grad_(False)
    freeze_to_float8(squares, format="mxfp4")
    texts.append(raised(ValueError, lambda: load_float8_checkpoint(squares, folder)))
    assert_expected_inline(
        "\n".join(texts),
        """\
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks is U8 [4, 64, 4, 16], and model.layers.1.mlp.experts.down_proj_scales is missing []. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; save the checkpoint in the layout of GPT-OSS or DeepSeek-V4
load_float8_checkpoint: the checkpoint and the model have other names: missing model.layers.1.mlp.experts.down_proj; unexpected model.layers.1.mlp.experts.down_proj_scales. Pass strict=False to load the rest
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_scales has the exponent 255, NaN; download the checkpoint, or save it, again
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks has values of shape [3, 128, 64], and the model has [4, 128, 64]
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks has values of shape [4, 96, 64], and the model has [4, 128, 64]
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks is U8 [4, 64, 64], and model.layers.1.mlp.experts.down_proj_scales is U8 [4, 64, 4]. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; save the checkpoint in the layout of GPT-OSS or DeepSeek-V4
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks is U8 [4, 4, 64, 16], and model.layers.1.mlp.experts.down_proj_scales is U8 [4, 64, 4]. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; save the checkpoint in the layout of GPT-OSS or DeepSeek-V4
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks is U8 [4, 64, 4, 16], and model.layers.1.mlp.experts.down_proj_scales is F32 [4, 64, 4]. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; save the checkpoint in the layout of GPT-OSS or DeepSeek-V4
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks is U8 [4, 64, 4, 16], and model.layers.1.mlp.experts.down_proj_scales is U8 [4, 64, 4]. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; save the checkpoint in the layout of GPT-OSS or DeepSeek-V4
load_float8_checkpoint: model.layers.1.mlp.experts.down_proj_blocks is U8 [4, 16], and model.layers.1.mlp.experts.down_proj_scales is U8 [4]. MXFP4 has blocks U8 [..., N, K / 32, 16] and scales U8 [..., N, K / 32] in place of a weight, or weights I8 [N, K / 2] and scales F8_E8M0 [N, K / 32]; save the checkpoint in the layout of GPT-OSS or DeepSeek-V4
load_float8_checkpoint: the checkpoint and the model have other names: missing none; unexpected x_scales, x_blocks. Pass strict=False to load the rest
load_float8_checkpoint: model.layers.0.mlp.experts.gate_up_proj_blocks is in MXFP4, and whether the model has its matrices transposed is not known; call convert_experts_to_float8_training
load_float8_checkpoint: model.layers.0.mlp.experts.gate_up_proj_scales is [4, 2, 256], and the layer's recipe has one scale per block of 32 x 32 (MXFP4, floor), [4, 2, 8]; convert the model with the recipe of the checkpoint: "blockwise" for scales of blocks, as DeepSeek's and Qwen's, "rowwise_folded" for those of rows, "tensorwise" for one; for MXFP4, freeze_to_float8(model, format="mxfp4", block_size=(1, 32))""",
    )


# Adapters


ADAPTERS = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    init_lora_weights=False,
)


def adapted(model: Any, way: str, *others: str) -> Any:
    """With adapters; those of experts are replicated over EP, and sharded with their base.

    ``others``: the names of adapters beside the default one, which are active, too.
    """
    torch.manual_seed(5)
    peft: Any = get_peft_model(model, ADAPTERS)
    for name in others:
        peft.add_adapter(name, ADAPTERS)
    peft.base_model.set_adapter(["default", *others])
    if not way.startswith("EP"):
        distributed(model, way)
        return peft
    mesh = device_mesh(ep=2) if way == "EP" else device_mesh(dp=2, ep=2)
    for base in float8_experts(model).values():
        parallelize_module(base, mesh["ep"], Float8ExpertParallel())
    ignored: set[nn.Parameter] = set()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for module in experts.modules():
            if isinstance(module, nn.Linear):
                distribute_module(module, mesh["ep"])
        if way == "EP":
            ignored |= {*experts.parameters()}
            continue
        fully_shard(experts, mesh=mesh["dp"])  # before a forward adds adapters to its weights
        average_gradients_over(experts, mesh)
    fully_shard(model, mesh=mesh if way == "EP" else mesh._flatten(), ignored_params=ignored)
    return peft


def trained(model: Any, ids: Tensor, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the adapters' parameters."""
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.SGD(adapters.values(), lr=0.1), []
    for _ in range(steps):
        loss = model(input_ids=ids).logits.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full(p.detach()).clone() for name, p in adapters.items()}


def same_training(a: Any, b: Any) -> bool:
    return a[0] == b[0] and all(same_bits(tensor, b[1][name]) for name, tensor in a[1].items())


def adapters_on(folder: str, way: str, recipe: Any) -> bool:
    """Whether adapters train as beside the dequantized base; if ranks agree, as on one device."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ids = batch(rank % 2 if way.startswith("EP") else 0)
    plain = made(recipe, packs=False)
    load_float8_checkpoint(plain, folder)
    expected = trained(adapted(plain, way), ids)
    packed = made(recipe)
    load_float8_checkpoint(packed, folder)
    peft = adapted(packed, way)
    found = trained(peft, ids)
    assert expected[0][1] < expected[0][0]
    is_third = torch.distributed.is_initialized() and torch.distributed.get_world_size() == 3
    if not (way.startswith("EP") or is_third):  # the mean of three ranks' gradients is rounded
        plain = made(recipe, packs=False)
        load_float8_checkpoint(plain, folder)
        expected_alone = trained(adapted(plain, "one device"), ids)
        assert same_training(found, expected_alone), (way, recipe)
    return same_training(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [None, "mxfp8", "rowwise_folded"])
@pytest.mark.parametrize("size", WAYS)
def test_adapters(folder: Path, ranks: RankPools, size: int, recipe: Any) -> None:
    for way in WAYS[size] if size < 4 else ["HSDP", "EP x FSDP2"]:
        run: Any = adapters_on if size == 1 else partial(ranks(size).run_same, adapters_on)
        assert run(str(folder), way, recipe), way


def both_train(folder: str, way: str) -> bool:
    """Whether two adapters train as beside the dequantized base."""
    found = []
    for packs in (True, False):
        model = made("mxfp8", packs)
        load_float8_checkpoint(model, folder)
        found.append(trained(adapted(model, way, "other"), batch(0)))
    (losses, adapters), _ = found
    assert losses[1] < losses[0]
    assert len([name for name in adapters if "experts" in name]) == 16
    return same_training(*found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [1, 2])
def test_two_active_adapters(folder: Path, ranks: RankPools, size: int) -> None:
    run: Any = both_train if size == 1 else partial(ranks(size).run_same, both_train)
    assert run(str(folder), "one device" if size == 1 else "FSDP2")


def reassigned(model: Any) -> Any:
    """A copy whose base is that of the model's state dict, not of its own."""
    copied, state = deepcopy(model), deepcopy(model.state_dict())
    for parameter in copied.parameters():
        getattr(parameter, "plain", parameter).detach().zero_()
    copied.load_state_dict(state, assign=True)
    return copied


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [deepcopy, partial(reloaded, weights_only=False), reassigned])
@pytest.mark.parametrize("others", [(), ("other",)])
def test_copies_of_models_with_adapters(
    folder: Path, form: Callable[[Any], Any], others: tuple[str, ...]
) -> None:
    """A copy computes with its own base, and merges into it, also without the model."""
    model, ids = made(None), batch(0)
    load_float8_checkpoint(model, folder)
    peft, outputs = adapted(model, "one device", *others), []
    copied = form(peft)
    outputs.append(peft(input_ids=ids).logits)
    peft.merge_adapter()
    outputs.append(peft(input_ids=ids).logits)
    state = peft.state_dict()
    del model, peft
    assert same_bits(copied(input_ids=ids).logits, outputs[0])
    copied.merge_adapter()
    assert same_bits(copied(input_ids=ids).logits, outputs[1])
    assert not same_bits(*outputs)
    assert all(same_bits(state[name], tensor) for name, tensor in copied.state_dict().items())


def gradients_on(folder: str, way: str, recipe: Any) -> dict[str, Tensor]:
    """Half of the gradients of experts' adapters, over the tokens of two ranks of EP."""
    is_alone = way == "one device"
    model = made(recipe)
    load_float8_checkpoint(model, folder)
    peft = adapted(model, way)
    ids = [batch(rank) for rank in (range(2) if is_alone else [torch.distributed.get_rank() % 2])]
    (peft(input_ids=torch.cat(ids)).logits.float().square().sum() * 2**-10).backward()
    halves = 1.0 if way == "EP x FSDP2" else 0.5  # FSDP2 has divided two equal sums by 4
    found = {name: p.grad for name, p in model.named_parameters() if "experts" in name}
    return {name: full(grad) * halves for name, grad in found.items() if grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "way"), [(2, "EP"), (4, "EP x FSDP2")])
@pytest.mark.parametrize("recipe", [None, "rowwise_folded"])
def test_gradients_of_adapters_of_experts(
    folder: Path, ranks: RankPools, size: int, way: str, recipe: Any
) -> None:
    """They have the bits of one device, which has the tokens of all ranks of EP."""
    expected = gradients_on(str(folder), "one device", recipe)
    assert len(expected) == 8
    for found in ranks(size).run(gradients_on, str(folder), way, recipe):
        assert [name for name, g in expected.items() if not same_bits(found[name], g)] == []


def merged(folder: str, size: int) -> tuple[dict[str, Tensor], list[str]]:
    """The experts of a merged model, and the warnings about merges; loaded beside adapters."""
    with torch.device("meta"):
        model = made("mxfp8")
        peft = get_peft_model(model, ADAPTERS)
    distributed(model, "FSDP2" if size > 1 else "one device")
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    found = load_float8_checkpoint(peft.get_base_model(), folder, strict=False)
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert found.unexpected_keys == []
    # The names of nested adapters lack base_layer, too.
    assert {*found.missing_keys} == {name.replace(".base_layer", "") for name in adapters}
    for seed, parameter in enumerate(adapters.values()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(0.1 * values)
    before = float8_state_dict(model, full_state_dict=True, format="mxfp4")
    files = load_file(Path(folder) / "model.safetensors")
    saved = {name.replace(".base_layer", ""): tensor for name, tensor in before.items()}
    assert all(same_bits(saved[name], tensor) for name, tensor in files.items())
    with all_warnings() as texts:
        peft.merge_adapter()
    state = float8_state_dict(model, full_state_dict=True, format="mxfp4")
    said = [text for text in texts if "SQNR" in text]
    return {n: t for n, t in state.items() if "experts" in n and n.endswith(ENDS)}, said


ENDS = ("_blocks", "_scales")


@pytest.mark.filterwarnings("ignore")
def test_merges(folder: Path, ranks: RankPools) -> None:
    """A merge casts the sum by blocks of 1 x 32, on each mesh alike, and says how well."""
    state, said = merged(str(folder), 1)
    assert [text.partition(":")[0] for text in said] == [
        f"model.layers.{i}.mlp.experts" for i in (0, 0, 1, 1)
    ]
    assert re.search(r"SQNR of 1\d\.\d dB \(of down_proj, on this rank\)", "".join(said))
    for other, _ in ranks(2).run(merged, str(folder), 2):
        assert other.keys() == state.keys()
        assert all(same_bits(tensor, other[name]) for name, tensor in state.items())


@pytest.mark.filterwarnings("ignore")
def test_quantization_aware_training(tmp_path: Path) -> None:
    """The values that a training multiplies are those of its export, which is a frozen base."""
    model: Any = build("gpt_oss").to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    fields: Any = {"weight_format": "mxfp4", "weight_block_size": (1, 32)}
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig("mxfp8", **fields))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits = []
    for _ in range(2):
        logits.append(model(input_ids=batch(0)).logits)
        logits[-1].float().square().mean().backward()
        optimizer.step()
    assert not same_bits(*logits)
    state = float8_state_dict(model, format="mxfp4")
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()},
        tmp_path / "model.safetensors",
    )
    base = loaded(tmp_path, "one device", "mxfp8")
    assert same_bits(base(input_ids=batch(0)).logits, model(input_ids=batch(0)).logits)
    model.requires_grad_(False)
    freeze_to_float8(model, format="mxfp4")
    assert same_bits(base(input_ids=batch(0)).logits, model(input_ids=batch(0)).logits)
    text = raised(ValueError, lambda: Float8ExpertsConfig("blockwise", **fields))
    assert "blocks of a row must have equal sizes, 128 or 32" in text


def run_page(folder: str) -> bool:
    scope: dict[str, Any] = {"folder": folder, "device": "cpu"}
    run_shown(PAGE_LINES, scope)
    files = load_file(Path(folder) / "model.safetensors")
    saved = float8_state_dict(scope["model"], full_state_dict=True, format="mxfp4")
    expected = loaded(folder, "FSDP2", "mxfp8")(input_ids=batch(0)).logits
    return same_bits(scope["model"](input_ids=batch(0)).logits, expected) and all(
        same_bits(saved[name], tensor) for name, tensor in files.items()
    )


PAGE_LINES = python_blocks("docs/four_bits.md")[1]


@pytest.mark.filterwarnings("ignore")
def test_the_page(folder: Path, ranks: RankPools) -> None:
    assert len(PAGE_LINES.strip().splitlines()) <= 21
    assert ranks(2).run_same(run_page, str(folder))


def test_experts_that_are_entries_of_their_own(tmp_path: Path) -> None:
    """Experts ``[E, N, K]``, each of which is an entry, and linear layers."""

    def stored(seed: int) -> Any:
        model: Any = build("qwen3_moe").to(torch.bfloat16).requires_grad_(False)
        for parameter in model.parameters():
            parameter.mul_(1 + seed)
        convert_experts_to_float8_training(model, config=Float8ExpertsConfig("tensorwise"))
        config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
        freeze_to_float8(model, format="mxfp4", block_size=(1, 32))
        return model

    source, model = stored(0), stored(1)
    files = float8_state_dict(source, format="mxfp4")
    assert files["model.layers.0.mlp.experts.3.up_proj.weight"].dtype is torch.int8
    save_file(files, tmp_path / "model.safetensors")
    assert load_float8_checkpoint(model, tmp_path) == ([], [])
    saved = float8_state_dict(model, format="mxfp4")
    assert all(same_bits(saved[name], tensor) for name, tensor in files.items())
    ids = batch(0)
    assert same_bits(model(input_ids=ids).logits, source(input_ids=ids).logits)
