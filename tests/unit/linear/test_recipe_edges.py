"""Every recipe at its edges: shapes, zeros, non-finite values, tiny gradients, autograd."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from recipe_algebra import (
    GEMMS,
    RECIPES,
    config_of,
    exact,
    floor_of_mxfp8,
    layer_of,
    operands,
    products,
    step,
)
from reference import same_bits, sqnr
from torch.autograd import forward_ad

from fp8_dist import CastConfig, Float8Linear, cast_to_float8, update_float8_scales

all_recipes = pytest.mark.parametrize("recipe", RECIPES)


@all_recipes
def test_an_empty_batch(recipe: str) -> None:
    _, w, _ = operands()
    for rows in ((0,), (3, 0)):
        layer = layer_of(config_of(recipe), w, torch.randn(80))
        found = step(layer, torch.randn(*rows, 48), torch.randn(*rows, 80))
        assert found["output"].shape == (*rows, 80)
        assert found["grad_input"].shape == (*rows, 48)
        assert torch.equal(found["grad_weight"], torch.zeros(80, 48))
        assert torch.equal(found["grad_bias"], torch.zeros(80))
    none = step(layer_of(config_of(recipe), w[:0]), torch.randn(4, 48), torch.randn(4, 0))
    assert not none["grad_input"].any()


def edges() -> Iterator[tuple[torch.Tensor, ...]]:
    """Sizes of one; tensors and rows of zeros; one value at [2, 3] that is not finite."""
    for sizes in ((7, 1, 1), (7, 1, 5), (7, 5, 1), (1, 1, 1), (1, 3, 2)):
        yield operands(*sizes)
    for zero in ("x", "w", "g", "xwg"):
        yield tuple(t * (n not in zero) for n, t in zip("xwg", operands(), strict=True))
    x, w, g = operands(outliers=True)
    x[3], w[5], g[7], w[:, 9], g[:, 11] = 0, 0, 0, 0, 0
    w[6] *= 1e-6
    yield x, w, g
    yield x.bfloat16(), w.bfloat16(), g.bfloat16()
    for value, which in product((math.nan, math.inf, -math.inf), range(3)):
        tensors = operands(outliers=True)
        tensors[which][2, 3] = value
        yield tensors


@all_recipes
def test_edges_equal_the_algebra(recipe: str) -> None:
    config = config_of(recipe)
    for i, (x, w, g) in enumerate(edges()):
        found, expected = step(layer_of(config, w), x, g), products(config, x, w, g)
        for gemm in GEMMS:
            if config.gemm_enabled(gemm):
                assert torch.equal(found[gemm].isnan(), expected[gemm].isnan()), (i, gemm)
                assert not found[gemm].isinf().any(), (i, gemm)
            finite = expected[gemm].isfinite()
            assert torch.equal(found[gemm].isfinite(), finite), (i, gemm)
            best = sqnr(expected[gemm][finite], expected[gemm][finite].to(x.dtype))
            accuracy = sqnr(expected[gemm][finite], found[gemm][finite])
            assert accuracy > min(best - 0.5, 120), (i, gemm)
            assert not found[gemm][expected[gemm] == 0].any(), (i, gemm)


def test_folding_is_as_accurate_as_two_casts_of_tiny_gradients() -> None:
    for factor in (1, 1e-6, 1e-9, 1e-12, 1e-13):
        x, w, g = operands()
        expected = exact(x, w, g * factor)
        twice, once = (
            step(layer_of(config_of(r), w), x, g * factor) for r in ("rowwise", "rowwise_folded")
        )
        for gemm in GEMMS:
            accuracy = sqnr(expected[gemm], once[gemm])
            assert accuracy > max(27, sqnr(expected[gemm], twice[gemm]) - 0.1), (gemm, factor)


@all_recipes
def test_magnitudes_at_both_ends_of_fp32(recipe: str) -> None:
    for large, small in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)):
        x, w, g = operands()
        scaled = [x, w, g]
        scaled[large] = scaled[large] * 2.0**100
        scaled[small] = scaled[small] * 2.0**-20
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [t.to(dtype) for t in scaled]
            found = step(layer_of(config_of(recipe), tensors[1]), tensors[0], tensors[2])
            expected = exact(*tensors)
            for gemm in GEMMS:
                assert sqnr(expected[gemm], found[gemm]) > 20, (large, small, dtype, gemm)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_mxfp8_has_no_epsilon(rule: str) -> None:
    """Operands times powers of two scale the results exactly, even far below 1e-12."""
    config = config_of("mxfp8") if rule == "ceil" else floor_of_mxfp8()
    x, w, g = operands()
    expected = step(layer_of(config, w), x, g)
    found = step(layer_of(config, w), x * 2.0**-80, g * 2.0**60)
    assert same_bits(found["output"], expected["output"] * 2.0**-80)
    assert same_bits(found["grad_weight"], expected["grad_weight"] * 2.0**-20)
    found = step(layer_of(config, w), x * 2.0**60, g * 2.0**-80)
    assert same_bits(found["grad_input"], expected["grad_input"] * 2.0**-80)
    assert same_bits(found["grad_weight"], expected["grad_weight"] * 2.0**-20)


@all_recipes
def test_only_the_gradients_that_are_needed(recipe: str) -> None:
    x, w, g = operands(outliers=True)
    layer = layer_of(config_of(recipe), w, torch.zeros(80))
    expected = step(layer, x, g)
    for frozen in (("weight",), ("bias",), ("weight", "bias")):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        found = step(layer, x, g)
        for name in expected:
            none = name.removeprefix("grad_") in frozen
            assert found[name] is None if none else same_bits(expected[name], found[name]), name
    layer.requires_grad_(True).zero_grad()
    layer(x).backward(g)  # an input that needs no gradient
    assert same_bits(layer.weight.grad, expected["grad_weight"])
    with torch.no_grad():
        assert same_bits(layer(x), expected["output"])
    with torch.inference_mode():
        assert same_bits(layer(x).clone(), expected["output"])


@all_recipes
def test_one_layer_used_twice_and_a_retained_graph(recipe: str) -> None:
    _, w, _ = operands(k=48, n=48, outliers=True)
    layer, alone = (layer_of(config_of(recipe), w) for _ in range(2))
    first, second = (operands(16, 48, 48, outliers=True) for _ in range(2))
    inputs = [x.clone().requires_grad_() for x, _, _ in (first, second)]
    outputs = [layer(x) for x in inputs]
    for _ in range(2):  # the second time from the graph that was retained
        layer.weight.grad = inputs[0].grad = inputs[1].grad = None
        torch.autograd.backward(outputs, [first[2], second[2]], retain_graph=True)
    separate = [step(alone, x, g) for x, _, g in (first, second)]
    for x, output, expected in zip(inputs, outputs, separate, strict=True):
        assert same_bits(output, expected["output"])
        assert same_bits(x.grad, expected["grad_input"])
    summed = separate[0]["grad_weight"] + separate[1]["grad_weight"]
    assert same_bits(layer.weight.grad, summed)
    layer(layer(inputs[0])).sum().backward()
    assert layer.weight.grad.isfinite().all()


@all_recipes
def test_no_second_derivative(recipe: str) -> None:
    layer = Float8Linear(16, 16, config=config_of(recipe))
    x = torch.randn(4, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"Float8Linear: .* differentiated twice"):
        (gradient.norm() - 1).square().backward()
    # Nor by the gradient of the output.
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.functional.jvp(layer, x, x)  # it differentiates the backward
    # Neither the weight nor x counts as unused.
    for other in (layer.weight, x):
        (gradient,) = torch.autograd.grad(layer(x * 2).square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            torch.autograd.grad(gradient.sum(), other, allow_unused=True)
    # A gradient that was asked for with create_graph is as good as another.
    output, grad = layer(x), torch.randn(4, 16, requires_grad=True)
    (first,) = torch.autograd.grad(output, x, grad, retain_graph=True)
    (second,) = torch.autograd.grad(output, x, grad, create_graph=True)
    assert same_bits(first, second.detach())


@all_recipes
def test_shapes_on_the_meta_device(recipe: str) -> None:
    config = config_of(recipe)
    layer = Float8Linear(48, 32, device="meta", dtype=torch.bfloat16, config=config)
    x = torch.empty(2, 8, 48, device="meta", dtype=torch.bfloat16, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    for found, like in ((output, (2, 8, 32)), (x.grad, x.shape), (layer.weight.grad, (32, 48))):
        assert found.device.type == "meta"
        assert (found.shape, found.dtype) == (like, torch.bfloat16)
    assert cast_to_float8(x, CastConfig()).qdata.shape == x.shape
    # The step on the meta device leaves no trace when the layer gets its values.
    layers = [layer, Float8Linear(48, 32, device="meta", dtype=torch.bfloat16, config=config)]
    x, outputs = torch.randn(4, 48, dtype=torch.bfloat16), []
    for each in layers:
        torch.manual_seed(0)
        each.to_empty(device="cpu").reset_parameters()
        for _ in range(2):
            outputs.append(each(x))
            outputs[-1].sum().backward()
            update_float8_scales(each)
    assert same_bits(outputs[1], outputs[3])


def test_other_kinds_of_derivatives_are_refused_by_name() -> None:
    layer, x = Float8Linear(16, 16), torch.randn(2, 16)
    transforms: list[Callable[[], object]] = [
        lambda: torch.func.grad(lambda t: layer(t).sum())(x),
        lambda: torch.func.vmap(layer)(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
    ]
    for call in transforms:
        with pytest.raises(NotImplementedError, match=r"Float8Linear: .* transforms of torch.func"):
            call()
    with forward_ad.dual_level():
        duals = {"input": forward_ad.make_dual(x, torch.randn(2, 16))}
        for name, p in layer.named_parameters():
            duals[name] = forward_ad.make_dual(p.detach(), torch.randn_like(p))
        calls: list[Callable[[], object]] = [
            lambda: layer(duals["input"]),
            lambda: torch.func.functional_call(layer, {"weight": duals["weight"]}, x),
            lambda: torch.func.functional_call(layer, {"bias": duals["bias"]}, x),
            torch.no_grad()(lambda: layer(duals["input"])),
            lambda: cast_to_float8(duals["input"], CastConfig()),
        ]
        for call in calls:
            with pytest.raises(NotImplementedError, match="float8 has no forward-mode derivatives"):
                call()
        layer(x)  # what has no tangent can be computed


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_folded"])
def test_nan_stays_in_its_row(recipe: str) -> None:
    """torch's own bf16 GEMM lets it reach the row before."""
    for size in (31, 34, 48, 80):
        x, w, g = (t.bfloat16() for t in operands(64, size, size))
        x[5, 3], g[9, 3] = torch.nan, torch.inf
        found = step(layer_of(config_of(recipe), w), x, g)
        for name, row in (("output", 5), ("grad_input", 9)):
            assert found[name].isnan().any(1).nonzero().flatten().tolist() == [row]
