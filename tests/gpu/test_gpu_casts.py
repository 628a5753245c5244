"""On a GPU: casts of any shape, compared with the CPU, and the kernels' two ways to round.

test_gpu_kernels.py also compares each kernel with the portable code, with special values.
"""

from itertools import product

import pytest
import torch
from reference import same_values
from rounding_kernels import decoded, encoded

from fp8_dist import CastConfig, ScalingGranularity, cast_to_float8
from fp8_dist.kernels.blocks import cast_blocks
from fp8_dist.kernels.scale import amax

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

DEVICE = "cuda"
TARGETS = [torch.float8_e4m3fn, torch.float8_e5m2]


def check(x: torch.Tensor, target: torch.dtype, dim: int | None, power_of_2: bool) -> None:
    """Compare a cast on the GPU with the CPU; ``x`` is on the CPU."""
    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    config = CastConfig(target_dtype=target, scaling_granularity=granularity)
    options = {"dim": dim, "round_scales_to_power_of_2": power_of_2}
    on_cpu = cast_to_float8(x, config, **options)
    strides = x.stride()
    on_gpu = cast_to_float8(torch.empty_like(x, device=DEVICE).copy_(x), config, **options)
    assert x.stride() == strides
    assert on_gpu.qdata.device.type == DEVICE
    assert same_values(on_gpu.scale, on_cpu.scale)
    assert same_values(on_gpu.qdata, on_cpu.qdata)


# Whole blocks, sizes that are not multiples of blocks, and parts that begin inside a block.
BLOCKS = [(1, 128, 0, 0), (1, 32, 0, 5), (128, 128, 0, 0), (32, 32, 7, 31)]


@pytest.mark.parametrize("shape", [(1, 1), (0, 16), (16, 0), (7, 1023), (1025, 2050), (2048, 4096)])
def test_casts_of_any_shape(shape: tuple[int, int]) -> None:
    wide = torch.randn(shape).bfloat16()
    for dim in (None, -1, 0):
        check(wide, TARGETS[0], dim, True)
        check(wide.t(), TARGETS[1], dim, False)
    for x, blocks in product((wide, wide.t()), BLOCKS):
        on_cpu = cast_blocks(x, TARGETS[0], blocks, "ceil", [False, True])
        strided = torch.empty_like(x, device=DEVICE).copy_(x)
        on_gpu = cast_blocks(strided, TARGETS[0], blocks, "ceil", [False, True])
        assert all(same_values(a, b) for a, b in zip(on_gpu, on_cpu, strict=True))


def assert_one_rounding(x: torch.Tensor, target: torch.dtype) -> None:
    """Check that integer arithmetic, GPU instructions and torch give the same codes, except NaN."""
    limit, nan = torch.finfo(target).max, x.isnan()
    codes = [encoded(x, target, soft=soft) for soft in (True, False)]
    codes.append(x.clamp(-limit, limit).to(target).view(torch.uint8))
    for found in codes:
        assert torch.equal(found.view(target).float().isnan(), nan)
    soft, hard, torchs = (found.masked_fill_(nan, 0) for found in codes)
    assert torch.equal(soft, torchs)
    assert torch.equal(hard, torchs)


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_are_rounded_and_codes_decoded_alike(target: torch.dtype) -> None:
    every_bf16 = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    for power in range(-20, 21, 4):
        assert_one_rounding(every_bf16.float() * 2.0**power, target)
    patterns = torch.arange(2**32 // 61, device=DEVICE) * 61 - 2**31  # every 61st fp32 number
    assert_one_rounding(patterns.to(torch.int32).view(torch.float32), target)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    for soft in (True, False):
        assert same_values(decoded(target, soft), codes.view(target).float())


def test_amaxes_of_streams_and_graphs() -> None:
    """Each launch must start from zeros of its own."""
    large, small = torch.full((300, 70), 8.0), torch.full((40, 30), 2.0)
    x, y = large.bfloat16().to(DEVICE), small.bfloat16().to(DEVICE)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    found = [(amax(x), 8.0), (amax(y), 2.0)]
    with torch.cuda.stream(side):
        found += [(amax(x), 8.0), (amax(y), 2.0)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = amax(y)
    for _ in range(3):
        found.append((amax(x), 8.0))
        graph.replay()
        found += [(captured.clone(), 2.0), (amax(y), 2.0)]
    assert [value.item() for value, _ in found] == [expected for _, expected in found]
