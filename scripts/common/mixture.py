"""The feed-forward of a mixture of experts: a router, and experts in float8 or high precision.

Vocabulary, besides that of llama.py: E = experts, k = experts per token, t = tokens, i = inner dim.

The modules know nothing about meshes, with one exception: if the weights of experts are DTensors
when they run, the experts are divided among the ranks of that mesh, and tokens are sent to them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.moe import Float8ExpertsConfig, Routing, dispatch_linear, linear_combine, route
from scripts.common.sizes import Mixture


class Router(nn.Module):
    """Choose experts for each token: (b, s, d) -> ids of experts and their shares, both (t, k).

    Attributes:
        balance_weight: the weight of the balancing loss, whose gradient is added in the backward.
            The loss of a sequence is E times the sum over experts of the fraction of slots times
            the mean score: 1 if all experts are used equally.
    """

    def __init__(self, dim: int, mixture: Mixture) -> None:
        super().__init__()
        self.top_k, self.balance_weight = mixture.top_k, mixture.balance
        self.gate = nn.Linear(dim, mixture.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).float().softmax(-1)
        shares, ids = self.choose(scores)
        used = F.one_hot(ids, scores.shape[-1]).sum(2).float().mean(1) / self.top_k
        balance = (used * scores.mean(1)).sum(-1).mean() * scores.shape[-1]
        shares = shares / shares.sum(-1, keepdim=True)
        shares = _AddLoss.apply(shares, balance, self.balance_weight)
        return ids.flatten(0, 1), shares.flatten(0, 1).to(x.dtype)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose k experts for each token: their scores and ids, both (b, s, k)."""
        return scores.topk(self.top_k)


class _AddLoss(torch.autograd.Function):
    """Return the tensor unchanged, and in the backward give a gradient to a loss as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, ctx.weight), None


class Experts(nn.Module):
    """SwiGLU feed-forwards: x (t, d), ids and shares (t, k) -> (t, d)."""

    float8_weight_names = ("w1", "w3", "w2")
    float8_experts_config: Float8ExpertsConfig | None = None  # set by the conversion

    def __init__(self, dim: int, mixture: Mixture) -> None:
        super().__init__()
        self.num_experts = mixture.experts
        self.w1, self.w3 = (
            nn.Parameter(torch.empty(mixture.experts, mixture.ffn_dim, dim)) for _ in range(2)
        )
        self.w2 = nn.Parameter(torch.empty(mixture.experts, dim, mixture.ffn_dim))

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        group = self.w1.device_mesh.get_group() if isinstance(self.w1, DTensor) else None
        routing, config = route(ids, self.num_experts, group), self.float8_experts_config
        if config is None:
            slots = self.in_high_precision(x, routing)
        else:
            gate, up = dispatch_linear(x, [self.w1, self.w3], routing, config)
            slots = linear_combine(F.silu(gate) * up, self.w2, routing, config)
        return (slots * shares.unsqueeze(-1)).sum(1)

    def in_high_precision(self, x: Tensor, routing: Routing) -> Tensor:
        """The outputs of all slots, (t, k, d), in the dtype of x."""
        weights = (self.w1, self.w3, self.w2)
        w1, w3, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        offs = routing.groups.ends
        rows = x.index_select(0, routing.slots // routing.top_k)
        if routing.arrivals is not None:
            rows = exchanged(rows, routing.sent, routing.received, routing.group)
            rows = rows.index_select(0, routing.arrivals)
        gate, up = (F.grouped_mm(rows, w.transpose(1, 2), offs=offs) for w in (w1, w3))
        rows = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)
        if routing.arrivals is not None:
            rows = torch.empty_like(rows).index_copy(0, routing.arrivals, rows)
            rows = exchanged(rows, routing.received, routing.sent, routing.group)
        slots = rows.new_zeros(routing.tokens * routing.top_k, rows.shape[1])
        return slots.index_copy(0, routing.slots, rows).unflatten(0, (-1, routing.top_k))


def exchanged(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Exchange rows between ranks, with the numbers of rows to send and to receive by rank."""
    return all_to_all_single_autograd(rows.contiguous(), receive, send, group)


class MixtureOfExperts(nn.Module):
    """Experts that a router chooses, plus an optional shared expert: (b, s, d) -> (b, s, d)."""

    def __init__(self, dim: int, mixture: Mixture, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts = Router(dim, mixture), Experts(dim, mixture)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        routed = self.experts(x.flatten(0, 1), *self.router(x)).view_as(x)
        return routed if self.shared is None else routed + self.shared(x)


class GatherSequence(ParallelStyle):
    """A style that gathers the plain output of a module along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            whole = DTensor.from_local(output, device_mesh, [Shard(1)], run_check=False)
            whole = whole.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()])

        module.register_forward_hook(gather)
        return module
