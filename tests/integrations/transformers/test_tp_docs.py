"""The loop of docs/transformers.md with tensor parallelism runs as it stands, on CPU ranks."""

import inspect
import os
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools, device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(LOOP,) = (code for code in BLOCKS if "for batch in batches:\n    model(" in code)
(PARALLEL,) = (code for code in BLOCKS if "hf_tp_plan" in code)
SHARDING = "for layer in model.model.layers:\n    fully_shard(layer)\nfully_shard(model)\n"


def run_example(folder: str) -> tuple[float, list[int]]:
    """The loss after training, and what was written; runs on ranks that have a process group."""
    assert SHARDING in LOOP
    ranks = dist.get_world_size()
    mesh = device_mesh(dp=ranks // 2, tp=2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))
    text = torch.tensor(list(inspect.getsource(os).encode()))
    batches = []
    for step in range(10):
        generator = torch.Generator().manual_seed(2 * step + mesh.get_local_rank("dp"))
        starts = torch.randint(len(text) - 64, (8,), generator=generator).tolist()
        ids = torch.stack([text[start : start + 64] for start in starts])
        batches.append({"input_ids": ids, "labels": ids})
    scope: dict[str, Any] = {
        "model": model,
        "batches": batches,
        "device": "cpu",
        "ranks": ranks,
        "made": lambda device, sizes, **names: device_mesh(dp=sizes[0], tp=sizes[1]),
    }
    parallel = PARALLEL.replace("mesh = init_device_mesh(", "mesh = made(")
    with chdir(folder):
        exec(LOOP.replace(SHARDING, parallel), scope)
    model.eval()
    with torch.no_grad():
        loss = model(**batches[-1]).loss
        written = model.generate(ids[:1] * 0 + 32, max_new_tokens=8, do_sample=False)
    return loss.item(), written.flatten().tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_the_loop_trains_writes_and_saves(ranks: RankPools, tmp_path: Path, size: int) -> None:
    results = ranks(size).run(run_example, str(tmp_path), timeout=180)
    assert all(loss < 4.2 for loss, _ in results)
    written = results[0][1]
    assert len(written) == 64 + 8
    assert all(other == written for _, other in results)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "runs/final")
    ids = torch.tensor(list(PAGE.read_bytes()[:64]))[None]
    with torch.no_grad():
        assert plain(input_ids=ids, labels=ids).loss < 4.8  # 5.5 before the training
