"""Which conversion instructions Triton kernels use."""

import pytest
import torch

from fp8_dist.kernels.cuda.triton import launch


def test_the_instruction_is_used_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda = torch.device("cuda", 0)
    for capability, formats in (((8, 0), 0), ((8, 9), 0), ((9, 0), 3), ((10, 0), 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        launch.float8_constants.cache_clear()
        soft = [launch.float8_constants(dtype, cuda)["SOFT"] for dtype in launch.BIAS]
        assert soft.count(False) == formats
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launch.float8_constants.cache_clear()
    assert all(launch.float8_constants(dtype, cuda)["SOFT"] for dtype in launch.BIAS)
