"""The communication contract at 1,024 ranks.

One process plays one rank of a fake process group and computes with fake tensors: what is left of a
step is its sequence of collectives.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan
from scripts.common.llama import Llama, LlamaConfig

pytestmark = pytest.mark.full
FAKE_RANKS = 1024
CHOSEN_RANK = FAKE_RANKS - 1  # its FSDP shards are empty: no dim 0 of the model reaches 1,024
LAYERS, WEIGHTS_PER_LAYER = 2, 7

# What one rank counts: number of collectives by phase, and by "op axis dtype" in it.
Counts = dict[str, dict[str, int]]
MeshShape = tuple[int, int]  # dp, tp


def small_llama(tp: int) -> Llama:
    """On the meta device; as wide as it must be for every tensor-parallel rank to have a head."""
    heads = max(8, tp)
    with torch.device("meta"):
        return Llama(
            LlamaConfig(
                dim=2 * heads,
                n_layers=LAYERS,
                n_heads=heads,
                n_kv_heads=heads,
                ffn_dim=4 * heads,
                vocab_size=max(256, tp),
                max_seq_len=heads,
            )
        )


def parallelized(mesh: DeviceMesh) -> Llama:
    """A float8 Llama on the meta device: SP over tp, FSDP2 over dp, if of two ranks or more."""
    dp, tp = mesh["dp"], mesh["tp"]
    model = small_llama(tp.size())
    convert_to_float8_training(
        model,
        module_filter_fn=lambda _, name: name != "output",
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=dp.size() > 1),
    )
    if tp.size() > 1:
        apply_tp_plan(model, tp, llama_tp_plan(model))
    if dp.size() > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        for module in (*model.layers, model):
            fully_shard(module, mesh=dp, mp_policy=policy)
    return model


def counts_of_a_step(mesh: DeviceMesh) -> Counts:
    """Precompute, the step that follows it, and a step that nothing was precomputed for."""
    # Before the fake mode begins: in it, the tensor of a mesh's ranks would have no values.
    model = parallelized(mesh)
    counts: Counts = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.zeros(2, model.config.max_seq_len, dtype=torch.int64)
        with comm_audit(mesh) as audit:
            precompute_float8_dynamic_scale(model)
        counts["precompute"] = counted(audit)
        for phase in ("with precompute", "without precompute"):
            with comm_audit(mesh) as audit:
                model(tokens).sum().backward()
            counts[phase] = counted(audit)
            invalidate_float8_scales(model)
    return counts


def counted(audit: CommAudit) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in audit.rows:
        key = f"{row.op} {row.axis} {str(row.dtype).removeprefix('torch.')}"
        counts[key] = counts.get(key, 0) + row.count
    return counts


def on_fake_ranks(shapes: list[MeshShape]) -> dict[MeshShape, Counts]:
    """By mesh: what the chosen rank counts. Takes the default group's place for good."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=CHOSEN_RANK, world_size=FAKE_RANKS, store=FakeStore())
    meshes = {
        shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for shape in shapes
    }
    return {shape: counts_of_a_step(mesh) for shape, mesh in meshes.items()}


def test_amaxes_at_1024_ranks() -> None:
    pool = RankPool(1)  # used for nothing else
    try:
        (found,) = pool.run(on_fake_ranks, [(1024, 1), (128, 8)])
    finally:
        pool.close()
    for (_, tp), counts in found.items():
        # The inputs of attention, wo, feed-forward and w2, and the output gradient of each layer.
        activations = LAYERS * (4 + WEIGHTS_PER_LAYER) if tp > 1 else 0
        axis = "dp" if tp == 1 else "world"
        assert counts["precompute"] == {f"all_reduce {axis} int32": 1}
        assert amax_reductions(counts["with precompute"]) == activations
        without = amax_reductions(counts["without precompute"])
        assert without == activations + LAYERS * WEIGHTS_PER_LAYER


def amax_reductions(counts: dict[str, int]) -> int:
    """All-reduces of amaxes, which travel as int32, over all axes."""
    return sum(
        count
        for key, count in counts.items()
        if key.startswith("all_reduce ") and key.endswith(" int32")
    )
