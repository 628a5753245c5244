"""Scales of blocks on meshes whose shards hold whole blocks, and on such as cut them."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from ranks import RankPools
from reference import Product, float8_gemms, scale_of_elements
from test_mesh_grid import SPLIT, is_part, stage_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan

RECIPES = ("blockwise", "mxfp8")
# Out x in features: whole blocks, blocks cut at the end, one more than whole ones, one block.
SHAPES = ((384, 512), (300, 260), (257, 130), (128, 128))
BATCH = 3


@dataclass(frozen=True)
class Mesh:
    """Sizes of its axes (pp, replicate, shard, tp), the TP style, the dim that FSDP2 shards."""

    axes: tuple[int, int, int, int]
    style: str = ""
    dim: int = 0

    @property
    def ranks(self) -> int:
        return torch.Size(self.axes).numel()


MESHES = {
    "FSDP2 x2": Mesh((1, 1, 2, 1)),
    "FSDP2 x3": Mesh((1, 1, 3, 1)),
    "FSDP2 x4": Mesh((1, 1, 4, 1)),
    "FSDP2 x2, Shard(1)": Mesh((1, 1, 2, 1), dim=1),
    "HSDP 2x2": Mesh((1, 2, 2, 1)),
    "TP x2, column": Mesh((1, 1, 1, 2), "column"),
    "TP x2, row": Mesh((1, 1, 1, 2), "row"),
    "TP x3, column": Mesh((1, 1, 1, 3), "column"),
    "TP x3, row": Mesh((1, 1, 1, 3), "row"),
    "TP x4, column": Mesh((1, 1, 1, 4), "column"),
    "TP x4, row": Mesh((1, 1, 1, 4), "row"),
    "FSDP2 2 x TP 2, column": Mesh((1, 1, 2, 2), "column"),
    "FSDP2 2 x TP 2, row": Mesh((1, 1, 2, 2), "row"),
}


def config_of(recipe: str, **changes: object) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(recipe), **changes)  # type: ignore[arg-type]


def linear(shape: tuple[int, int], config: Float8LinearConfig) -> nn.Sequential:
    """One layer whose weight has blocks of many magnitudes, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.randn(shape[0], 1).exp()).mul_(torch.randn(shape[1]).exp())
    return convert_to_float8_training(model, config=config)  # type: ignore[return-value]


def on_mesh(mesh: Mesh, shape: tuple[int, int], config: Float8LinearConfig) -> nn.Sequential:
    """It on a mesh; the sequence (dim 1) is sharded where the style leaves activations whole."""
    at = stage_mesh(mesh.axes)
    data = mesh.axes[2] > 1
    config = replace(config, enable_fsdp_float8_all_gather=data)
    model = linear(shape, config)
    if mesh.style == "column":
        style = Float8ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))
        apply_tp_plan(model, at["tp"], {"0": style})
    elif mesh.style == "row":
        style = Float8RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1))
        apply_tp_plan(model, at["tp"], {"0": style})
    if data:
        axes = at["replicate", "shard"] if mesh.axes[1] > 1 else at["shard"]
        fully_shard(model, mesh=axes, shard_placement_fn=lambda p: Shard(mesh.dim))
    return model


