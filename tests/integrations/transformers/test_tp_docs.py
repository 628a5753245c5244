"""The example of docs/transformers_tp.md runs as it stands, on CPU ranks."""

import re
from pathlib import Path

import pytest
import torch
from ranks import RankPools, device_mesh
from transformers import LlamaForCausalLM

PAGE = Path(__file__).parents[3] / "docs" / "transformers_tp.md"


def run_example(folder: str) -> tuple[float, list[int]]:
    """The last loss and what was written; runs on ranks that have a process group."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    code = re.sub(r"^dist\.(init|destroy)_process_group.*\n", "", found.group(1), flags=re.M)
    code = code.replace("mesh = init_device_mesh(", "mesh = made(")
    scope = {"made": lambda device, sizes, **names: device_mesh(dp=sizes[0], tp=sizes[1])}
    exec(code.replace('"checkpoint"', repr(folder)), scope)
    return scope["loss"].item(), scope["written"].flatten().tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_the_example_trains_writes_and_saves(ranks: RankPools, tmp_path: Path, size: int) -> None:
    results = ranks(size).run(run_example, str(tmp_path), timeout=120)
    assert all(loss < 4 for loss, _ in results)
    written = results[0][1]
    assert len(written) == 64 + 8
    assert all(other == written for _, other in results)
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor(list(PAGE.read_bytes()[:64]))[None]
    with torch.no_grad():
        assert plain(input_ids=ids, labels=ids).loss < 4.5  # 5.5 before the training
