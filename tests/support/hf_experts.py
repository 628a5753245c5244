"""transformers models with experts in float8, and the results of a step."""

import warnings
from typing import Any

import torch
from hf_models import batch, build
from reference import same_bits
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fp8_dist import convert_to_float8_training, skip_head
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training

IDS = batch(0)
Step = tuple[torch.Tensor, dict[str, torch.Tensor | None]]


def made(kind: str, recipe: Any = "rowwise_folded", dense: bool = False, **fields: Any) -> Any:
    """A converted model. In experts, weights of different features differ by up to 10,000 times.

    ``dense``: convert linear layers too. ``fields``: other fields of the experts' config.
    """
    model = build(kind)
    generator = torch.Generator().manual_seed(1)
    features = 2 if kind == "gpt_oss" else 1  # the dim of output features
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            size = torch.logspace(0, -4, parameter.shape[features])
            order = torch.randperm(len(size), generator=generator)
            parameter.data *= size[order].view(-1, 1) if features == 1 else size[order]
        elif ".experts." in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    if dense:
        # One scale per weight, and one per token, since the tokens of a rank are not one device's.
        config = Float8ExpertsConfig("tensorwise").linear
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*stay in high precision")  # converted below
            convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
    return convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe, **fields))


def step(model: nn.Module, ids: torch.Tensor = IDS, scale: float = 1.0) -> Step:
    """Run a step, and return the logits and the gradients."""
    logits = model(input_ids=ids).logits
    (logits.float().square().sum() * scale).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def different(a: Step, b: Step, only: str = "") -> list[str]:
    """The names of results that differ in two steps; ``only``: a part of names of gradients."""
    wrong = [] if same_bits(a[0], b[0]) else ["logits"]
    for name in b[1]:
        one, other = a[1][name], b[1][name]
        if only in name and one is not None and not (other is not None and same_bits(one, other)):
            wrong.append(name)
    return wrong


class Mixture(nn.Module):
    """A float8 linear layer, followed by converted experts with a given routing."""

    def __init__(self, config: Float8ExpertsConfig, experts: int = 8, hidden: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 160, "moe_intermediate_size": hidden, "num_experts": experts}
        self.linear = nn.Linear(160, 160, bias=False)
        self.experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
        for parameter in self.experts.parameters():  # rows and columns of different magnitudes
            rows, columns = (
                torch.logspace(0, -3, n)[torch.randperm(n)] for n in parameter.shape[1:]
            )
            parameter.data = torch.randn(parameter.shape) * rows[:, None] * columns
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*stay in high precision")  # converted below
            # One scale per token, since the tokens of a rank are not one device's.
            convert_to_float8_training(self, config=Float8ExpertsConfig("tensorwise").linear)
        convert_experts_to_float8_training(self, config=config)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(self.linear(x), ids, weights)
