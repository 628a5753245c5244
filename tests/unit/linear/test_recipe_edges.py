"""Every recipe at its edges: shapes, zeros, non-finite values, tiny gradients, autograd."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.nn as nn
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
def test_inputs_of_one_to_four_dims(recipe: str) -> None:
    for i, rows in enumerate([(), (1,), (24,), (4, 6), (2, 3, 4), (1, 1, 1)]):
        x, w, g = operands(math.prod(rows), 48, 80, outliers=True)
        bias = torch.randn(80) if i % 2 else None
        found = step(layer_of(config_of(recipe), w, bias), x.view(*rows, 48), g.view(*rows, 80))
        assert found["output"].shape == (*rows, 80)
        assert found["grad_input"].shape == (*rows, 48)
        expected = products(recipe, x, w, g)
        if bias is not None:
            expected["output"] = expected["output"] + bias.double()
            assert sqnr(g.sum(0), found["grad_bias"]) > 120
        for gemm in GEMMS:
            assert sqnr(expected[gemm].flatten(), found[gemm].flatten()) > 120, (rows, gemm)


@all_recipes
def test_an_empty_batch(recipe: str) -> None:
    _, w, _ = operands()
    for rows in ((0,), (3, 0), (0, 2)):
        layer = layer_of(config_of(recipe), w, torch.randn(80))
        found = step(layer, torch.randn(*rows, 48), torch.randn(*rows, 80))
        assert found["output"].shape == (*rows, 80)
        assert found["grad_input"].shape == (*rows, 48)
        assert torch.equal(found["grad_weight"], torch.zeros(80, 48))
        assert torch.equal(found["grad_bias"], torch.zeros(80))


@all_recipes
def test_strides_change_nothing(recipe: str) -> None:
    x, w, g = operands(24, outliers=True)
    x, g = x.view(4, 6, 48), g.view(4, 6, 80)
    expected = step(layer_of(config_of(recipe), w), x, g)
    wide = torch.randn(4, 6, 96)
    wide[..., ::2] = x
    for view in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.mT.contiguous().mT,
        wide[..., ::2],
    ):
        assert not view.is_contiguous()
        found = step(
            layer_of(config_of(recipe), w.t().contiguous().t()), view, g.mT.contiguous().mT
        )
        assert all(same_bits(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_recipes
def test_rows_of_zeros(recipe: str, dtype: torch.dtype) -> None:
    x, w, g = operands(outliers=True)
    x[3], w[5], g[7] = 0, 0, 0
    w[:, 9], g[:, 11] = 0, 0
    w[6] *= 1e-6
    x, w, g = (t.to(dtype) for t in (x, w, g))
    found, expected = step(layer_of(config_of(recipe), w), x, g), exact(x, w, g)
    for gemm in GEMMS:
        zero = expected[gemm] == 0
        assert torch.equal(found[gemm][zero], torch.zeros(int(zero.sum()), dtype=dtype)), gemm
        assert found[gemm].isfinite().all()
        assert sqnr(expected[gemm], found[gemm]) > 20
    # Rows of the weight that are zero or small learn like the others.
    rows = zip(expected["grad_weight"], found["grad_weight"], strict=True)
    accuracy = [sqnr(*pair) for pair in rows]
    assert min(accuracy[5], accuracy[6]) > min(accuracy[12:]) - 3


def edges() -> Iterator[tuple[torch.Tensor, ...]]:
    """Sizes of one; tensors of zeros; one value at [2, 3] that is not finite."""
    for sizes in ((7, 1, 1), (7, 1, 5), (7, 5, 1), (1, 1, 1), (1, 3, 2)):
        yield operands(*sizes)
    for zero in ("x", "w", "g", "xwg"):
        yield tuple(t * (n not in zero) for n, t in zip("xwg", operands(), strict=True))
    for value, which in product((math.nan, math.inf, -math.inf), range(3)):
        tensors = operands(outliers=True)
        tensors[which][2, 3] = value
        yield tensors


@all_recipes
def test_edges_equal_the_algebra(recipe: str) -> None:
    for i, (x, w, g) in enumerate(edges()):
        found, expected = step(layer_of(config_of(recipe), w), x, g), products(recipe, x, w, g)
        for gemm in GEMMS:
            if (recipe, gemm) != ("rowwise_with_gw_hp", "grad_weight"):
                assert torch.equal(found[gemm].isnan(), expected[gemm].isnan()), (i, gemm)
                assert not found[gemm].isinf().any(), (i, gemm)
            finite = expected[gemm].isfinite()
            assert torch.equal(found[gemm].isfinite(), finite), (i, gemm)
            assert sqnr(expected[gemm][finite], found[gemm][finite]) > 120, (i, gemm)


@pytest.mark.parametrize(
    ("factor", "outliers"),
    [(1, True), (1e-6, False), (1e-9, False), (1e-12, False), (1e-13, False)],
)
def test_folding_is_as_accurate_as_two_casts(factor: float, outliers: bool) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        x, w, g = operands(outliers=outliers)
        g = g * factor
        expected = exact(x, w, g)
        twice, once = (step(layer_of(config_of(r), w), x, g) for r in ("rowwise", "rowwise_folded"))
        for gemm in GEMMS:
            accuracy = sqnr(expected[gemm], once[gemm])
            assert accuracy > sqnr(expected[gemm], twice[gemm]) - 0.1, (gemm, seed)
            assert outliers or accuracy > 27, (gemm, seed)


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


def test_mxfp8_beside_one_loud_channel() -> None:
    """Floor saturates the largest values of the blocks with that channel, by up to 12.5 %."""
    x, w, g = operands(256, 128, 96)
    loud_x, loud_g = x.clone(), g.clone()
    loud_x[:, 17] *= 30
    loud_g[:, 17] *= 30
    least = {"output": 27, "grad_input": 27, "grad_weight": 26}
    for inputs, grads in ((loud_x, g), (x, loud_g)):
        expected = exact(inputs, w, grads)
        ceil, floor = (
            step(layer_of(config, w), inputs, grads)
            for config in (config_of("mxfp8"), floor_of_mxfp8())
        )
        for gemm in GEMMS:
            accuracy = sqnr(expected[gemm], ceil[gemm])
            assert accuracy > least[gemm], gemm
            assert accuracy > sqnr(expected[gemm], floor[gemm]), gemm


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_mxfp8_has_no_epsilon(rule: str) -> None:
    """Powers of two change no GEMM by more than that power, not even far below 1e-12."""
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
def test_hooks_see_plain_tensors(recipe: str) -> None:
    x, w, g = operands(outliers=True)
    layer = layer_of(config_of(recipe), w)
    expected = step(layer, x, g)
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        assert type(tensor) in (torch.Tensor, nn.Parameter)
        seen[name] = tensor.detach().clone()

    layer.register_forward_pre_hook(lambda _, args: note("input", args[0]))
    layer.register_forward_hook(lambda *args: note("output", args[2]))
    layer.register_full_backward_pre_hook(lambda _, grads: note("grad_output", grads[0]))
    layer.register_full_backward_hook(lambda *args: note("grad_input", args[1][0]))
    layer.weight.register_hook(lambda grad: note("grad_weight", grad))
    again = step(layer, x, g)
    assert sorted(seen) == sorted({*GEMMS, "input", "grad_output"})
    for name in GEMMS:
        assert same_bits(expected[name], again[name])
        assert same_bits(expected[name], seen[name])
    assert same_bits(seen["input"], x)
    assert same_bits(seen["grad_output"], g)


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
    # A gradient that was asked for with create_graph is as good as another.
    output, grad = layer(x), torch.randn(4, 16, requires_grad=True)
    (first,) = torch.autograd.grad(output, x, grad, retain_graph=True)
    (second,) = torch.autograd.grad(output, x, grad, create_graph=True)
    assert same_bits(first, second.detach())


def test_the_hessian_is_refused() -> None:
    layer, x = Float8Linear(16, 16), torch.randn(2, 16)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.functional.hessian(lambda t: layer(t).square().sum(), x)


@pytest.mark.parametrize("by_weight", [False, True])
def test_no_gradient_of_a_gradient_counts_as_unused(by_weight: bool) -> None:
    layer, x = Float8Linear(16, 16), torch.randn(2, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x * 2).square().sum(), x, create_graph=True)
    other = layer.weight if by_weight else x
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.grad(gradient.sum(), other, allow_unused=True)


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
    # Nothing of it is left when the layer gets its values.
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


def test_forward_mode_is_refused_by_name() -> None:
    layer, x = Float8Linear(16, 16), torch.randn(4, 16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.randn(4, 16))
        others = {
            name: forward_ad.make_dual(p.detach(), torch.randn_like(p))
            for name, p in layer.named_parameters()
        }
        calls: list[Callable[[], object]] = [
            lambda: layer(dual),
            lambda: torch.func.functional_call(layer, {"weight": others["weight"]}, x),
            lambda: torch.func.functional_call(layer, {"bias": others["bias"]}, x),
            torch.no_grad()(lambda: layer(dual)),
            lambda: cast_to_float8(dual, CastConfig()),
        ]
        for call in calls:
            with pytest.raises(NotImplementedError, match="float8 has no forward-mode derivatives"):
                call()
        layer(x)  # what has no tangent can be computed


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    layer, x = Float8Linear(16, 16), torch.randn(2, 16)
    calls: list[Callable[[], object]] = [
        lambda: torch.func.grad(lambda t: layer(t).sum())(x),
        lambda: torch.func.vmap(layer)(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: torch.func.jacrev(layer)(x),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"Float8Linear: .* transforms of torch.func"):
            call()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_folded"])
def test_nan_stays_in_its_row(recipe: str) -> None:
    """torch's own bf16 GEMM lets it reach the row before."""
    for size in (31, 34, 48, 80):
        x, w, g = (t.bfloat16() for t in operands(64, size, size))
        x[5, 3], g[9, 3] = torch.nan, torch.inf
        found = step(layer_of(config_of(recipe), w), x, g)
        for name, row in (("output", 5), ("grad_input", 9)):
            assert found[name].isnan().any(1).nonzero().flatten().tolist() == [row]
