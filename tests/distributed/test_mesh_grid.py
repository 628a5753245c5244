"""All pairs of a mesh, a shape and a recipe: the operands of the three GEMMs of two steps, bit by bit."""

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from half_octaves import half_octaves_config
from ranks import RankPools, device_mesh
from reference import Product, float8_gemms, same_bits, scales_of
from schemes import CONFIG, GATHERED_CONFIG
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from two_level import two_level_config

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Tensor,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.recipe import Gemm
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan


class Mesh(NamedTuple):
    """Sizes of the axes pp (the stage uses the rest), replicate, shard and tp; style of the
    tensor-parallel layer; dim that FSDP2 shards."""

    axes: tuple[int, int, int, int]
    style: str = ""
    dim: int = 0

    @property
    def ranks(self) -> int:
        return torch.Size(self.axes).numel()


MESHES = {
    "FSDP2 x2": Mesh((1, 1, 2, 1)),
    "FSDP2 x3": Mesh((1, 1, 3, 1)),
    "FSDP2 x2, Shard(1)": Mesh((1, 1, 2, 1), dim=1),
    "HSDP 2x2": Mesh((1, 2, 2, 1)),
    "TP x2, column": Mesh((1, 1, 1, 2), "column"),
    "TP x2, row": Mesh((1, 1, 1, 2), "row"),
    "TP x3, column": Mesh((1, 1, 1, 3), "column"),
    "TP x3, row": Mesh((1, 1, 1, 3), "row"),
    "FSDP2 2 x TP 2, column": Mesh((1, 1, 2, 2), "column"),
    "FSDP2 2 x TP 2, row": Mesh((1, 1, 2, 2), "row"),
    "HSDP 2x2 x TP 2, row": Mesh((1, 2, 2, 2), "row"),
    "stage of PP 2: TP 2, column": Mesh((2, 1, 1, 2), "column"),
}
SHAPES = {
    "even": (48, 24),
    "1 row": (1, 24),
    "33 rows": (33, 24),
    "33 columns": (48, 33),
    "3 x 1": (3, 1),
    # Of these, scales of blocks alone.
    "whole blocks": (384, 512),
    "cut blocks": (300, 260),
    "parts of blocks": (257, 130),
}
# What FSDP2 can't do: uneven shards on dim 1, which it refuses itself; and gradients of empty
# tensor-parallel shards, which the gathered weight refuses.
REFUSED = {
    ("FSDP2 x2, Shard(1)", "33 columns"): NotImplementedError,
    ("FSDP2 x2, Shard(1)", "3 x 1"): NotImplementedError,
    ("FSDP2 2 x TP 2, column", "1 row"): ValueError,
    ("FSDP2 2 x TP 2, row", "3 x 1"): ValueError,
    ("HSDP 2x2 x TP 2, row", "3 x 1"): ValueError,
}
BLOCKS = ("blockwise", "mxfp8")
RULES: tuple[Literal["ceil", "even", "floor"], ...] = ("ceil", "even", "floor")


def configs(shape: tuple[int, int]) -> dict[str, Float8LinearConfig]:
    """Configs for a shape, by name. They pad, because GPUs only multiply multiples of 16."""
    recipes = BLOCKS if max(shape) > 128 else [recipe.value for recipe in Float8LinearRecipeName]
    found = {name: Float8LinearConfig.from_recipe_name(name) for name in recipes}
    if "tensorwise" in found:
        found["powers of 2"] = Float8LinearConfig(round_scales_to_power_of_2=True)
    found["two levels"] = two_level_config()
    found["fp32 blocks"] = Float8LinearConfig.from_recipe_name(
        "blockwise", scale_format="fp32", weight_source="bf16"
    )
    for recipe, rule in zip(("mxfp8", "blockwise"), (RULES[sum(shape) % 3], None), strict=True):
        four_bits = Float8LinearConfig.from_recipe_name(recipe, weight_format="mxfp4")
        weight = replace(four_bits.cast_config_weight, scale_rule=rule)
        found[f"mxfp4 of {recipe}"] = replace(four_bits, cast_config_weight=weight)
    found["1 x 32"] = Float8LinearConfig.from_recipe_name(
        "mxfp8", weight_format="mxfp4", weight_block_size=(1, 32)
    )
    if 33 in shape:  # blocks that most shards cut
        found["half octaves"] = half_octaves_config()
        found["pairs"] = CONFIG
        found["quads"] = GATHERED_CONFIG
    return {name: replace(config, pad_inner_dim=True) for name, config in found.items()}


