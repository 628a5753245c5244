"""State of converted models on one device is that of nn.Linear."""

import subprocess
import sys
from pathlib import Path

import torch
from nets import Net
from reference import same_bits
from torch.nn.utils.parametrizations import weight_norm

from fp8_dist import Float8LinearConfig, convert_to_float8_training

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def test_checkpoints_of_both_kinds_are_interchangeable() -> None:
    plain = Net(seed=1)
    for config in (Float8LinearConfig(), GATHERED):
        float8 = convert_to_float8_training(Net(seed=2), config=config)
        for strict in (True, False):
            float8.load_state_dict(plain.state_dict(), strict=strict)
        back = Net(seed=3)
        back.load_state_dict(float8.state_dict())
        for name, value in back.state_dict().items():
            assert same_bits(value, plain.state_dict()[name])
        float8.load_state_dict(plain.state_dict(), assign=True)
        assert float8.layers[0].w1.weight.requires_grad


def test_loading_a_checkpoint_does_not_need_the_library(tmp_path: Path) -> None:
    float8 = convert_to_float8_training(Net(), config=GATHERED)
    torch.save(float8.state_dict(), tmp_path / "state.pt")
    program = (
        f"import sys, torch; state = torch.load({str(tmp_path / 'state.pt')!r}, "
        "weights_only=True); assert 'fp8_dist' not in sys.modules; print(len(state))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert loaded.stdout.strip() == "10", loaded.stderr


def test_a_parametrized_layer_has_the_state_of_nn_linear() -> None:
    float8 = convert_to_float8_training(Net())
    normed, plain = (weight_norm(net.layers[0].w1) for net in (float8, Net()))
    assert normed.state_dict().keys() == plain.state_dict().keys()
