"""What a release of torch that has renamed private names leads to."""

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from reference import raised
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist import torch_internals


def imported_again() -> ModuleType:
    spec = importlib.util.spec_from_file_location("imported_again", torch_internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an import replaces in torch is as it was after a test."""
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
    ],
)
def test_a_name_that_every_use_needs(
    owner: Any, name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    message = raised(ImportError, imported_again)
    release = f"fp8_dist needs torch >= 2.11, and does not know torch {torch.__version__}"
    assert message == f"{release}: {shown}. Install another release of torch"


INFO = SimpleNamespace(module=None, param_name="", shared_modules=[], shared_param_names=[])


class Param:
    """FSDP2's parameter, with attributes that it declares and sets later."""

    _extensions_data: Any
    _unsharded_param: Any
    sharded_param = unsharded_accumulated_grad = unsharded_param = mp_policy = None
    all_gather_outputs = _unsharded_inner_tensors = reset_sharded_param = None
    shard_mesh_from_root = None

    def __init__(self, **attributes: Any) -> None:
        self._module_info = INFO
        vars(self).update(attributes)


def test_parameters_of_a_reduction_are_in_the_order_of_its_buffer() -> None:
    parameters = [
        Param(_unsharded_param=None, unsharded_param=SimpleNamespace(grad=grad, requires_grad=True))
        for grad in (1, None, 1, None)
    ]
    group = SimpleNamespace(fsdp_params=[*parameters, Param()], reduce_grads=True)
    group.post_backward, group._reduce_scatter_comm = lambda: None, None
    noted: list[list[int]] = []
    torch_internals.set_fsdp_reduction(group, None, noted.append)
    group.post_backward()
    group._reduce_scatter_param_indices = [4, 3, 2, 1, 0]  # from here on as in torch 2.15
    group._partial_reduce_output_layout = {parameters[1]: (0, 1)}
    group._partial_reduce_output = None
    group.post_backward()
    group._partial_reduce_output = torch.ones(1)
    group.post_backward()
    group.reduce_scatter_unused_params = True
    group.post_backward()
    assert noted == [[0, 2], [2, 0], [2, 1, 0], [3, 2, 1, 0]]
