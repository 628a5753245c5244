"""What only a GPU can show; skipped elsewhere."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from reference import same_bits, sqnr
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.tensor import scaled_mm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_equal_those_of_the_cpu(target: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn(64, 96, dtype=dtype)
    cpu = cast_to_float8(x, CastConfig(target_dtype=target))
    gpu = cast_to_float8(x.cuda(), CastConfig(target_dtype=target))
    assert same_bits(gpu.qdata.cpu(), cpu.qdata)
    assert same_bits(gpu.scale.cpu(), cpu.scale)


@pytest.mark.parametrize("shape", [(64, 128, 96), (7, 20, 33)])
def test_the_native_gemm_equals_the_emulation(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a = cast_to_float8(torch.randn(m, k, device="cuda"), CastConfig())
    b = cast_to_float8(torch.randn(n, k, device="cuda"), CastConfig()).t()
    native = scaled_mm(a, b, out_dtype=torch.bfloat16, pad_inner_dim=True)
    emulated = scaled_mm(a, b, out_dtype=torch.bfloat16, emulate=True)
    assert sqnr(emulated, native) > 45


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_multiply_the_same_operands(backend: str) -> None:
    eager = convert_to_float8_training(nn.Linear(128, 128, bias=False).cuda().bfloat16())
    compiled = torch.compile(copy.deepcopy(eager), backend=backend, fullgraph=True)
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    assert sqnr(eager(x), compiled(x)) > 45


def test_a_gather_over_nccl() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        twin = convert_to_float8_training(copy.deepcopy(net))
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(net, config=config)
        fully_shard(net, mesh=init_device_mesh("cuda", (1,)))
        precompute_float8_dynamic_scale(net)
        x = torch.randn(16, 64, device="cuda")
        assert sqnr(twin(x), net(x)) > 100
    finally:
        dist.destroy_process_group()
