"""Helpers for tests of delayed scales: contents of histories, and operands of GEMMs."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from nets import Net
from reference import FORMATS, float8_gemms, same_bits
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    ScalingType,
    convert_to_float8_training,
    invalidate_float8_scales,
    update_float8_scales,
)
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit
from fp8_dist.linear import float8_layers
from fp8_dist.operand.history import AmaxHistory

DELAYED = Float8LinearConfig.from_recipe_name("delayed")
GATHERED = replace(DELAYED, enable_fsdp_float8_all_gather=True)
DTYPES = {
    "input": torch.float8_e4m3fn,
    "weight": torch.float8_e4m3fn,
    "grad_output": torch.float8_e5m2,
}
OPERANDS = tuple(DTYPES)


def delayed(*operands: str, **changes: Any) -> Float8LinearConfig:
    """A config with delayed scales for the given operands, and dynamic scales for the others."""
    cast = CastConfig(ScalingType.DELAYED)
    casts = {f"cast_config_{operand}": cast for operand in operands}
    return replace(Float8LinearConfig(), **casts, **changes)


def histories(model: nn.Module) -> dict[str, AmaxHistory]:
    """The histories by name of layer and operand."""
    return {
        f"{name}.{operand}": history
        for name, layer in float8_layers(model).items()
        for operand, history in layer.histories.items()
    }


def amaxes(model: nn.Module) -> dict[str, list[float]]:
    """The amaxes in each history, the newest first."""
    found = {
        name: None if history.history is None else history.amaxes()
        for name, history in histories(model).items()
    }
    return {name: [] if h is None else h.tolist() for name, h in found.items()}


def recorded(model: nn.Module) -> dict[str, float | None]:
    """The amax of each operand that was recorded since the last sync."""
    found = {name: history.current for name, history in histories(model).items()}
    return {name: None if c is None else c.item() for name, c in found.items()}


def scaling(amax: float, dtype: torch.dtype, power_of_2: bool = False) -> list[torch.Tensor]:
    """(multiplier, scale) by the formula in fp8_dist.kernels.scale, but without the library."""
    m = torch.tensor(FORMATS[dtype][0] / max(amax, 1e-12), dtype=torch.float64).float()
    if power_of_2:
        m = 2.0 ** m.log2().floor()
    return [m, 1 / m]


def quantized(x: torch.Tensor, m: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float8 data of ``x`` with multiplier ``m``, rounded by torch and saturated."""
    largest = FORMATS[dtype][0]
    return (x.detach().float() * m).clamp(-largest, largest).to(dtype)


def layer(config: Float8LinearConfig = DELAYED) -> Float8Linear:
    """A float8 layer from 32 to 48 features."""
    return Float8Linear.from_float(nn.Linear(32, 48), config)


def operands_of(
    linear: Float8Linear, x: torch.Tensor, grad: torch.Tensor
) -> dict[str, Float8Tensor]:
    """The float8 operands of one forward and backward."""
    with float8_gemms() as calls:
        linear(x.detach().requires_grad_()).backward(grad)
    (x8, w8), (g8, again), (g8_t, x8_again) = calls
    # Both GEMMs that take an operand use the same cast.
    assert same_bits(w8.qdata.t(), again.qdata)
    assert same_bits(g8.qdata.t(), g8_t.qdata)
    assert same_bits(x8.qdata, x8_again.qdata)
    return {"input": x8, "weight": w8.t(), "grad_output": g8}


def train(
    net: nn.Module,
    steps: int,
    *,
    batches: int = 1,
    seed: int = 1,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train a Net for a few steps, with an update of scales after each; return the losses."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        for _ in range(batches):
            x = torch.randn(4, 8, 64, generator=generator)
            loss = ((forward or net)(x) - x.roll(1, -1)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(net)
    return losses


def audited_steps(
    net: nn.Module, x: torch.Tensor, mesh: DeviceMesh, count: int = 2
) -> dict[str, Any]:
    """Run steps that end with a sync; return the collectives of the last sync and the histories."""
    for _ in range(count):
        net(x).square().mean().backward()
        with comm_audit(mesh) as audit:
            sync(net)
    rows = [(row.op, row.axis, row.elements) for row in audit.rows]
    return {"rows": rows, "amaxes": amaxes(net), "operands": len(histories(net))}


Run = Callable[[torch.Tensor], torch.Tensor]


def forward_only(net: nn.Module, run: Run, x: torch.Tensor) -> None:
    run(x)


def gradient_of_the_input(net: nn.Module, run: Run, x: torch.Tensor) -> None:
    """Take the gradient of the input, as torch's pipelines do to infer shapes."""
    torch.autograd.grad(run(x).sum(), x)


def thrown_away(net: nn.Module, run: Run, x: torch.Tensor) -> None:
    for _ in range(2):
        run(x).square().sum().backward()
    net.zero_grad()


def set_to_zero(net: nn.Module, run: Run, x: torch.Tensor) -> None:
    run(x).square().sum().backward()
    net.zero_grad(set_to_none=False)
    invalidate_float8_scales(net)
    net.zero_grad()


DRY_RUNS: tuple[Callable[[nn.Module, Run, torch.Tensor], None], ...] = (
    forward_only,
    gradient_of_the_input,
    set_to_zero,
    thrown_away,
)


def disturbed_steps(
    how: Callable[[nn.Module], Run], within: int = 2
) -> list[tuple[dict[str, Any], list[Any]]]:
    """Histories and gradients of three steps of two micro-batches, with and without dry runs.

    Dry runs come before each step; the first ``within`` kinds of them also follow each micro-batch.
    """
    found = []
    for disturbed in (True, False):
        net = convert_to_float8_training(Net(layers=1), config=DELAYED)
        run, generator = how(net), torch.Generator().manual_seed(1)
        gradients: list[torch.Tensor] = []

        def disturb(
            *kinds: Callable, net: Net = net, run: Run = run, now: bool = disturbed
        ) -> None:
            for kind, value in zip(kinds, (1e20, math.nan, 1e4, 1e5), strict=False):
                if now:
                    kind(net, run, torch.full((2, 4, 64), value, requires_grad=True))

        for _ in range(3):
            disturb(*DRY_RUNS)
            for size in (4.0, 1.0):
                x = torch.randn(2, 4, 64, generator=generator) * size
                run(x.requires_grad_()).square().mean().backward()
                disturb(*DRY_RUNS[:within])
            gradients += [p.grad for p in net.parameters() if p.grad is not None]
            net.zero_grad()
            sync(net)
        found.append((amaxes(net), gradients))
    return found
