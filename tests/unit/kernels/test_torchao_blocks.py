"""Casts with scales of blocks beside torchao's. docs/numerics.md explains each difference."""

from itertools import product

import pytest
import torch
from reference import same_bits
from torchao.prototype.blockwise_fp8_training.kernels import (
    torch_blockwise_scale_act_quant_lhs,
    torch_blockwise_scale_act_quant_rhs,
    torch_blockwise_scale_weight_quant,
)
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from fp8_dist import Float8LinearConfig
from fp8_dist.kernels.blocks import powers_of_2
from fp8_dist.kernels.e2m1 import E2M1_X2
from fp8_dist.operand.prepare import cast_once
from fp8_dist.scaling import Blocks, Mxfp4, Scheme

E4M3 = torch.float8_e4m3fn
BY_FORMULA, CEIL, FLOOR = (Blocks(E4M3, 1, 32, rule) for rule in (None, "ceil", "floor"))
MX = Float8LinearConfig.from_recipe_name("mxfp8").recipe.uses["input"]["output"]
EPS = 1e-12

Cast = tuple[torch.Tensor, torch.Tensor]  # qdata, the bytes of the scales


def ours(x: torch.Tensor, scheme: Scheme | None) -> Cast:
    assert scheme is not None
    made = cast_once(x, scheme)
    return made.qdata, made.scales[0]


def theirs(x: torch.Tensor, mode: str) -> Cast:
    scale, qdata = to_mx(x, E4M3, 32, ScaleCalculationMode[mode])
    return qdata, scale.view(torch.uint8)


def differing(first: Cast, second: Cast) -> torch.Tensor:
    """The rows in which two casts with one block per row differ, in scale or data."""
    data = first[0].view(torch.uint8) != second[0].view(torch.uint8)
    return data.any(-1) | (first[1] != second[1]).any(-1)


def values(cast: Cast) -> torch.Tensor:
    return cast[0].to(torch.float32) * powers_of_2(cast[1])


def blocks_with_amaxes(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A block of 32 per row, with the given largest values, and smaller ones of both signs."""
    others = torch.rand(len(amax), 31) * 2 - 1
    x = torch.cat([torch.ones(len(amax), 1), others], 1) * amax[:, None].to(torch.float32)
    x[~amax.isfinite(), 1:] = others[~amax.isfinite()]
    return x.to(dtype)


def every_bfloat16() -> torch.Tensor:
    """Every value without a sign: zero, subnormal, normal, inf, NaN."""
    return torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8_is_to_mx_by_rceil(dtype: torch.dtype) -> None:
    """All bits of every finite block: zeros, subnormal values, the largest ones."""
    amax = every_bfloat16()
    x = blocks_with_amaxes(amax, dtype)
    mine, its = ours(x, MX), theirs(x, "RCEIL")
    finite, infinite, nan = amax.isfinite(), amax.isinf(), amax.isnan()
    assert not differing(mine, its)[finite].any()
    assert finite.sum() > 32_000
    # inf: ours is a block of NaN; theirs has the scale 2 ** 127, and inf alone is infinite.
    assert (mine[1][infinite].item(), its[1][infinite].item()) == (255, 254)
    assert values(mine)[infinite].isnan().all()
    # NaN: the same scale, by which all is NaN.
    assert same_bits(mine[1][nan], its[1][nan])
    assert values(mine)[nan].isnan().all()
    assert values(its)[nan].isnan().all()
    # The formula of blockwise: the same, but its epsilon keeps our scales at 2 ** -48 or more.
    formula, small = ours(x, BY_FORMULA), amax < EPS
    assert not differing(formula, its)[finite & ~small].any()
    assert formula[1][small].eq(127 - 48).all()
    assert its[1][small].lt(127 - 48).any()
    assert not values(formula)[amax == 0].any()
    assert formula[1][~finite].eq(255).all()
    # Around each power of two, where a logarithm of fp32 may round to the power.
    powers = (448 * torch.arange(-109.0, 120).exp2()).view(torch.int32)
    for step, (cast, mode) in product(range(-50, 51, 5), ((CEIL, "RCEIL"), (FLOOR, "FLOOR"))):
        near = blocks_with_amaxes((powers + step).view(torch.float32), dtype)
        assert all(map(same_bits, ours(near, cast), theirs(near, mode)))
    # Floor: all bits of normal scales, zeros below; there theirs divides by the smallest normal.
    floor, by_floor, tiny = ours(x, FLOOR), theirs(x, "FLOOR"), (amax > 0) & (amax < 2.0**-118)
    assert not differing(floor, by_floor)[finite & ~tiny].any()
    assert same_bits(floor[1][tiny | nan], by_floor[1][tiny | nan])
    assert not values(floor)[tiny].any()
    assert floor[1][~finite].eq(255).all()


@pytest.mark.parametrize("blocks", [(1, 128), (128, 1), (128, 128)])
def test_blockwise_scales_are_torchaos_rounded_up_to_powers_of_two(blocks: tuple[int, int]) -> None:
    cast = {
        (1, 128): lambda x: torch_blockwise_scale_act_quant_lhs(x),
        (128, 1): lambda x: torch_blockwise_scale_act_quant_rhs(x),
        (128, 128): lambda x: torch_blockwise_scale_weight_quant(x),
    }[blocks]
    x = torch.randn(256, 384) * torch.logspace(-6, 6, 384)
    x[:128, :128] = 0
    scheme = Blocks(E4M3, *blocks)
    (qdata, scale), (its_qdata, its_scale) = ours(x, scheme), cast(x)
    ratio = powers_of_2(scale) / its_scale
    assert scale.shape == its_scale.shape
    assert ratio.min() >= 1
    assert ratio.max() < 2
    assert not same_bits(qdata, its_qdata.contiguous())
    # Where torchao's scale is a power of two, there is nothing to round: all bits are the same.
    rows, columns = blocks
    wide = its_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    x = (x / wide).clamp(-448, 448) * 2.0**-3
    x[::rows, ::columns] = 448 * 2.0**-3
    (qdata, scale), (its_qdata, its_scale) = ours(x, scheme), cast(x)
    assert same_bits(powers_of_2(scale), its_scale.contiguous())
    assert same_bits(qdata, its_qdata.contiguous())


@pytest.mark.parametrize(
    ("rule", "mode"), [("floor", "FLOOR"), ("even", "EVEN"), ("ceil", "RCEIL")]
)
def test_values_of_four_bits(rule: str, mode: str) -> None:
    """torchao's ceil takes an amax a few steps of fp32 above 6 times a power of two for that one."""
    scheme = Mxfp4(rows=1, columns=32, rule=rule)
    torch.manual_seed(0)
    x = torch.randn(256, 128) * torch.exp(torch.randn(256, 1) * 5)
    for given in (x, x.bfloat16(), blocks_with_amaxes(torch.arange(64, 128) / 64, torch.float32)):
        scale, packed = to_mx(given, E2M1_X2, 32, ScaleCalculationMode[mode])
        made = cast_once(given, scheme)
        assert same_bits(made.scales[0], scale.view(torch.uint8))
        assert same_bits(scheme.pack(made.qdata).view(torch.uint8), packed.view(torch.uint8))