def data_of(mesh: Mesh, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """This data-parallel rank's input and output gradient [B, S, K]; B * S is not a multiple of 32."""
    tp = mesh.axes[3]
    torch.manual_seed(1 + torch.distributed.get_rank() // tp)
    tokens = torch.randn(BATCH, 15 * tp, 1).exp()
    return tokens * torch.randn(*tokens.shape[:2], shape[1]), tokens.flip(1) * torch.randn(
        *tokens.shape[:2], shape[0]
    )


def mine(whole: torch.Tensor, dim: int, mesh: Mesh) -> torch.Tensor:
    """This tensor-parallel rank's part, as torch.chunk cuts it."""
    rank = torch.distributed.get_rank() % mesh.axes[3]
    chunk = -(-whole.shape[dim] // mesh.axes[3])
    start = min(rank * chunk, whole.shape[dim])
    return whole.narrow(dim, start, min(chunk, whole.shape[dim] - start)).contiguous()


def parts_of(mesh: Mesh, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of an input and an output gradient."""
    if not mesh.style:
        return x, grad
    outside, inside = (1, 2) if mesh.style == "column" else (2, 1)
    return mine(x, outside, mesh), mine(grad, inside, mesh)


def step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[Product]:
    with float8_gemms() as calls:
        model(x.detach().requires_grad_()).backward(grad)
    return [*calls]


def wrong_operands(
    mesh: Mesh, recipe: str, shape: tuple[int, int], precompute: tuple[bool, bool]
) -> list[str]:
    """Of the three GEMMs those operands that are not this rank's parts of one device's.

    In two steps, the second one with other weights; ``precompute``: before each of them.
    """
    at, tp = stage_mesh(mesh.axes)["tp"], mesh.axes[3]
    model, twin = on_mesh(mesh, shape, config_of(recipe)), linear(shape, config_of(recipe))
    x, grad = data_of(mesh, shape)
    x_part, grad_part = parts_of(mesh, x, grad)
    wrong = []
    for is_precomputed in precompute:
        if is_precomputed:
            precompute_float8_dynamic_scale(model)
        whole = step(twin, x, grad)
        found = step(model, x_part, grad_part)
        assert len(found) == len(whole) == 3
        for name, pair, expected, dims in zip(
            ("output", "grad_input", "grad_weight"), found, whole, SPLIT[mesh.style], strict=True
        ):
            for side, *arguments in zip(("left", "right"), pair, expected, dims, strict=True):
                if not is_part(*arguments, tp, at.get_local_rank()):  # type: ignore[arg-type]
                    wrong.append(f"{recipe} {shape} {precompute}: {name}, {side}")
        with torch.no_grad():
            for each in (*model.parameters(), *twin.parameters()):
                each.mul_(1.7)
    return wrong


def all_wrong_operands(mesh: Mesh) -> list[str]:
    # Uneven shards on dim 1 are none of FSDP2's.
    shapes = [shape for shape in SHAPES if mesh.dim == 0 or shape[1] % 2 == 0]
    return [
        each
        for recipe, shape, precompute in product(RECIPES, shapes, ((False, False), (True, True)))
        for each in wrong_operands(mesh, recipe, shape, precompute)
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_operands_are_one_devices(ranks: RankPools, mesh: str) -> None:
    at = MESHES[mesh]
    assert ranks(at.ranks).run(all_wrong_operands, at) == [[]] * at.ranks


def amax_reductions(audit: CommAudit) -> str:
    """All-reduces of exponents: bytes, where gradients are fp32."""
    rows = [row for row in audit.rows if row.op == "all_reduce" and row.dtype != torch.float32]
    assert all(row.dtype is torch.uint8 for row in rows)
    shown = [f"{row.count} of {row.bytes} B over {row.axis}" for row in rows]
    return " + ".join(shown) or "-"


def gathered(audit: CommAudit) -> str:
    rows = [row for row in audit.rows if row.op == "all_gather"]
    return " + ".join(f"{row.bytes} B {row.dtype}".replace("torch.", "") for row in rows) or "-"


def collectives(mesh: Mesh, recipe: str, shape: tuple[int, int]) -> str:
    """Of a step alone; of precompute, and of a step after it."""
    at = stage_mesh(mesh.axes)
    model, arguments = (
        on_mesh(mesh, shape, config_of(recipe)),
        parts_of(mesh, *data_of(mesh, shape)),
    )
    with comm_audit(at) as alone:
        step(model, *arguments)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2)
    with comm_audit(at) as precompute:
        precompute_float8_dynamic_scale(model)
    with comm_audit(at) as after:
        step(model, *arguments)
    phases = [amax_reductions(audit) for audit in (alone, precompute, after)]
    return f"{shape[0]} x {shape[1]}: {'; '.join(phases)}; gathers {gathered(after)}"


def all_collectives(mesh: Mesh) -> list[str]:
    return [
        f"{recipe} {collectives(mesh, recipe, shape)}"
        for recipe, shape in product(RECIPES, ((384, 512), (300, 260)))
    ]


def test_collectives(ranks: RankPools) -> None:
    """All-reduces of exponents in a step; in precompute; in a step after it; what is gathered."""
    lines = []
    for name, mesh in MESHES.items():
        if name not in ("FSDP2 x4", "FSDP2 x2, Shard(1)", "TP x4, column"):
            lines += [name, *ranks(mesh.ranks).run_same(all_collectives, mesh)]
    assert_expected_inline(
        "\n".join(lines),
        """\
FSDP2 x2
blockwise 384 x 512: 1 of 12 B over shard; 1 of 12 B over shard; -; gathers 196608 B float8_e4m3fn
blockwise 300 x 260: 1 of 9 B over shard; 1 of 9 B over shard; -; gathers 78000 B float8_e4m3fn
mxfp8 384 x 512: -; -; -; gathers 196608 B float8_e4m3fn + 192 B uint8
mxfp8 300 x 260: 1 of 90 B over shard; 1 of 90 B over shard; -; gathers 78000 B float8_e4m3fn
FSDP2 x3
blockwise 384 x 512: -; -; -; gathers 196608 B float8_e4m3fn + 12 B uint8
blockwise 300 x 260: 1 of 9 B over shard; 1 of 9 B over shard; -; gathers 78000 B float8_e4m3fn
mxfp8 384 x 512: -; -; -; gathers 196608 B float8_e4m3fn + 192 B uint8
mxfp8 300 x 260: 1 of 90 B over shard; 1 of 90 B over shard; -; gathers 78000 B float8_e4m3fn
HSDP 2x2
blockwise 384 x 512: 1 of 12 B over shard; 1 of 12 B over shard; -; gathers 196608 B float8_e4m3fn
blockwise 300 x 260: 1 of 9 B over shard; 1 of 9 B over shard; -; gathers 78000 B float8_e4m3fn
mxfp8 384 x 512: -; -; -; gathers 196608 B float8_e4m3fn + 192 B uint8
mxfp8 300 x 260: 1 of 90 B over shard; 1 of 90 B over shard; -; gathers 78000 B float8_e4m3fn
TP x2, column
blockwise 384 x 512: 2 of 102 B over tp; 1 of 12 B over tp; 1 of 90 B over tp; gathers 46080 B float8_e4m3fn + 360 B uint8
blockwise 300 x 260: 2 of 99 B over tp; 1 of 9 B over tp; 1 of 90 B over tp; gathers 23400 B float8_e4m3fn + 270 B uint8
mxfp8 384 x 512: -; -; -; gathers 46080 B float8_e4m3fn + 1440 B uint8
mxfp8 300 x 260: 2 of 180 B over tp; 1 of 90 B over tp; 1 of 90 B over tp; gathers 23400 B float8_e4m3fn + 810 B uint8
TP x2, row
blockwise 384 x 512: -; -; -; gathers 34560 B float8_e4m3fn + 270 B uint8
blockwise 300 x 260: 2 of 99 B over tp; 1 of 9 B over tp; 1 of 90 B over tp; gathers 27000 B float8_e4m3fn + 270 B uint8
mxfp8 384 x 512: -; -; -; gathers 34560 B float8_e4m3fn + 1080 B uint8
mxfp8 300 x 260: 2 of 180 B over tp; 1 of 90 B over tp; 1 of 90 B over tp; gathers 27000 B float8_e4m3fn + 900 B uint8
TP x3, column
blockwise 384 x 512: -; -; -; gathers 69120 B float8_e4m3fn + 540 B uint8
blockwise 300 x 260: 2 of 279 B over tp; 1 of 9 B over tp; 1 of 270 B over tp; gathers 35100 B float8_e4m3fn + 405 B uint8
mxfp8 384 x 512: -; -; -; gathers 69120 B float8_e4m3fn + 2160 B uint8
mxfp8 300 x 260: 2 of 360 B over tp; 1 of 90 B over tp; 1 of 270 B over tp; gathers 35100 B float8_e4m3fn + 1215 B uint8
TP x3, row
blockwise 384 x 512: 2 of 282 B over tp; 1 of 12 B over tp; 1 of 270 B over tp; gathers 51840 B float8_e4m3fn + 405 B uint8
blockwise 300 x 260: 2 of 279 B over tp; 1 of 9 B over tp; 1 of 270 B over tp; gathers 40500 B float8_e4m3fn + 405 B uint8
mxfp8 384 x 512: 2 of 462 B over tp; 1 of 192 B over tp; 1 of 270 B over tp; gathers 51840 B float8_e4m3fn + 1620 B uint8
mxfp8 300 x 260: 2 of 360 B over tp; 1 of 90 B over tp; 1 of 270 B over tp; gathers 40500 B float8_e4m3fn + 1350 B uint8
TP x4, row
blockwise 384 x 512: -; -; -; gathers 69120 B float8_e4m3fn + 540 B uint8
blockwise 300 x 260: 2 of 369 B over tp; 1 of 9 B over tp; 1 of 360 B over tp; gathers 54000 B float8_e4m3fn + 540 B uint8
mxfp8 384 x 512: -; -; -; gathers 69120 B float8_e4m3fn + 2160 B uint8
mxfp8 300 x 260: 2 of 630 B over tp; 1 of 90 B over tp; 1 of 540 B over tp; gathers 54000 B float8_e4m3fn + 1800 B uint8
FSDP2 2 x TP 2, column
blockwise 384 x 512: 1 of 12 B over world + 1 of 90 B over tp; 1 of 12 B over world; 1 of 90 B over tp; gathers 98304 B float8_e4m3fn + 46080 B float8_e4m3fn + 360 B uint8
blockwise 300 x 260: 1 of 9 B over world + 1 of 90 B over tp; 1 of 9 B over world; 1 of 90 B over tp; gathers 39000 B float8_e4m3fn + 23400 B float8_e4m3fn + 270 B uint8
mxfp8 384 x 512: -; -; -; gathers 98304 B float8_e4m3fn + 96 B uint8 + 46080 B float8_e4m3fn + 1440 B uint8
mxfp8 300 x 260: 1 of 90 B over world + 1 of 90 B over tp; 1 of 90 B over world; 1 of 90 B over tp; gathers 39000 B float8_e4m3fn + 23400 B float8_e4m3fn + 810 B uint8
FSDP2 2 x TP 2, row
blockwise 384 x 512: 1 of 12 B over world; 1 of 12 B over world; -; gathers 98304 B float8_e4m3fn + 34560 B float8_e4m3fn + 270 B uint8
blockwise 300 x 260: 1 of 9 B over world + 1 of 90 B over tp; 1 of 9 B over world; 1 of 90 B over tp; gathers 39000 B float8_e4m3fn + 27000 B float8_e4m3fn + 270 B uint8
mxfp8 384 x 512: -; -; -; gathers 98304 B float8_e4m3fn + 96 B uint8 + 34560 B float8_e4m3fn + 1080 B uint8
mxfp8 300 x 260: 1 of 90 B over world + 1 of 90 B over tp; 1 of 90 B over world; 1 of 90 B over tp; gathers 39000 B float8_e4m3fn + 27000 B float8_e4m3fn + 900 B uint8""",
    )


# A weight that is replicated, and an input whose tokens are shared out


def wrong_of_tokens(recipe: str, dim: int) -> list[str]:
    """Of the three GEMMs those operands that are not one device's, of this rank's tokens."""
    tp = stage_mesh((1, 1, 1, 2))["tp"]
    shape, batch = (300, 260), (3, 45)
    model, twin = (linear(shape, config_of(recipe)) for _ in range(2))
    weight = distribute_tensor(model[0].weight.detach(), tp, [Replicate()])
    model[0].weight = nn.Parameter(weight)
    x, grad = torch.randn(*batch, shape[1]), torch.randn(*batch, shape[0])
    whole = step(twin, x, grad)
    parts = [distribute_tensor(t, tp, [Shard(dim)]) for t in (x, grad)]
    with comm_audit(tp) as audit:
        found = step(model, *parts)
    assert audit.count("all_reduce", dtype=torch.uint8) == 2  # of the operands of grad_weight
    tokens = torch.arange(batch[0] * batch[1]).view(batch)
    tokens = distribute_tensor(tokens, tp, [Shard(dim)]).to_local().flatten()
    wrong = []
    of_tokens = {"output": (0, None), "grad_input": (0, None), "grad_weight": (1, 0)}
    for pair, expected, (name, dims) in zip(found, whole, of_tokens.items(), strict=True):
        for side, mine, theirs, at in zip("ab", pair, expected, dims, strict=True):
            data, scales = theirs.qdata.view(torch.uint8), scale_of_elements(theirs)
            if at is not None:
                data, scales = data.index_select(at, tokens), scales.index_select(at, tokens)
            same = torch.equal(mine.qdata.view(torch.uint8), data)
            if not (same and torch.equal(scale_of_elements(mine), scales)):
                wrong.append(f"{name}, {side}")
    return wrong


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_tokens_that_ranks_share(ranks: RankPools, recipe: str, dim: int) -> None:
    """By batch and by sequence, both unevenly: a block of tokens has rows on both ranks."""
    assert ranks(2).run(wrong_of_tokens, recipe, dim) == [[]] * 2
