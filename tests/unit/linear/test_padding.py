"""Sizes that are no multiples of 16, on one device."""

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from reference import sqnr

from fp8_dist import Float8LinearConfig, convert_to_float8_training

STRICT = "FP8_DIST_STRICT_ALIGNMENT"


def test_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRICT, "1")
    net = convert_to_float8_training(nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32)))
    with pytest.raises(ValueError, match="multiples") as info:
        net(torch.randn(20, 32))
    assert_expected_inline(
        str(info.value),
        """0: float8 GEMMs need local sizes that are multiples of 16 on this device, found out_features 40; set Float8LinearConfig.pad_inner_dim=True or leave the layer unconverted""",
    )
    emulated = convert_to_float8_training(
        nn.Linear(32, 48), config=Float8LinearConfig(emulate=True)
    )
    emulated(torch.randn(16, 32)).sum().backward()


def test_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = convert_to_float8_training(nn.Linear(20, 33))
    torch.manual_seed(0)
    padded = convert_to_float8_training(
        nn.Linear(20, 33), config=Float8LinearConfig(pad_inner_dim=True)
    )
    x = torch.randn(7, 20, requires_grad=True)
    plain(x).sum().backward()
    expected, x.grad = x.grad, None
    monkeypatch.setenv(STRICT, "1")
    padded(x).sum().backward()
    assert sqnr(expected, x.grad) > 120
    assert sqnr(plain.weight.grad, padded.weight.grad) > 120
