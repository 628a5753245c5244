"""Round trips of converted models through safetensors, whose files hold only plain tensors."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net
from reference import same_bits
from safetensors.torch import load_file, load_model, save_file, save_model

from fp8_dist import Float8LinearConfig, convert_to_float8_training


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "mxfp8", "delayed"])
@pytest.mark.parametrize(("gather", "by_model"), [(False, True), ("auto", False)])
def test_round_trips(tmp_path: Path, recipe: str, gather: Any, by_model: bool) -> None:
    """With ``save_file`` and ``load_file``, or with ``save_model`` and ``load_model``."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gather)
    path, x = tmp_path / "model.safetensors", torch.randn(2, 4, 64)
    saved, loaded = (convert_to_float8_training(Net(seed=seed), config=config) for seed in (1, 2))
    loaded(x).sum().backward()  # caches statistics, which the load must make stale
    if by_model:
        save_model(saved, path)
        load_model(loaded, path)
    else:
        save_file(saved.state_dict(), path)
        loaded.load_state_dict(load_file(path))
    assert all(map(same_bits, saved.state_dict().values(), loaded.state_dict().values()))
    plain = Net()
    plain.load_state_dict(load_file(path))
    with torch.no_grad():
        assert same_bits(saved(x), loaded(x))