def stage_mesh(axes: tuple[int, int, int, int]) -> DeviceMesh:
    """The mesh of this rank's stage; made once for each pool of ranks, groups are not for free."""
    pp, replicate, shard, tp = axes
    whole = device_mesh(pp=pp, replicate=replicate, shard=shard, tp=tp)
    return whole["replicate", "shard", "tp"]


def linear(shape: tuple[int, int], config: Float8LinearConfig) -> nn.Sequential:
    """One layer whose rows and columns have many magnitudes, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.randn(shape[0], 1).exp()).mul_(torch.randn(shape[1]).exp())
    return convert_to_float8_training(model, config=config)  # type: ignore[return-value]


def on_mesh(at: Mesh, shape: tuple[int, int], config: Float8LinearConfig) -> nn.Sequential:
    """``linear`` on a mesh; the style shards activations by sequence (dim 1) or by features."""
    mesh, data = stage_mesh(at.axes), at.axes[2] > 1
    gather = data and config.recipe.gather_scheme["weight"] is not None
    model = linear(shape, replace(config, enable_fsdp_float8_all_gather=gather))
    styles = {
        "column": Float8ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "row": Float8RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1)),
    }
    if at.style:
        apply_tp_plan(model, mesh["tp"], {"0": styles[at.style]})
    if data:
        axes = mesh["replicate", "shard"] if at.axes[1] > 1 else mesh["shard"]
        fully_shard(model, mesh=axes, shard_placement_fn=lambda p: Shard(at.dim))
    return model


def data_of(
    at: Mesh, shape: tuple[int, int], seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """This data-parallel rank's input and output gradient [3, sequence, features]."""
    tp = at.axes[3]
    torch.manual_seed(1 + (dist.get_rank() // tp if seed is None else seed))
    tokens = torch.randn(3, 15 * tp, 1).exp()
    x, grad = (torch.randn(3, 15 * tp, features) for features in (shape[1], shape[0]))
    return tokens * x, tokens.flip(1) * grad


def mine(whole: torch.Tensor, dim: int, at: Mesh) -> torch.Tensor:
    """This tensor-parallel rank's part, as torch.chunk cuts it."""
    size = whole.shape[dim]
    chunk = -(-size // at.axes[3])
    start = min(dist.get_rank() % at.axes[3] * chunk, size)
    return whole.narrow(dim, start, min(chunk, size - start)).contiguous()


def parts_of(at: Mesh, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of an input and an output gradient."""
    if not at.style:
        return x, grad
    outside, inside = (1, 2) if at.style == "column" else (2, 1)
    return mine(x, outside, at), mine(grad, inside, at)


def step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[Product]:
    """The operands of each float8 GEMM of one step: output, grad_input, grad_weight."""
    with float8_gemms() as calls:
        model(x.detach().requires_grad_()).backward(grad)
    return [*calls]


def change(*models: nn.Module) -> None:
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter.mul_(1.7)


# Of each GEMM's left and right operand: the dim that a tensor-parallel style splits.
SPLIT: dict[str, list[tuple[int | None, int | None]]] = {
    "": [(None, None), (None, None), (None, None)],
    "column": [(None, 1), (1, 0), (0, None)],
    "row": [(1, 0), (None, 1), (None, 1)],
}


def is_part(found: Float8Tensor, whole: Float8Tensor, dim: int | None, at: Mesh) -> bool:
    """Whether a rank holds its part of an operand, whose blocks it may cut."""
    data, scales = whole.qdata.view(torch.uint8), scales_of(whole)
    if dim is not None:
        data, scales = mine(data, dim, at), mine(scales, dim, at)
    return same_bits(found.qdata.view(torch.uint8), data) and same_bits(scales_of(found), scales)


def are_parts(found: Product, whole: Product, dims: tuple[int | None, ...], at: Mesh) -> bool:
    if any(x.numel() == 0 for x in found) and any(x.scale.ndim for x in found):
        # Scales of empty rows are of no use, and neither is what was folded with them.
        return True
    return all(is_part(*each, at) for each in zip(found, whole, dims, strict=True))


def with_history(model: nn.Module, twin: nn.Module, at: Mesh, shape: tuple[int, int]) -> None:
    """A step before, for delayed scales; the batches of data-parallel ranks are one batch."""
    replicas, rank = at.axes[1] * at.axes[2], dist.get_rank() // at.axes[3]
    first = rank // replicas * replicas
    for other in range(first, first + replicas):
        step(twin, *data_of(at, shape, 100 + other))
    step(model, *parts_of(at, *data_of(at, shape, 100 + rank)))
    for each in (model, twin):
        sync_float8_amax_and_scale_history(each)


def verdicts(
    at: Mesh, shape: tuple[int, int], precompute: bool, chosen: slice
) -> dict[str, list[bool]]:
    """By config: whether the operands of each GEMM are, bit for bit, this rank's parts of one process's.

    In two steps, the second one of other weights; `precompute` comes before the first one, or only
    before the second.
    """
    results = {}
    for name, config in [*configs(shape).items()][chosen]:
        model, twin = on_mesh(at, shape, config), linear(shape, config)
        if config.recipe.delayed:
            with_history(model, twin, at, shape)
        x, grad = data_of(at, shape)
        same: list[bool] = []
        for precomputed in (precompute, not precompute):
            if precomputed and not config.recipe.delayed:
                precompute_float8_dynamic_scale(model)
            found, whole = step(model, *parts_of(at, x, grad)), step(twin, x, grad)
            assert len(found) == len(whole) == sum(map(config.gemm_enabled, get_args(Gemm)))
            for pair, expected, dims in zip(found, whole, SPLIT[at.style], strict=False):
                same.append(are_parts(pair, expected, dims, at))
            change(model, twin)
        results[name] = same
    return results


def expect_refusal(at: Mesh, shape: tuple[int, int], error: type[Exception]) -> None:
    for recipe in ("tensorwise", "rowwise_folded", "delayed"):
        config = Float8LinearConfig.from_recipe_name(recipe)
        with pytest.raises(error, match=r"uneven sharding on dim 1|can't reduce an empty gradient"):
            on_mesh(at, shape, config)(parts_of(at, *data_of(at, shape))[0])


def wrong_cases(name: str) -> list[str]:
    """All shapes on a mesh, each with every fourth config; precompute in either step."""
    at, number, wrong = MESHES[name], [*MESHES].index(name), []
    for i, (shape, sizes) in enumerate(SHAPES.items()):
        if error := REFUSED.get((name, shape)):
            expect_refusal(at, sizes, error)
            continue
        precompute = (i // 2 + number) % 2 == 0
        found = verdicts(at, sizes, precompute, slice((i + number) % 4, None, 4))
        wrong += [
            f"{shape}, {config}, precompute {precompute}: {same}"
            for config, same in found.items()
            if not all(same)
        ]
    return wrong


@pytest.mark.parametrize("mesh", MESHES)
def test_operands(ranks: RankPools, mesh: str) -> None:
    size = MESHES[mesh].ranks
    assert ranks(size).run(wrong_cases, mesh, timeout=400) == [[]] * size
