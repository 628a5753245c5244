"""Layers that take the same values share a cast, which autograd keeps."""

from collections.abc import Callable
from weakref import ref

import pytest
import torch
from captures import captured
from reference import same_bits
from torch import Tensor

from fp8_dist import Float8Linear, Float8LinearConfig, invalidate_float8_scales
from fp8_dist.operand.prepare import cast_input, cast_local
from fp8_dist.scaling import CastPlan
from fp8_dist.torch_internals import unnoticed_writes

PLAN = CastPlan(Float8LinearConfig.from_recipe_name("rowwise_folded").recipe.schemes["input"])


def replaced(x: Tensor, values: Tensor) -> Tensor:
    x.data = values
    return x


def refilled(x: Tensor) -> Tensor:
    """The tensor, with other values in other memory of the same storage."""
    storage, address = x.untyped_storage(), x.data_ptr()
    storage.resize_(2 * storage.nbytes())  # allocates before it frees
    assert x.data_ptr() != address
    with unnoticed_writes(x):
        return x.mul_(3)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "tokens": lambda x: x.view(-1, x.shape[-1]),
    "other rows": lambda x: x.view(-1, x.shape[-1] // 2),
    "a part": lambda x: x[1:],
    "another order": lambda x: x.transpose(0, 1),
    "another dtype": lambda x: x.view(torch.float16),
    "what was written": lambda x: x.mul_(3),
    "a copy": torch.clone,
    "another storage": lambda x: replaced(x, 3 * x),
    "a storage that was moved": refilled,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_share_a_cast_of_the_same_values(view: str) -> None:
    x = torch.randn(4, 4, 64).to(torch.bfloat16)
    (first,) = cast_input(x, PLAN)
    y = VIEWS[view](x)
    (found,), ((expected,), _) = cast_input(y, PLAN), cast_local(y.reshape(-1, y.shape[-1]), PLAN)
    assert same_bits(found.qdata, expected.qdata)
    assert same_bits(found.scales[0], expected.scales[0])
    assert (found.qdata is first.qdata) is (view in ("itself", "tokens"))


def test_the_address_of_a_freed_storage() -> None:
    memory, other = bytearray(48 * 64 * 4), bytearray(48 * 64 * 4)

    def tensor_in(buffer: bytearray) -> Tensor:
        return torch.frombuffer(buffer, dtype=torch.float32).view(48, 64)

    x = tensor_in(memory)
    x.copy_(torch.randn(48, 64))
    before, address = cast_input(x, PLAN)[0], x.data_ptr()
    for _ in range(20):
        replaced(x, tensor_in(other))
        replaced(x, tensor_in(memory).mul_(3))
        found, expected = cast_input(x, PLAN)[0], cast_local(x, PLAN)[0][0]
        assert x.data_ptr() == address
        assert found.qdata is not before.qdata
        assert same_bits(found.scales[0], expected.scales[0])
        before = found


def test_an_evaluation_has_casts_of_its_own() -> None:
    """A recorder may keep them, and autograd can't save inference tensors."""
    x = torch.randn(48, 64)
    with torch.inference_mode():
        evaluated = cast_input(x, PLAN)[0]
    trained = cast_input(x, PLAN)[0]
    assert evaluated.qdata.is_inference()
    assert not trained.qdata.is_inference()
    assert cast_input(x, PLAN)[0].qdata is trained.qdata


def by_numpy(x: Tensor) -> None:
    array = x.numpy()
    array *= 3


UNNOTICED: dict[str, Callable[[Tensor], object]] = {
    "data": lambda x: x.data.mul_(3),
    "numpy": by_numpy,
    "dlpack": lambda x: torch.from_dlpack(x).mul_(3),
}


@pytest.mark.parametrize("write", UNNOTICED)
def test_writes_that_nothing_counts(write: str) -> None:
    # docs/state.md lists them.
    layers = [Float8Linear(64, 32) for _ in range(3)]
    x = torch.randn(48, 64)
    outputs = [layers[0](x)]  # autograd keeps the cast
    UNNOTICED[write](x)
    outputs += [layers[1](x), layers[1](x.clone())]
    outputs.append(layers[2](x))
    assert not same_bits(outputs[1], outputs[2])
    assert same_bits(outputs[3], layers[2](x.clone()))
    invalidate_float8_scales(layers[0])
    assert same_bits(layers[1](x), outputs[2])


def test_parts_of_a_tensor_have_casts_of_their_own() -> None:
    parts = torch.randn(8, 64).chunk(2)
    (first,), (second,) = (cast_input(part, PLAN) for part in parts)
    for found, part in zip((first, second), parts, strict=True):
        assert same_bits(found.qdata, cast_local(part, PLAN)[0][0].qdata)


def test_a_capture_has_casts_of_its_own() -> None:
    x = torch.randn(8, 64)
    casts = [cast_input(x, PLAN)[0].qdata]
    for _ in range(2):
        with captured():
            casts += [cast_input(x, PLAN)[0].qdata for _ in range(2)]
    casts.append(cast_input(x, PLAN)[0].qdata)
    eager, first, again, second, other, after = casts
    assert first is again
    assert second is other
    assert len({*map(id, casts)}) == 4
    assert all(same_bits(cast, eager) for cast in (first, second, after))


def test_a_replay_may_have_written_to_an_input() -> None:
    x = torch.randn(8, 64)
    with captured() as graph:
        pass
    before = cast_input(x, PLAN)[0]
    with unnoticed_writes(x):
        x.mul_(torch.randn(8, 64))
    graph.replay()
    after, expected = cast_input(x, PLAN)[0], cast_local(x, PLAN)[0][0]
    assert before.qdata is not after.qdata
    assert same_bits(after.qdata, expected.qdata)


def test_a_cast_that_nothing_keeps_is_freed() -> None:
    x = torch.randn(48, 64)
    data = ref(cast_input(x, PLAN)[0].qdata)
    assert data() is None
