"""Experts, to be run in the process of a fake CUDA device."""

from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import capability, fake_tensors
from fp8_dist.kernels.grouped import Groups
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, dispatch
from fp8_dist.moe.functions import cast_weight, grouped_product
from scripts.common.mixture import Experts
from scripts.common.recipes import BF16
from scripts.common.sizes import Mixture


class ExpertsShape(NamedTuple):
    """The shape of a layer of experts; the default is the first one of Qwen3-30B-A3B's experts."""

    experts: int = 128
    rows: int = 512  # per expert; one expert has one row more, another one row less
    in_features: int = 2048
    out_features: int = 1536


def count_experts(
    name: str,
    shape: ExpertsShape,
    dtype: torch.dtype = torch.bfloat16,
    device: tuple[int, int] = (9, 0),
) -> Counts:
    """Count forward and backward of experts, in a recipe or in bf16, after a change of the weight.

    The sizes of groups are known on the host.

    Args:
        dtype: the dtype of the weight.
        device: the compute capability.
    """
    experts, rows, k, n = shape
    counts = [rows] * experts
    counts[0], counts[1] = rows + 1, rows - 1
    on_host = torch.tensor(counts)
    with capability(*device), fake_tensors():
        sizes = torch.full((experts,), rows, device="cuda")
        groups = Groups.of(sizes, on_host, sum(counts))
        x = torch.empty(sum(counts), k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(experts, n, k, device="cuda", dtype=dtype, requires_grad=True)
        grad = x.new_empty(sum(counts), n)
        with KernelCounter() as counter:
            if name == BF16:
                output = F.grouped_mm(x, w.mT, offs=groups.ends)
            else:
                config = Float8ExpertsConfig.from_recipe_name(name)
                (output,) = grouped_product(x, [cast_weight(w, config)], groups, config)
            output.backward(grad)
    return counter.counts


def count_routed(name: str, tokens: int = 2048, top_k: int = 8) -> Counts:
    """Count forward and backward of routed SwiGLU experts in a recipe, from ids to outputs.

    Each expert has as many rows, but for one row.
    """
    experts, _, k, n = ExpertsShape()
    rows = tokens * top_k
    sizes = torch.full((experts,), rows // experts)
    sizes[0] += 1
    sizes[1] -= 1
    known, read = torch.cat([torch.tensor([rows, rows]), sizes]), dispatch.numbers_of_rows

    def numbers(sent: torch.Tensor, received: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        read(sent, received, ids)  # the numbers that it reads are arbitrary
        return known

    with fake_tensors(), patch.object(dispatch, "numbers_of_rows", numbers):
        with torch.device("cuda"):
            layer = Experts(k, Mixture(experts=experts, top_k=top_k, ffn_dim=n))
            ids = torch.empty(tokens, top_k, dtype=torch.int64)
            x = torch.empty(tokens, k, dtype=torch.bfloat16, requires_grad=True)
            shares = torch.empty(tokens, top_k, dtype=torch.bfloat16)
            for weight in layer.float8_weight_names:
                empty = torch.empty_like(getattr(layer, weight), dtype=torch.bfloat16)
                setattr(layer, weight, torch.nn.Parameter(empty))
        config = Float8ExpertsConfig.from_recipe_name(name)
        convert_experts_to_float8_training(layer, config=config)
        with KernelCounter() as counter:
            layer(x, ids, shares).backward(torch.empty_like(x))
    return counter.counts
