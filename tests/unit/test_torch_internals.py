"""What happens if a release of torch has renamed private names."""

import runpy
from typing import Any

import pytest
import torch
import torch.nn as nn
from reference import raised
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8_dist import fsdp_internals, torch_internals


def import_again() -> None:
    for module in (torch_internals, fsdp_internals):
        runpy.run_path(module.__file__)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after each test what an import replaces in torch."""
    if "_stable_hash_for_caching" in vars(DTensor):
        monkeypatch.setattr(
            DTensor, "_stable_hash_for_caching", vars(DTensor)["_stable_hash_for_caching"]
        )


@pytest.mark.parametrize(
    ("owner", "name", "shown"),
    [
        (torch, "_scaled_mm", "module 'torch' has no attribute '_scaled_mm'"),
        (DeviceMesh, "_concatenate", "type object 'DeviceMesh' has no attribute '_concatenate'"),
        (nn.Module, "_save_to_state_dict", "it has no Module._save_to_state_dict"),
        (FSDPModule, "_get_fsdp_state", "it has no FSDPModule._get_fsdp_state"),
    ],
)
def test_a_name_that_every_use_needs(
    owner: Any, name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    message = raised(ImportError, import_again)
    release = f"fp8_dist needs torch >= 2.11, and does not know torch {torch.__version__}"
    assert message == f"{release}: {shown}. Install another release of torch"
