"""KnownWeight: which operators on lists invalidate the cached statistics, and of which weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
