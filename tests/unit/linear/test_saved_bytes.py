"""The bytes that a layer saves for its backward: the input takes half as many as in bf16."""

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from recipe_algebra import GEMMS, RECIPES, config_of, layer_of, step
from reference import same_bits, saved_in

from fp8_dist import Float8Linear, sync_float8_amax_and_scale_history
from fp8_dist.debug import float8_stats
from fp8_dist.weight.casts import WeightOperands

ROWS, FEATURES = 256, 256
IN_FLOAT8 = [name for name in RECIPES if config_of(name).gemm_enabled("grad_weight")]
LIMIT = 0.52  # of the bf16 input: half of it, and room for scales


class Saved(NamedTuple):
    """Bytes of the storages that a forward keeps for its backward, each counted once.

    The bytes of the weight are those of its parameter, or of the float8 copy for grad_input.
    """

    activations: int
    weight_bytes: int


def saved_by(layer: nn.Module, x: torch.Tensor) -> Saved:
    casts: list[WeightOperands] = []
    if isinstance(layer, Float8Linear):
        operands = layer.float8_weight.operands
        layer.float8_weight.operands = lambda *args: (  # type: ignore[method-assign]
            casts.append(operands(*args)) or casts[-1]
        )
    output, tensors = saved_in(lambda: layer(x))
    assert output.requires_grad
    copies = [c for each in casts for c in (each.output, each.grad_input) if c is not None]
    weight_bytes = {storage(parameter) for parameter in layer.parameters()}
    weight_bytes |= {storage(t) for copy in copies for t in (copy.qdata, *copy.scales)}
    sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    kept = {at: size for at, size in sizes.items() if at in weight_bytes}
    return Saved(sum(sizes.values()) - sum(kept.values()), sum(kept.values()))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    x = torch.randn(ROWS, 1).exp() * torch.randn(ROWS, FEATURES)
    w, g = torch.randn(FEATURES, FEATURES) / FEATURES**0.5, torch.randn(ROWS, FEATURES)
    return x.to(dtype), w.to(dtype), g.to(dtype)


def test_bytes_of_a_forward() -> None:
    x, w, _ = operands()
    linear = nn.Linear(FEATURES, FEATURES, bias=False)
    linear.weight = nn.Parameter(w.clone())
    high = saved_by(linear, x.requires_grad_())
    assert high.activations == x.nbytes
    lines = [f"nn.Linear in bf16: {high.activations} B and {high.weight_bytes} B of the weight"]
    for recipe in RECIPES:
        saved = saved_by(layer_of(config_of(recipe), w), x)
        share = saved.activations / high.activations
        assert (share <= LIMIT) is (recipe in IN_FLOAT8), recipe
        lines.append(
            f"{recipe}: {saved.activations} B ({share:.4f}) and {saved.weight_bytes} B of the weight"
        )
    assert_expected_inline(
        "\n".join(lines),
        """\
nn.Linear in bf16: 131072 B and 131072 B of the weight
tensorwise: 65540 B (0.5000) and 65540 B of the weight
rowwise: 66560 B (0.5078) and 66560 B of the weight
rowwise_with_gw_hp: 131072 B (1.0000) and 65540 B of the weight
rowwise_folded: 66560 B (0.5078) and 66560 B of the weight
blockwise: 66048 B (0.5039) and 65540 B of the weight
mxfp8: 67584 B (0.5156) and 65600 B of the weight
delayed: 65544 B (0.5001) and 65540 B of the weight""",
    )


@pytest.mark.parametrize("recipe", IN_FLOAT8)
def test_bytes_stay_the_same(recipe: str) -> None:
    """Neither the shape, the bias, autocast nor earlier steps change the bytes."""
    x, w, g = operands()
    leaf = x.clone().requires_grad_()
    config = config_of(recipe)
    expected = saved_by(layer_of(config, w), leaf).activations
    assert saved_by(layer_of(config, w), leaf.view(4, 64, FEATURES)).activations == expected
    assert saved_by(layer_of(config, w, torch.zeros(FEATURES)), leaf).activations == expected
    layer = layer_of(config, w.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_by(layer, leaf.float()).activations == expected
    layer = layer_of(config, w)
    for _ in range(2):
        step(layer, x, g)
        if config.recipe.delayed:
            sync_float8_amax_and_scale_history(layer)
    trained = saved_by(layer, leaf)
    assert trained.activations == expected
    layer.weight.requires_grad_(False)
    amax = 4 if config.recipe.delayed else 0  # of the input, which the backward records
    assert saved_by(layer, leaf) == Saved(amax, trained.weight_bytes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_without_hooks(recipe: str) -> None:
    """Hooks that move what is saved elsewhere and back, as CPU offload does."""
    x, w, g = operands()
    expected = step(layer_of(config_of(recipe), w), x, g)
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.detach().clone())
        return packed[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda copy: copy.clone()):
        found = step(layer_of(config_of(recipe), w), x, g)
    assert packed
    for gemm in GEMMS:
        assert same_bits(expected[gemm], found[gemm]), gemm


def test_observed_layers_save_what_others_do() -> None:
    x, w, _ = operands()
    layers = nn.ModuleList([layer_of(config_of("tensorwise"), w) for _ in range(3)])
    x.requires_grad_()
    counts = []
    for context in (nullcontext(), float8_stats(layers)):
        with context:
            _, tensors = saved_in(lambda: sum(layer(x) for layer in layers))
        counts.append(len({storage(tensor) for tensor in tensors}))
    assert counts[0] == counts[1]
