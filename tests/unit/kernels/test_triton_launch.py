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
        found = [launch.float8_constants(dtype, cuda) for dtype in launch.BIAS]
        assert [each["SOFT"] for each in found].count(False) == formats
        # Integer arithmetic takes more registers, which more warps have.
        assert [each.get("num_warps") == 8 for each in found] == [each["SOFT"] for each in found]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(launch, "_IS_AMD", True)
    launch.float8_constants.cache_clear()
    found = [launch.float8_constants(dtype, cuda) for dtype in launch.BIAS]
    assert all(each["SOFT"] and "num_warps" not in each for each in found)
