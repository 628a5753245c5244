"""The operators by which compiled graphs cast: what they return belongs to the graph."""

from collections.abc import Iterator

import torch
from reference import same_bits

from fp8_dist import Float8Linear, Float8LinearConfig, sync_float8_amax_and_scale_history
from fp8_dist.linear.amax_history import history_copies

E4M3 = torch.float8_e4m3fn


def layer_of(recipe: str) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear(32, 48, config=Float8LinearConfig.from_recipe_name(recipe))


def kept(layer: Float8Linear) -> Iterator[torch.Tensor]:
    for history in layer.histories.values():
        yield from vars(history).values()


def memory(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}


def test_an_operand_with_a_history() -> None:
    layer = layer_of("delayed")
    x = torch.randn(2, 8, 32)
    layer(x).sum().backward()
    sync_float8_amax_and_scale_history(layer)
    history = layer.histories["input"]
    arguments = (x, history._handle, E4M3, [False, True], True, [])
    first, second = (history_copies.overload(*arguments) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert not memory(first) & (memory(second) | memory(kept(layer)))
    assert history.last == x.abs().max()
    value, scale, plain, turned = first
    assert value == history.last
    assert same_bits(plain.flatten(0, 1).t(), turned)
    torch.library.opcheck(history_copies.overload, arguments, test_utils="test_faketensor")
    assert scale.shape == ()
