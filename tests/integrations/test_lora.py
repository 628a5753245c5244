"""PEFT's LoRA on a float8 base: training, and merges, which write through ``.data``."""

import re
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from documented import run_shown
from nets import full
from peft import LoraConfig, PeftModel, get_peft_model
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from stored_weights import CONFIGS, freeze
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import dataset, llama
from transformers import LlamaForCausalLM

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    dequantized,
    float8_layers,
    unfreeze_from_float8,
)
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel


class MLP(nn.Module):
    """Two layers, ``up`` and ``down``, to which PEFT adds adapters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, has_float8: bool) -> None:
    """Shard the layers, and adapters in the same way as their layers."""
    plan: dict[str, ParallelStyle] = {
        "up.base_layer": (Float8ColwiseParallel if has_float8 else ColwiseParallel)(),
        "down.base_layer": (Float8RowwiseParallel if has_float8 else RowwiseParallel)(),
        "up.lora_A.default": ColwiseParallel(output_layouts=Replicate()),
        "up.lora_B.default": ColwiseParallel(),
        "down.lora_A.default": RowwiseParallel(input_layouts=Shard(-1)),
        "down.lora_B.default": ColwiseParallel(output_layouts=Replicate()),
    }
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style)


def losses_of(way: str, config: Float8LinearConfig | None) -> list[float]:
    """Losses of a ReLoRA loop; adapters are merged, unmerged, and permanently merged."""
    base: nn.Module = MLP() if config is None else convert_to_float8_training(MLP(), config=config)
    found: list[float] = []
    x, target = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3))

    def loss(of: nn.Module) -> torch.Tensor:
        return (of(x) - target).square().mean()

    # (FSDP2 can't take new parameters later, and PEFT can't add adapters to sharded layers.)
    for stage in range(2 if way in ("one device", "DDP") else 1):
        torch.manual_seed(4 + stage)
        adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["up", "down"])
        peft = get_peft_model(base, adapters)  # type: ignore[arg-type]
        model: nn.Module = peft
        if way == "TP":
            tensor_parallel(base, device_mesh(tp=2), config is not None)
        elif way == "DDP":
            model = DistributedDataParallel(peft, process_group=device_mesh(dp=2).get_group())
        elif way.startswith("FSDP2"):
            fully_shard(base, mesh=device_mesh(dp=2))
        optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.02)
        handle = None if config is None else attach_update(optimizer, base)
        for _ in range(6):
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            optimizer.step()
            found.append(value.item())
        # In training mode, with gradients: caches of a forward must not outlive a merge.
        for change in (peft.merge_adapter, peft.unmerge_adapter, peft.merge_and_unload):
            if isinstance(base, FSDPModule):
                base.reshard()  # adapters are merged into the shards
            change()
            found.append(loss(base).item())
        if handle is not None:
            handle.remove()
    return found


WAYS = ["one device", "DDP", "FSDP2, high-precision gathers", "FSDP2, float8 gathers", "TP"]


def all_losses(recipe: str) -> dict[str, list[float]]:
    config = Float8LinearConfig.from_recipe_name(recipe)
    gathers = replace(config, enable_fsdp_float8_all_gather=True)
    return {way: losses_of(way, gathers if way == WAYS[3] else config) for way in WAYS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_merges_are_seen(ranks: RankPools, recipe: str) -> None:
    """Merges are noticed. (An unnoticed merge changes a loss by 10 % or more.)"""
    expected = torch.tensor(losses_of("one device", None))
    for way, losses in ranks(2).run(all_losses, recipe)[0].items():
        found = torch.tensor(losses)
        assert ((found / expected[: len(found)] - 1).abs() < 0.05).all(), (way, found, expected)


# Bases stored in float8


def distributed(base: nn.Module, size: int) -> None:
    """Apply FSDP2 on 2 ranks, and FSDP2 x tensor parallelism on 4."""
    if size == 4:
        tensor_parallel(base, device_mesh(dp=2, tp=2)["tp"], True)
    if size > 1:
        fully_shard(base, mesh=device_mesh(dp=2, tp=2)["dp"] if size == 4 else device_mesh(dp=2))


def adapted(recipe: str, order: str, size: int = 1, **options: Any) -> tuple[nn.Module, PeftModel]:
    """A converted base with adapters; ``order``: whether it is stored "before" or "after" them."""
    base = convert_to_float8_training(MLP(), config=CONFIGS[recipe])
    if order == "before":
        freeze(base.requires_grad_(False))
    torch.manual_seed(4)
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["up", "down"], **options)
    peft = get_peft_model(base, adapters)  # type: ignore[arg-type]
    if order == "after":
        assert len(freeze(peft)) == 2
    distributed(base, size)
    return base, peft  # type: ignore[return-value]


X, TARGET = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3))


def train(model: nn.Module, steps: int = 50, rank: int = 0) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(parameters, lr=0.02), []
    for _ in range(steps):
        value = (model(X + rank) - TARGET).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


@pytest.mark.parametrize(
    ("recipe", "size"), [("tensorwise", 1), ("mxfp8", 2), ("rowwise_folded", 4), ("mxfp4", 4)]
)
@pytest.mark.filterwarnings("ignore")
@on_ranks("size")
def test_a_stored_base_trains_the_same_adapters(recipe: str, size: int) -> None:
    """Losses equal those of a plain base bit for bit, if it is stored before or after adapters."""
    rank = device_mesh(dp=2, tp=size // 2).get_local_rank("dp") if size > 1 else 0
    plain, *stored = [
        train(adapted(recipe, order, size)[1], 10, rank) for order in ("", "before", "after")
    ]
    assert stored == [plain, plain]
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("recipe", ["rowwise_folded", "mxfp8"])
def test_merges_into_a_stored_base(recipe: str) -> None:
    """A merge casts the sum again, as for weights in high precision."""
    base, peft = adapted(recipe, "after")
    plain, plain_peft = adapted(recipe, "")
    trained = train(peft)[-1]
    train(plain_peft)

    def loss(of: nn.Module) -> float:
        return (of(X) - TARGET).square().mean().item()

    peft.merge_adapter()
    plain_peft.merge_adapter()
    assert loss(base) == pytest.approx(loss(plain), rel=0.02)
    # (The merge cast the sum of adapters and stored values; unmerging casts once more.)
    weight = dequantized(base.up.base_layer)  # type: ignore[union-attr]
    peft.unmerge_adapter()
    assert not torch.equal(dequantized(base.up.base_layer), weight)  # type: ignore[union-attr]
    assert loss(base) == pytest.approx(trained, rel=0.15)
    peft.add_adapter("other", LoraConfig(r=4, target_modules=["up"]))
    peft.set_adapter("other")
    assert loss(peft) > 0.9  # the loss with a new adapter
    peft.set_adapter("default")
    with peft.disable_adapter():
        assert loss(peft) > 0.9
    with pytest.raises(NotImplementedError, match=r"call fp8_dist\.unfreeze_from_float8"):
        peft.merge_adapter(safe_merge=True)
    assert peft.merge_and_unload() is base
    assert list(dict(base.named_parameters())) == [
        f"{name}.{part}" for name in ("up", "down") for part in ("weight", "weight_scale_inv")
    ]
    assert loss(base) == pytest.approx(loss(plain), rel=0.05)
    unfreeze_from_float8(base)
    assert loss(base) == pytest.approx(loss(plain), rel=0.05)


def merged_on_ranks(size: int) -> list[float]:
    base, peft = adapted("tensorwise", "after", size)
    train(peft, 6)
    found = []
    for change in (peft.merge_adapter, peft.unmerge_adapter, peft.merge_and_unload):
        if isinstance(base, FSDPModule):
            base.reshard()
        change()
        found.append((base(X) - TARGET).square().mean().item())
    return found


@pytest.mark.filterwarnings("ignore")
def test_merges_into_a_stored_base_on_ranks(ranks: RankPools) -> None:
    expected = merged_on_ranks(1)
    assert ranks(4).run_same(merged_on_ranks, 4) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp4"])
@on_ranks(2)
def test_adapters_that_add_to_the_base(recipe: str) -> None:
    """DoRA has the losses of a base that has the stored values in high precision."""
    for size in (1, 2):
        losses = []
        for is_stored in (True, False):
            base = convert_to_float8_training(MLP(), config=CONFIGS[recipe])
            freeze(base.requires_grad_(False))
            if not is_stored:
                unfreeze_from_float8(base)
            torch.manual_seed(4)
            adapters = LoraConfig(r=8, target_modules=["up", "down"], use_dora=True)
            peft = get_peft_model(base, adapters)  # type: ignore[arg-type]
            distributed(base, size)
            losses.append(train(peft, 3))
        assert losses[0] == losses[1]
        assert losses[0][-1] < losses[0][0]


def test_dora_on_a_base_in_bf16() -> None:
    outputs = []
    for is_stored in (True, False):
        base = convert_to_float8_training(MLP().bfloat16(), config=CONFIGS["mxfp4"])
        freeze(base.requires_grad_(False))
        if not is_stored:
            unfreeze_from_float8(base)
        torch.manual_seed(4)
        adapters = LoraConfig(r=8, target_modules=["up", "down"], use_dora=True)
        peft = get_peft_model(base, adapters, autocast_adapter_dtype=False)  # type: ignore[arg-type]
        outputs.append(peft(torch.ones(16, base.up.in_features, dtype=torch.bfloat16)))
        if is_stored:
            with pytest.raises(NotImplementedError, match="on a weight that is stored in float8"):
                peft.merge_adapter()
    assert torch.equal(*outputs)


def test_adapters_that_read_the_base() -> None:
    with pytest.raises(NotImplementedError, match=r"read it with fp8_dist\.dequantized"):
        adapted("blockwise", "before", init_lora_weights="pissa")


PAGE = (Path(__file__).parents[2] / "docs/lora.md").read_text()
ONE_DEVICE, FSDP2 = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(TRAINING,) = re.findall(r"^for batch in batches:\n(?: .*\n)+", ONE_DEVICE, re.MULTILINE)


def run_block(code: str, folder: str) -> tuple[list[str], list[str]]:
    """Run a block; return the float8 layers of the merged model, and the weights that changed."""
    code = code.replace("...  # train\n", TRAINING)
    batches = [{key: ids[None] for key, ids in row.items()} for row in dataset(8)]
    scope: dict[str, Any] = {"model": llama(), "batches": batches}
    with chdir(folder):
        run_shown(code, scope)
    merged, base = scope["model"], dict(llama().named_parameters())
    changed = [n for n, w in merged.named_parameters() if not torch.equal(full(w), base[n])]
    return list(float8_layers(merged)), changed


def check_merged(found: tuple[list[str], list[str]]) -> None:
    layers, changed = found
    assert len(layers) == 14
    names = [f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in "qv"]
    assert changed == [name.replace(".weight", "_proj.weight") for name in names]


def test_the_page_on_one_device(tmp_path: Path) -> None:
    check_merged(run_block(ONE_DEVICE, str(tmp_path)))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    base = dict(llama().named_parameters())
    assert sum(not torch.equal(w, base[name]) for name, w in saved.named_parameters()) == 4


@pytest.mark.filterwarnings("ignore")
def test_the_page_with_fsdp2(ranks: RankPools, tmp_path: Path) -> None:
    check_merged(ranks(2).run_same(run_block, FSDP2, str(tmp_path)))
