"""A layer of experts, to be run in the process of a fake CUDA device."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import fake_tensors
from fp8_dist.kernels.grouped import Groups
from fp8_dist.moe import Float8ExpertsConfig
from fp8_dist.moe.functions import cast_weight, grouped_product
from scripts.common.recipes import BF16


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
) -> Counts:
    """Count forward and backward of experts, in a recipe or in bf16, after a change of the weight.

    ``dtype``: the dtype of the weight. The sizes of groups are known on the host.
    """
    experts, rows, k, n = shape
    counts = [rows] * experts
    counts[0], counts[1] = rows + 1, rows - 1
    on_host = torch.tensor(counts)
    with fake_tensors():
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
