"""KnownWeight: which operators on lists invalidate the cached statistics, and of which weights."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from reference import same_bits
from torch import Tensor, nn

from fp8_dist.weight.known import OUTDATED, TRAINED, KnownWeight

aten = torch.ops.aten


def adamw(ws: list[Any], other: list[Tensor], *, to: str) -> None:
    """A fused step that writes to the weights as parameters, or as second moments."""
    steps = [torch.ones(()) for _ in ws]
    given = {"self": other, "exp_avg_sqs": [x.clone() for x in other], to: ws}
    aten._fused_adamw_.default(
        **given, grads=other, exp_avgs=[x.clone() for x in other], max_exp_avg_sqs=[],
        state_steps=steps, lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


Call = Callable[[list[Any], list[Tensor]], object]
WRITES: dict[str, Call] = {
    "a scalar": lambda ws, _: torch._foreach_mul_(ws, 2.0),
    "a list": lambda ws, other: torch._foreach_add_(ws, other),
    "several lists": lambda ws, other: torch._foreach_addcdiv_(ws, other, other, [1.0] * 3),
    "a copy": lambda ws, other: torch._foreach_copy_(ws, other),
    "by name": lambda ws, other: aten._foreach_copy_.default(self=ws, src=other),
    "fused": lambda ws, other: adamw(ws, other, to="self"),
    "fused, as another argument": lambda ws, other: adamw(ws, other, to="exp_avg_sqs"),
    "out": lambda ws, other: [torch.add(x, 1, out=w) for w, x in zip(ws, other, strict=True)],
}
READS: dict[str, Call] = {
    "a new list": lambda ws, _: torch._foreach_mul(ws, 2.0),
    "a copy": lambda ws, other: torch._foreach_copy_(other, ws),
    "a list": lambda ws, other: torch._foreach_add_(other, ws),
    "by name": lambda ws, other: aten._foreach_copy_.default(src=ws, self=other),
}


def states_and_values(call: Call, wrapped: list[bool]) -> tuple[list[int], list[Tensor], Any]:
    """Run an operator on three tensors, some of which are weights with statistics."""
    plain, other = [torch.full((2, 2), 3.0) for _ in range(3)], [torch.ones(2, 2) for _ in range(3)]
    mixed = [
        KnownWeight(x) if is_weight else x for x, is_weight in zip(plain, wrapped, strict=True)
    ]
    weights = [x for x in mixed if isinstance(x, KnownWeight)]
    for weight in weights:
        weight.valid.fill_(TRAINED)
    result = call(mixed, other)
    return [int(weight.valid) for weight in weights], [*plain, *other], result


@pytest.mark.parametrize("wrapped", [[True, True, True], [False, True, False], [True, False, True]])
@pytest.mark.parametrize("how", ["writes", "reads"])
def test_operators_on_lists_invalidate_what_they_write_to(how: str, wrapped: list[bool]) -> None:
    state, calls = (OUTDATED, WRITES) if how == "writes" else (TRAINED, READS)
    for name, call in calls.items():
        states, values, result = states_and_values(call, wrapped)
        _, expected, expected_result = states_and_values(call, [False] * 3)
        assert states == [state] * sum(wrapped), name
        assert all(map(torch.equal, values, expected)), name
        if name == "a new list":
            assert {type(x) for x in result} == {Tensor}
        else:
            assert type(result) is type(expected_result), name


def arguments() -> Iterator[tuple[Any, ...]]:
    """Arguments for methods of a 4 x 4 matrix: each in-place method takes some of them."""
    x, whole, rows = torch.rand(4, 4) + 0.5, torch.ones(4, 4, dtype=torch.int32), torch.arange(2)
    numbers: tuple[Any, ...] = (2.0, 0.5, 1, x, whole, x > 1, torch.float32, [2, 2], "nope")
    yield from [(), *((number,) for number in numbers)]
    yield from [(x, x), (0, 1), (0.25, 0.5), (x > 1, 2.0), (x > 1, x), (x[0], x[1]), (whole, 1)]
    yield from [(0, rows, x[:2]), (0, rows, 2.0), (0, rows[:, None], x[:2]), (2, 0, 1.0)]
    yield from [(0, whole.long(), x, "sum"), (0, rows, x[:2], "prod"), ((rows,), x[:2])]
    yield from [(rows, x[0, :2])]
    yield from [([4, 4], [4, 1]), (x[None], x[None]), (x, x[0]), (lambda v: 3 * v,)]
    yield from [(x, lambda v, a: v + a), (x, x, lambda v, a, b: v + a * b), (x.to_sparse(),)]


# They change what a tensor is, not its values.
ATTRIBUTES = {"detach_", "requires_grad_", "rename_", "share_memory_"}
# They take vectors, integers or sparse tensors.
OF_OTHERS = {f"bitwise_{name}_" for name in ("and", "not", "or", "xor", "left_shift")}
OF_OTHERS |= {"bitwise_right_shift_", "gcd_", "lcm_", "addmv_", "baddbmm_", "float_power_"}
OF_OTHERS |= {"resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", ["itself", ".data", "a view"])
def test_every_in_place_method_invalidates(source: str) -> None:
    """By torch's convention, the names of methods that write end with an underscore."""
    names = {n for n in dir(Tensor) if n.endswith("_") and n[0] != "_"} - ATTRIBUTES
    tried = set()
    for name, args in product(sorted(names), list(arguments())):
        weight: Any = nn.Parameter(KnownWeight(torch.rand(4, 4) + 0.5), requires_grad=False)
        valid = weight.valid.fill_(TRAINED)
        sources = {"itself": weight, ".data": weight.data, "a view": weight.view(16).view(4, 4)}
        try:
            getattr(weight.plain.clone(), name)(*args)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue  # it takes other arguments
        getattr(sources[source], name)(*args)
        assert int(valid) == OUTDATED, (name, args)
        tried.add(name)
    assert names - tried == OF_OTHERS


@pytest.mark.parametrize("name", ["apply_", "map_", "map2_"])
def test_functions_of_elements(name: str) -> None:
    """They read and write memory without an operator."""
    plain = torch.arange(12.0).view(3, 4)
    weight, others = KnownWeight(plain.clone()), [plain + 1, plain + 2]
    given = others[: ["apply_", "map_", "map2_"].index(name)]
    for tensor, args in ((plain, given), (weight, [KnownWeight(x) for x in given])):
        found = getattr(tensor[1:], name)(*[x[1:] for x in args], lambda *v: 2 * sum(v))
        assert type(found) is type(tensor)
    assert same_bits(weight.plain, plain)
    assert weight._version == 1
    for tensor in (weight, plain):
        with pytest.raises(RuntimeError, match="requires grad"):
            getattr(tensor.detach().requires_grad_(), name)(*given, max)
