"""One training step on one rank: its communication and its memory.

The model is the reference Llama with SP over "tp", FSDP2 over "dp", experts over "ep" and "tp", and
AdamW. The same code runs on real ranks and in a fake world (scripts/plan/world.py).

A step has four *phases*: "precompute" (the update of scales after the previous optimizer step; for
delayed scales, their sync), "forward", "backward", and "optimizer" (clipping and the optimizer's
step).
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist import float8_layers, skip_head
from fp8_dist.debug import CommRow
from fp8_dist.debug.audit import CommAudit, CommTable
from fp8_dist.fsdp import clip_grad_norm_, set_gradient_transport
from fp8_dist.fsdp.gradient_transport import Transport
from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.mesh import local_tensor
from fp8_dist.text import progress
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.weights import float8_weights
from scripts.common.llama import LlamaConfig
from scripts.common.mixture import Router
from scripts.common.models import after_step, build, device_mesh, experts_of, is_float8
from scripts.common.saved_bytes import bytes_of, saved_bytes
from scripts.plan import own_model
from scripts.plan.own_model import OwnModel
from scripts.plan.pace import Pace
from scripts.plan.world import fake

PEER = "torchao tensorwise"
PHASES = ("precompute", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Plan:
    """A run to be planned."""

    model: LlamaConfig | OwnModel  # sizes of the reference Llama, or a model of the user
    axes: dict[str, int]  # sizes of the mesh's axes
    batch_size: int  # sequences per data-parallel rank
    seq_len: int
    variant: str  # a candidate: "bf16", one of the library, or `PEER`
    # The encoding of FSDP2's gradients and of TP's sums on the wire; None: torch's reduce-scatters.
    gradient_transport: Transport | None = None
    reduce_transport: Transport | None = None
    gpus_per_node: int | None = None
    gbps_within: float = 450.0  # GB/s that a rank sends within its node
    gbps_between: float = 50.0  # GB/s that it sends to other nodes

    @property
    def name(self) -> str:
        """The variant and its transports, for people."""
        words = [self.variant]
        words += [f"{self.gradient_transport} gradients"] * bool(self.gradient_transport)
        return ", ".join(words + [f"{self.reduce_transport} in TP"] * bool(self.reduce_transport))

    @property
    def ranks(self) -> int:
        """The size of the world."""
        return math.prod(self.axes.values())


class Collectives(NamedTuple):
    """The collectives of one phase that have the same op, axis and dtype.

    `count` is 0 for bytes that share a collective with another dtype, which is the one counted
    (FSDP2's mixed gathers). `bytes` are sizes of buffers, as in `comm_audit`; `within` and
    `between` are what a rank sends within its node and between nodes, if the plan has nodes.
    """

    phase: str
    op: str
    axis: str
    dtype: str
    count: int
    bytes: int
    within: int = 0
    between: int = 0


class TimedAudit(CommAudit):
    """An audit that sums times. Its rows can't: hops that differ in their bounds share a row."""

    def __init__(self, mesh: DeviceMesh | None, plan: Plan) -> None:
        super().__init__(mesh, plan.gpus_per_node)
        self.plan, self.seconds = plan, 0.0

    def add(self, row: CommRow) -> None:
        """Add the row of one collective, which takes the longer of its two times."""
        super().add(row)
        within, between = self.plan.gbps_within, self.plan.gbps_between
        self.seconds += max(row.bytes_within / within, row.bytes_between / between) / 1e9


@dataclass
class Step:
    """A step as one rank sees it."""

    collectives: list[Collectives] = field(default_factory=list)  # in the order of the phases
    memory: dict[str, int] = field(default_factory=dict)  # bytes by kind
    weights: int = 0  # the number of weights that a recipe converts
    blocks: int = 0
    parameters: int = 0  # elements of the whole model
    seconds: float = 0.0  # of communication, if the plan has nodes


def make_mesh(plan: Plan, device: str = "cpu") -> DeviceMesh:
    """The mesh of a plan over the default group."""
    axes = plan.axes
    return device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def run_step(plan: Plan, mesh: DeviceMesh, fake_tensors: bool) -> Step:
    """Build the model and run one step, in the state that it has from the second step on.

    Args:
        plan: the step.
        mesh: the mesh from `make_mesh`.
        fake_tensors: whether the default group is fake, and tensors should be fake too.
    """
    wire, model, admits = plan.reduce_transport, nn.Module(), is_float8
    progress(f"{plan.name}: building the model")
    if isinstance(plan.model, OwnModel):
        model = own_model.build(plan.variant, plan.model, mesh, wire)
        admits = skip_head(model, *plan.model.skip)
    else:
        model = build(plan.variant, plan.model, mesh, "meta", shard=True, reduce_transport=wire)
    for layer in float8_layers(model).values():
        for history in layer.histories.values():  # delayed scales, filled from the second step on
            history.load(torch.ones(1))
    with fake() if fake_tensors else nullcontext():
        model.to_empty(device=mesh.device_type)
        if not fake_tensors:
            model.init_weights()
        if plan.gradient_transport is not None:
            launched = {"LOCAL_WORLD_SIZE": str(plan.gpus_per_node or plan.ranks)}
            with patch.dict(os.environ, launched):
                set_gradient_transport(model, plan.gradient_transport)
        for module in model.modules():
            if isinstance(module, Router):
                module.choose = MethodType(in_turn, module)  # type: ignore[method-assign]
        step = _step(plan, model, mesh)
    step.parameters = sum(parameter.numel() for parameter in model.parameters())
    step.blocks = len(own_model.blocks(model))
    linear = sum(isinstance(m, nn.Linear) and admits(m, n) for n, m in model.named_modules())
    step.weights = linear + sum(len(part.float8_weight_names) for part in experts_of(model))
    return step


def in_turn(router: Router, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `Router.choose`: experts get equal numbers of tokens, even from fake tensors."""
    (batch, length, experts), k = scores.shape, router.top_k
    ids = (torch.arange(batch * length * k) % experts).view(batch, length, k)
    return scores.gather(-1, ids), ids


def _step(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> Step:
    size, on = (plan.batch_size, plan.seq_len), mesh.device_type
    tokens = torch.zeros(size, dtype=torch.int64, device=on)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step, losses = Step(), []
    pace = Pace(plan.name, own_model.blocks(model))

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        pace.phase(name)
        with TimedAudit(mesh, plan) as audit:
            yield
        step.seconds += audit.seconds
        step.collectives += _collectives(name, audit)

    def forward() -> torch.Tensor:
        logits = own_model.logits_of(model(tokens))
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        return losses[0]

    with phase("precompute"):
        after_step(plan.variant, sharded=True)(model)
    with phase("forward"):
        saved = saved_bytes(forward, {}, (*model.parameters(), *model.buffers()))
    with phase("backward"):
        losses.pop().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with phase("optimizer"):
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    step.memory = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(gradients),
        "optimizer state": bytes_of(states),
        "kept casts": sum(map(_kept_bytes, float8_weights(model).values())),
        "saved for backward": saved.total(),
    }
    return step


def _kept_bytes(weight: Float8Weight) -> int:
    """The size of the cast that an update keeps for FSDP2's gathers. (The audits keep none.)"""
    shard = local_tensor(weight.master())
    if not (isinstance(shard, Float8AllGatherWeight) and weight.config.keep_fsdp_float8_cast):
        return 0
    return shard.numel() // (2 if weight.gather().plan.packed else 1)


def _collectives(phase: str, audit: CommAudit) -> list[Collectives]:
    """The sorted rows of an audit, summed over modules."""
    found = []
    for r in CommTable(audit.rows).without_modules().rows:
        dtype = str(r.dtype).removeprefix("torch.")
        sizes = r.count, r.bytes, r.bytes_within, r.bytes_between
        found.append(Collectives(phase, r.op, r.axis, dtype, *sizes))
    return sorted(found, key=lambda r: (r.axis, r.op, r.dtype, -r.count))
