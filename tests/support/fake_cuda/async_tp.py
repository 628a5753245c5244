"""Async tensor parallelism of a compiled Llama block, to be run in a process of fake CUDA devices.

torch.compile fuses gathers and reduce-scatters with GEMMs, so that parts of them overlap.
"""

import warnings
from collections import Counter
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from fake_cuda.blocks import flash_attention
from fake_cuda.counter import KernelCounter
from fake_cuda.device import FakeCudaMode
from fake_cuda.inductor import compiled_code_is_counted
from fake_cuda.world import RANKS, meshes
from fp8_dist import convert_to_float8_training, text
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan
from fp8_dist.torch_internals import set_dtensor_local
from fp8_dist.weight.known import KnownWeight
from scripts.common.llama import Llama, LlamaConfig

_COUNTED = {
    torch.ops.symm_mem.fused_all_gather_scaled_matmul.default: "fused gathers",
    torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default: "fused reduce-scatters",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "gathers",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce-scatters",
}


class Fusions(NamedTuple):
    """Counts of fused operators in the graphs of forward and backward, and the warnings."""

    forward: dict[str, int]
    backward: dict[str, int]
    warnings: list[str]


def count_fusions() -> Fusions:
    """Compile a block under tensor and sequence parallelism, and count the fusions of torch."""
    mesh, mode, found = meshes(tp=RANKS)["tp"], FakeCudaMode(), []
    config = LlamaConfig(512, 1, 16, 8, 1024, vocab_size=256, max_seq_len=32)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode, torch.device("cuda"):
            model = Llama(config)
            x = torch.zeros(2, config.max_seq_len // RANKS, config.dim, requires_grad=True)
    finally:
        torch.set_default_dtype(dtype)
    convert_to_float8_training(model)
    apply_tp_plan(model, mesh, llama_tp_plan(model))
    for parameter in model.parameters():  # graphs don't take fake tensors that wrap real ones
        if isinstance(parameter, DTensor):
            set_dtensor_local(parameter, KnownWeight.unwrap(local_tensor(parameter)))

    def count(graph: torch.fx.Graph) -> None:
        names = (_COUNTED.get(node.target) for node in graph.nodes)  # type: ignore[call-overload]
        found.append(dict(sorted(Counter(name for name in names if name).items())))

    options = {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": count}
    torch._dynamo.reset()
    with (
        patch.object(text, "_warned", set()),
        patch.object(dist, "is_nccl_available", lambda: True),
        symmetric_memory._test_mode(),
        torch._inductor.config.patch(options),
        patch.object(F, "scaled_dot_product_attention", flash_attention),
        compiled_code_is_counted(mode, KernelCounter()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        block = torch.compile(model.layers[0], fullgraph=True)
        block(x, cos=model.cos, sin=model.sin).backward(x.detach())
    texts = [
        str(each.message) for each in caught if "async tensor parallelism" in str(each.message)
    ]
    forward, backward = found
    return Fusions(forward, backward, texts)
