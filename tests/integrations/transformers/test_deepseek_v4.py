"""DeepSeek-V4's checkpoints: experts in MXFP4, other weights in float8 or high precision."""

import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from ranks import RankPools, device_mesh
from reference import raised, same_bits
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    FineGrainedFP8Config,
)
from transformers.core_model_loading import revert_weight_conversion

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    dequantized,
    float8_layers,
    float8_state_dict,
    freeze_to_float8,
    load_float8_checkpoint,
)
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertParallel

CONFIG = DeepseekV4Config(
    vocab_size=64,
    hidden_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    head_dim=64,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=8,
    sliding_window=16,
)
# In float8, with one e8m0 scale per 128 x 128 values.
DENSE = re.compile(r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight|\.shared_experts\..*\.weight")
IDS = torch.arange(48).view(2, 24)


def released(model: Any) -> dict[str, Tensor]:
    """The entries of a released checkpoint, with random codes and exponents of experts."""
    generator, found = torch.Generator().manual_seed(1), dict[str, Tensor]()
    random = partial(torch.randint, generator=generator, dtype=torch.uint8)
    for fqn, value in model.state_dict().items():
        entries = revert_weight_conversion(model, {fqn.removeprefix("model."): value})
        for name, tensor in entries.items():
            scale = name.removesuffix("weight") + "scale"
            if ".ffn.experts." in name:
                n, k = tensor.shape
                found[name] = random(256, (n, k // 2)).view(torch.int8)
                exponents = random(112, 134, (n, k // 32))
            elif DENSE.search(name):
                found[name] = (64 * tensor.float()).to(torch.float8_e4m3fn)
                exponents = random(119, 122, [-(-size // 128) for size in tensor.shape])
            else:
                found[name] = tensor.clone()
                continue
            found[scale] = exponents.view(torch.float8_e8m0fnu)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    path = tmp_path_factory.mktemp("deepseek_v4")
    save_file(released(model), path / "model.safetensors", metadata={"format": "pt"})
    config = deepcopy(CONFIG)
    config.quantization_config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    config.save_pretrained(path)
    return path


def of_transformers(folder: str | Path) -> Any:
    config = FineGrainedFP8Config(dequantize=True, expert_dtype="fp4")
    return DeepseekV4ForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    ).requires_grad_(False)


def loaded(
    folder: str | Path, way: str, like: Any = None, freezes: bool = True, recipe: Any = None
) -> Any:
    """A model with experts from the files; ``like``: a model that has its parameters' dtypes."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model.requires_grad_(False).eval()
    if like is not None:
        for parameter, other in zip(model.parameters(), like.parameters(), strict=True):
            parameter.data = parameter.data.to(other.dtype)
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))
    if freezes:
        freeze_to_float8(model, format="mxfp4", block_size=(1, 32))
    if way == "EP":
        for experts in float8_experts(model).values():
            parallelize_module(experts, device_mesh(ep=2), Float8ExpertParallel())
    elif way != "one device":
        dim = Shard(2 if way == "FSDP2 by columns" else 0)
        for experts in float8_experts(model).values():
            fully_shard(experts, mesh=device_mesh(dp=2), shard_placement_fn=lambda _: dim)
    model.to_empty(device="cpu")
    for module in [module for module in model.modules() if hasattr(module, "rotary_emb")]:
        module.rotary_emb = type(module.rotary_emb)(CONFIG)
    assert load_float8_checkpoint(model, folder) == ([], [])
    return model


@torch.no_grad()
def differences(folder: str, way: str, freezes: bool = True) -> list[str]:
    """What differs from transformers' model and from the files; called on each rank."""
    theirs = of_transformers(folder)
    model, wrong = loaded(folder, way, theirs, freezes), []
    if not same_bits(model(IDS).logits, theirs(IDS).logits):
        wrong.append("logits")
    if not freezes:
        return wrong
    files = load_file(Path(folder) / "model.safetensors")
    experts = {f"model.{name}": entry for name, entry in files.items() if ".ffn.experts." in name}
    saved = float8_state_dict(model, full_state_dict=True, format="mxfp4")
    assert {name for name in saved if ".experts." in name} == experts.keys()
    return wrong + [name for name in experts if not same_bits(saved[name], experts[name])]


@pytest.mark.filterwarnings("ignore")
def test_logits_and_saved_bytes(folder: Path, ranks: RankPools) -> None:
    assert differences(str(folder), "one device") == []
    assert differences(str(folder), "one device", freezes=False) == []
    for way in ("FSDP2", "FSDP2 by columns", "EP"):
        assert ranks(2).run_same(differences, str(folder), way) == [], way


@pytest.mark.filterwarnings("ignore")
def test_what_is_saved_is_loaded_again(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, "one device")
    save_file(float8_state_dict(model, format="mxfp4"), tmp_path / "model.safetensors")
    again = loaded(tmp_path, "one device")
    assert all(map(same_bits, *(map(plain_of, x.parameters()) for x in (model, again))))


@pytest.mark.filterwarnings("ignore")
def test_dense_weights_stay_in_float8(folder: Path) -> None:
    theirs = of_transformers(folder)
    model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model.requires_grad_(False)
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig("blockwise"))
    config = Float8LinearConfig.from_recipe_name("blockwise")
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, fqn: ".shared_experts." in fqn
    )
    shared = freeze_to_float8(model, module_filter_fn=lambda _, fqn: ".shared_experts." in fqn)
    assert len(shared) == 6
    load_float8_checkpoint(model, folder)
    for name, layer in float8_layers(model).items():
        assert same_bits(dequantized(layer), theirs.get_parameter(f"{name}.weight"))


ADAPTERS = LoraConfig(
    r=4,
    target_modules=["q_a_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    init_lora_weights=False,
)


def trained(folder: Path, recipe: Any, freezes: bool) -> list[Tensor]:
    """The losses of two steps of adapters, and the adapters after them."""
    model = loaded(folder, "one device", freezes=freezes, recipe=recipe)
    torch.manual_seed(5)
    peft = get_peft_model(model, ADAPTERS)
    adapters, losses = [p for p in peft.parameters() if p.requires_grad], []
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    for _ in range(2):
        losses.append(peft(IDS).logits.float().square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *adapters]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_adapters_have_the_bits_of_the_dequantized_base(folder: Path, recipe: Any) -> None:
    assert all(map(same_bits, *(trained(folder, recipe, freezes) for freezes in (True, False))))


W1 = "layers.1.ffn.experts.2.w1"


@pytest.mark.filterwarnings("ignore")
def test_wrong_entries_are_named_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    files = load_file(folder / "model.safetensors")
    codes, scales = files[f"{W1}.weight"], files[f"{W1}.scale"]
    nan = scales.clone()
    nan.view(torch.uint8)[3, 1] = 255
    layout = f"{W1}.weight is I8 [64, {{}}], and {W1}.scale is {{}}. MXFP4 has blocks U8 [..., N, K"
    for changes, message in (
        ({"weight": codes[:, :62]}, layout.format(62, "F8_E8M0 [64, 4]")),
        ({"scale": scales[:, :3]}, layout.format(64, "F8_E8M0 [64, 3]")),
        ({"weight": codes[:32], "scale": scales[:32]}, f"{W1}.weight has values of shape [32, 12"),
        ({"scale": nan}, f"{W1}.scale has the exponent 255"),
        ({"scale": scales.float()}, f"unexpected {W1}.scale"),
        ({"scale": scales[0, 0]}, layout.format(64, "F8_E8M0 []")),
        (
            {"weight_scale_inv": scales.clone()},
            f"{W1}.weight is in MXFP4, which has one tensor of exponents and no zero points, but",
        ),
        ({"scale": None}, f"{W1}.weight has values of shape [64, 64], and the model has [1, 64,"),
        ({"weight": None, "scale": None}, f"missing {W1}.weight"),
    ):
        changed = files | {f"{W1}.{kind}": value for kind, value in changes.items()}
        kept = {name: x.contiguous() for name, x in changed.items() if x is not None}
        save_file(kept, tmp_path / "model.safetensors")
        model = loaded(folder, "one device")
        before = [plain_of(parameter) for parameter in model.parameters()]
        text = raised(ValueError, partial(load_float8_checkpoint, model, tmp_path))
        assert message in text, text
        after = [plain_of(parameter) for parameter in model.parameters()]
        assert all(map(same_bits, before, after)), message


def plain_of(parameter: Tensor) -> Tensor:
    return getattr(parameter, "plain", parameter).detach().clone()
