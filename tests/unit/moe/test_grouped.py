"""Grouped linear layers: their products beside fp64, rows of no expert, NaN, errors."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from expecttest import assert_expected_inline
from moe_layers import GEMMS, RECIPES, Products, expected
from reference import raised, same_bits, sqnr
from torch import Tensor

from fp8_dist.kernels import grouped
from fp8_dist.moe import Float8ExpertsConfig, grouped_linear
from fp8_dist.moe.functions import cast_weight

COUNTS = [125, 3, 0, 256, 128]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def data(
    counts: Sequence[int], rows: int | None = None, dtype: torch.dtype = FP32, k: int = 160
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, the gradient of the output, and offs."""
    rows = sum(counts) if rows is None else rows
    x, w, g = torch.randn(rows, k), torch.randn(len(counts), 96, k), torch.randn(rows, 96)
    return x.to(dtype), w.to(dtype), g.to(dtype), torch.tensor([*accumulate(counts)])


def products(x: Tensor, w: Tensor, g: Tensor, offs: Tensor, recipe: str) -> Products:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    output = grouped_linear(x, w, offs, Float8ExpertsConfig.from_recipe_name(recipe))
    assert isinstance(output, Tensor)
    return output.detach(), *torch.autograd.grad(output, (x, w), g)


@pytest.mark.parametrize("k", [160, 37])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values(recipe: str, k: int) -> None:
    x, w, g, offs = data(COUNTS, rows=530, k=k)
    # Scales differ between rows, columns and blocks.
    x, g = x * torch.rand(530, 1).exp2(), g * torch.logspace(-2, 2, 96)
    w = w * torch.logspace(-2, 2, 96).view(-1, 1) * torch.logspace(-1, 1, 5).view(-1, 1, 1)
    found = products(x, w, g, offs, recipe)
    for gemm, a, b in zip(GEMMS, expected(recipe, x, w, g, COUNTS), found, strict=True):
        # If one value were rounded to the neighboring code, this would be 110 dB or less.
        assert sqnr(a, b) > 140, gemm


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_in_bf16(recipe: str, is_transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices without a grouped GEMM in float8 round as often as those with one."""
    x, w, g, offs = data(COUNTS, dtype=BF16)
    if is_transposed:
        w = w.mT.contiguous().mT
    alone = products(x, w, g, offs, recipe)
    monkeypatch.setattr(grouped, "grouped_gemm", lambda *_: "bf16")
    together = products(x, w, g, offs, recipe)
    exact = expected(recipe, x.float(), w.float(), g.float(), COUNTS)
    for gemm, a, b, c in zip(GEMMS, exact, alone, together, strict=True):
        assert b.stride() == c.stride()
        assert sqnr(a, c) > min(55, sqnr(a, b) - 0.1), gemm


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("counts", "rows"), [([0, 0, 0], 0), ([0, 0, 0], 5), ([3, 0, 2], 9)])
def test_rows_of_no_expert(recipe: str, counts: list[int], rows: int) -> None:
    x, w, g, offs = data(counts, rows)
    x[sum(counts) :] = g[sum(counts) :] = torch.nan  # no expert reads these rows
    output, grad_input, grad_weight = products(x, w, g, offs.int(), recipe)
    assert (output.shape, grad_input.shape, grad_weight.shape) == (g.shape, x.shape, w.shape)
    assert not output[sum(counts) :].any()
    assert not grad_input[sum(counts) :].any()
    assert [bool(each.any()) for each in grad_weight] == [count > 0 for count in counts]
    assert not any(each.isnan().any() for each in (output, grad_input, grad_weight))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_nan_stays_with_its_token_and_expert(recipe: str) -> None:
    x, w, g, offs = data([40, 7, 33])
    x[45, 3] = g[45, 2] = torch.nan
    found = products(x, w, g, offs, recipe)
    token, expert = torch.arange(80) == 45, torch.arange(3) == 1
    for gemm, tensor, wrong in zip(GEMMS, found, (token, token, expert), strict=True):
        assert torch.equal(tensor.isnan().flatten(1).any(1), wrong), gemm


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_bias(dtype: torch.dtype) -> None:
    x, w, g, offs = data([500, 0, 9], 511, dtype)
    bias = torch.randn(3, 96).to(dtype).requires_grad_()
    output = grouped_linear(x, w, offs, bias=bias)
    assert isinstance(output, Tensor)
    added = torch.cat([bias[0].expand(500, -1), bias[2].expand(9, -1), torch.zeros(2, 96)]).to(
        dtype
    )
    assert same_bits(output.detach(), (products(x, w, g, offs, RECIPES[0])[0] + added).detach())
    output.backward(g)
    sums = [part.double().sum(0) for part in g[:509].split([500, 0, 9])]
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.stack(sums).to(dtype))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_share_an_input(recipe: str) -> None:
    x, w, g, offs = data([5, 0, 9])
    x.requires_grad_()
    weights = [w.requires_grad_(), torch.randn(3, 32, 160, requires_grad=True)]
    grads = [g, torch.randn(14, 32)]
    config = Float8ExpertsConfig.from_recipe_name(recipe)
    together = grouped_linear(x, weights, offs, config)
    x_grad, *weight_grads = torch.autograd.grad(together, (x, *weights), grads)
    alone = [products(x, *each, offs, recipe) for each in zip(weights, grads, strict=True)]
    assert all(same_bits(a.detach(), b[0]) for a, b in zip(together, alone, strict=True))
    assert all(same_bits(a, b[2]) for a, b in zip(weight_grads, alone, strict=True))
    assert same_bits(x_grad, alone[0][1] + alone[1][1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_needed_does_not_change_what_is_computed(recipe: str) -> None:
    x, w, g, offs = data([13, 0, 40], dtype=FP16)
    config = Float8ExpertsConfig.from_recipe_name(recipe)
    output, grad_input, grad_weight = products(x, w, g, offs, recipe)
    x.requires_grad_()
    w.requires_grad_()
    (x_grad,) = torch.autograd.grad(grouped_linear(x, w.detach(), offs, config), x, g)
    again = grouped_linear(x.detach(), w, offs, config)
    w_grads = [torch.autograd.grad(again, w, g, retain_graph=keep)[0] for keep in (True, False)]
    assert same_bits(x_grad, grad_input)
    assert all(same_bits(each, grad_weight) for each in w_grads)
    # Strides do not matter.
    by_column = [x.t().contiguous().t(), w.mT.contiguous().mT, g.t().contiguous().t(), offs]
    for a, b in zip(products(*by_column, recipe), (output, grad_input, grad_weight), strict=True):
        assert same_bits(a, b)
    with torch.inference_mode():
        assert same_bits(grouped_linear(x, w, offs, config).clone(), output)


def test_types() -> None:
    x, w, _, offs = data([5, 9])
    texts = [
        raised(TypeError, lambda: grouped_linear(x, w, [5, 14])),  # type: ignore[arg-type]
        raised(TypeError, lambda: grouped_linear(x, w, offs, "mxfp8")),  # type: ignore[arg-type]
    ]
    assert texts == [
        "grouped_linear: offs must be a tensor, got [5, 14]",
        "grouped_linear: config must be a Float8ExpertsConfig, got 'mxfp8'; "
        "Float8ExpertsConfig.from_recipe_name(name) makes one from a recipe's name",
    ]


def test_gradients_cannot_be_differentiated() -> None:
    x, w, _, offs = data([5, 9])
    x.requires_grad_()
    (grad,) = torch.autograd.grad(grouped_linear(x, w, offs).square().sum(), x, create_graph=True)
    assert "differentiate twice" in raised(RuntimeError, grad.sum().backward)


def test_autocast() -> None:
    x, w, _, offs = data([5, 9])
    expected = grouped_linear(x.bfloat16(), w, offs)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(grouped_linear(x, w, offs), expected)


def test_what_is_refused() -> None:
    x, w, _, offs = data([5, 9])
    bias = torch.zeros(2, 96)
    calls = [
        lambda: grouped_linear(x, w[0], offs),
        lambda: grouped_linear(x[None], w, offs),
        lambda: grouped_linear(x, w.mT, offs),
        lambda: grouped_linear(x, [w, w], offs, bias=bias),
        lambda: grouped_linear(x, w, offs, bias=bias[0]),
        lambda: grouped_linear(x, [w, w[:1]], offs),
        lambda: grouped_linear(x, [], offs),
        lambda: grouped_linear(x.int(), w, offs),
        lambda: grouped_linear(x, w, offs[1:]),
        lambda: grouped_linear(x, w, offs.float()),
        lambda: grouped_linear(x, w, offs.flip(0)),
        lambda: grouped_linear(x, w, offs + 1),
        lambda: grouped_linear(x, w, offs - 6),
        lambda: Float8ExpertsConfig.from_recipe_name("rowwise"),
        lambda: Float8ExpertsConfig(combine="fp8"),  # type: ignore[arg-type]
        lambda: Float8ExpertsConfig(enable_fsdp_float8_all_gather="yes"),  # type: ignore[arg-type]
        lambda: Float8ExpertsConfig("tensorwise", weight_block_size=(1, 32)),
        lambda: Float8ExpertsConfig("rowwise_folded", weight_format="mxfp4"),
        lambda: Float8ExpertsConfig(None, weight_format="mxfp4", weight_block_size=(1, 32)),
        lambda: Float8ExpertsConfig(None, "float8"),
        lambda: Float8ExpertsConfig(None, enable_fsdp_float8_all_gather=True),
    ]
    assert_expected_inline(
        "\n".join(raised(ValueError, call) for call in calls),
        """\
grouped_linear: rows of shape [R, K] need weights of shape [E, N, K], got (14, 160) and (96, 160)
grouped_linear: rows of shape [R, K] need weights of shape [E, N, K], got (1, 14, 160) and (2, 96, 160)
grouped_linear: rows of shape [R, K] need weights of shape [E, N, K], got (14, 160) and (2, 160, 96)
grouped_linear: bias is for a single weight; add the biases afterwards
grouped_linear: the bias of a weight (2, 96, 160) must be of shape (2, 96), got (96,)
grouped_linear: the weights have 2 and 1 experts
grouped_linear: floating-point rows and at least one weight are needed, got rows of torch.float32 and 0 weights
grouped_linear: floating-point rows and at least one weight are needed, got rows of torch.int32 and 1 weights
grouped_linear: offs must be int32 or int64 [2], one for each expert; got torch.int64 (1,)
grouped_linear: offs must be int32 or int64 [2], one for each expert; got torch.float32 (2,)
grouped_linear: offs must grow from 0 to at most 14, the number of rows; got groups of [14, -9] rows
grouped_linear: offs must grow from 0 to at most 14, the number of rows; got groups of [6, 9] rows
grouped_linear: offs must grow from 0 to at most 14, the number of rows; got groups of [-1, 9] rows
Float8ExpertsConfig.recipe must be None or 'rowwise_folded' or 'tensorwise' or 'blockwise' or 'mxfp8', got 'rowwise'; did you mean 'rowwise_folded'?
Float8ExpertsConfig.combine must be 'high_precision' or 'float8', got 'fp8'
Float8ExpertsConfig.enable_fsdp_float8_all_gather must be bool or 'auto', got 'yes'
Float8ExpertsConfig: recipe='tensorwise' does not take weight_block_size=(1, 32); drop it, or use the recipe 'blockwise' or 'mxfp8'
Float8ExpertsConfig: recipe='rowwise_folded' does not take weight_format='mxfp4'; drop it, or use the recipe 'blockwise' or 'mxfp8'
Float8ExpertsConfig: recipe=None does not take weight_format='mxfp4', weight_block_size=(1, 32); drop it, or use the recipe 'blockwise' or 'mxfp8'
Float8ExpertsConfig: recipe=None does not take combine='float8'; drop it, or use the recipe 'blockwise' or 'mxfp8'
Float8ExpertsConfig: recipe=None does not take enable_fsdp_float8_all_gather=True; drop it, or use the recipe 'blockwise' or 'mxfp8'""",
    )


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_transposed_weights(recipe: str, dtype: torch.dtype) -> None:
    x, w, g, offs = data([40, 0, 33], 75, dtype)
    w = w * torch.logspace(-2, 2, 96).view(-1, 1).to(dtype)
    stored = w.mT.contiguous()
    x.requires_grad_()
    expected = products(x, w, g, offs, recipe)
    stored.requires_grad_()
    config = Float8ExpertsConfig.from_recipe_name(recipe)
    casts = cast_weight(stored.mT, config).output
    assert casts is not None
    assert casts.qdata.mT.is_contiguous()  # in the order of memory, without a copy
    output = grouped_linear(x, stored.mT, offs, config)
    assert isinstance(output, Tensor)
    output.backward(g)
    found = output.detach(), x.grad, stored.grad
    for gemm, a, b in zip(GEMMS, expected, found, strict=True):
        assert b is not None
        b = b.mT if gemm == "grad_weight" else b
        if dtype is FP32:
            assert same_bits(a, b.contiguous()), gemm
        else:  # sums in another order
            assert sqnr(a.double(), b.double()) > 50, gemm
    assert stored.grad is not None
    assert stored.grad.is_contiguous()
