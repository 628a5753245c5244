"""The code of docs/transformers.md and the example run unchanged on gloo ranks."""

import os
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import run_shown
from nets import full
from ranks import RankPools, device_mesh
from torch.utils.data import DataLoader
from trainer_runs import dataset, launched, llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fp8_dist import conversion_summary, convert_to_float8_training, float8_layers, skip_head
from fp8_dist.debug import comm_audit
from scripts.examples import transformers_trainer

PAGE = Path(__file__).parents[3] / "docs/transformers.md"
TRAINER, ACCELERATE, LOOP, PARALLEL, LOADING, DISTRIBUTED, CONV1D = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL
)
SHARDING = "for layer in model.model.layers:\n    fully_shard(layer)\nfully_shard(model)\n"
TENSOR_PARALLEL = LOOP.replace(
    SHARDING, PARALLEL.replace("mesh = init_device_mesh(", "mesh = made(")
)


def run_block(code: str, folder: str) -> dict[str, Any]:
    """Run a block; return facts about its model, and whether the checkpoint equals the model."""
    code = code.replace("bf16=True,", "bf16=True, max_steps=2, report_to=[], disable_tqdm=True,")
    scope: dict[str, Any] = {
        "model": llama(),
        "dataset": dataset(),
        "batches": DataLoader(dataset(16), batch_size=2),  # type: ignore[arg-type]
        "path": f"{folder}/checkpoint",
        "device": "cpu",
        "ranks": dist.get_world_size(),
        "made": lambda device, sizes, **names: device_mesh(dp=sizes[0], tp=sizes[1]),
    }
    with launched(fsdp=True), chdir(folder):
        run_shown(code, scope)
        model = scope["trainer"].model if "trainer" in scope else scope["model"]
        dist.barrier()
        saved = AutoModelForCausalLM.from_pretrained(next(Path("runs").rglob("final")))
        weights = dict(saved.named_parameters())
        same = all(
            torch.equal(full(weight), weights.pop(name))
            for name, weight in model.named_parameters()
        )
        with comm_audit() as audit:
            model(input_ids=dataset(1)[0]["input_ids"][None])
    return {
        "model": type(model).__name__,
        "float8 gathers": audit.count("all_gather", dtype=torch.float8_e4m3fn),
        "amax messages": audit.count("all_reduce", dtype=torch.int32),
        "saved": type(saved).__name__,
        "the same weights": same and not weights,
        "plain": not float8_layers(saved),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "size", "gathers", "amaxes"),
    [
        pytest.param(TRAINER, 2, 2, 0, id="Trainer"),
        pytest.param(ACCELERATE, 2, 2, 0, id="accelerate"),
        pytest.param(LOOP, 2, 2, 0, id="FSDP2"),
        pytest.param(TENSOR_PARALLEL, 4, 6, 8, id="tensor parallelism"),  # also of inputs
        pytest.param(DISTRIBUTED, 2, 2, 14, id="distributed"),  # before the first step
    ],
)
def test_code_for_ranks(
    ranks: RankPools, tmp_path: Path, code: str, size: int, gathers: int, amaxes: int
) -> None:
    assert SHARDING in LOOP
    llama().save_pretrained(tmp_path / "checkpoint")
    assert ranks(size).run_same(run_block, code, str(tmp_path)) == {
        "model": "FSDPLlamaForCausalLM",
        "float8 gathers": gathers,
        "amax messages": amaxes,
        "saved": "LlamaForCausalLM",
        "the same weights": True,
        "plain": True,
    }


def test_loading(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    scope: dict[str, Any] = {"path": tmp_path}
    run_shown(LOADING, scope)
    names = float8_layers(scope["model"])
    assert len(names) == 7
    assert all(name.startswith("model.layers.1.") for name in names)


def test_gpt2_whose_conv1d_layers_are_replaced() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64)).eval()
    tokens = torch.arange(16)[None]
    expected = model(tokens).logits
    with pytest.raises(
        ValueError, match=r"(?s)Conv1D layers .*h\.0\.attn\.c_attn\.weight \(64 x 192\)"
    ):
        convert_to_float8_training(model, module_filter_fn=skip_head(model))
    skipped = {row.name for row in conversion_summary(model).skipped}
    assert "transformer.h.0.mlp.c_fc.weight" in skipped
    run_shown(CONV1D, {"model": model})
    torch.testing.assert_close(model(tokens).logits, expected)
    convert_to_float8_training(model, module_filter_fn=skip_head(model))
    assert len(float8_layers(model)) == 4


def example(folder: str, *argv: str) -> None:
    with launched(fsdp=True):
        transformers_trainer.main(["--out", folder, *argv])


@pytest.mark.full
def test_the_example_trains_and_resumes(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(example, str(tmp_path), "--steps", "4")
    ranks(2).run(example, str(tmp_path), "--steps", "6", "--resume")
    assert {"checkpoint-2", "checkpoint-6", "final"} <= set(os.listdir(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    tokens = transformers_trainer.pieces([PAGE])[0]["input_ids"][None]
    assert model(input_ids=tokens, labels=tokens).loss < 5.4  # log(256) = 5.55
