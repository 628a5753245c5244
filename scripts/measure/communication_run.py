"""Counts of `scripts.measure.communication`, and its tables and checks."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8_dist.debug import comm_audit
from fp8_dist.debug.audit import CommRow
from fp8_dist.fsdp import set_gradient_transport
from fp8_dist.fsdp.gradient_transport import Transport
from scripts.common import candidates
from scripts.common.llama import LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.ranks import run_on_ranks
from scripts.common.recipes import BF16
from scripts.common.report import Check, finish

LAYERS, SEQUENCE, BATCH = 4, 32, 2  # BATCH: sequences per data-parallel rank
SIZES = LlamaConfig(64, LAYERS, 4, 4, 128, vocab_size=256, max_seq_len=SEQUENCE)
OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")

# Of the bytes of bf16 gradients: half, plus exponents of blocks, and norms in high precision.
MOST_OF_GRADIENTS = 0.52

# (dp, tp) by the name of the mesh.
FSDP, TP, BOTH = "FSDP2 x2", "TP x2 + SP", "FSDP2 2 x TP 2 + SP"
MESHES = {FSDP: (2, 1), TP: (1, 2), BOTH: (2, 2)}


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A candidate (scripts/common/candidates.py), and how it communicates."""

    name: str
    candidate: str
    update: bool = True  # precompute, or the sync of delayed scales, follows the optimizer's step
    gradients: Transport | None = None  # the encoding of FSDP2's


PLAIN = Variant("bf16", BF16)
OURS = Variant("fp8_dist", "tensorwise", update=False)
OURS_PRECOMPUTED = Variant("fp8_dist + precompute", "tensorwise")
FLOAT8_GRADIENTS = Variant(
    "fp8_dist + precompute, float8 gradients", "tensorwise", gradients="float8"
)
FOLDED, BLOCKWISE, MXFP8, MXFP4 = (
    Variant(f"fp8_dist {recipe} + precompute", recipe)
    for recipe in ("rowwise_folded", "blockwise", "mxfp8", "mxfp8+mxfp4")
)
DELAYED = Variant("fp8_dist delayed + sync", "delayed")
ROWWISE = Variant("fp8_dist rowwise", "rowwise", update=False)
TORCHAO = Variant("torchao", "torchao tensorwise", update=False)
TORCHAO_PRECOMPUTED = Variant("torchao + precompute", "torchao tensorwise")
OF_TENSORWISE = (OURS, OURS_PRECOMPUTED, FLOAT8_GRADIENTS)
VARIANTS = (PLAIN, *OF_TENSORWISE, FOLDED, DELAYED, BLOCKWISE, MXFP8, MXFP4, ROWWISE)


class Row(NamedTuple):
    """Counts of one rank in one step; they are the same on all ranks."""

    mesh: str
    variant: str
    counts: dict[str, int]  # collectives by op, including precompute
    sizes: dict[str, int]  # bytes of their buffers by op, as in `comm_audit`
    float8_gathered: int  # the part of sizes["all_gather"] that is float8, or packed
    precompute: int  # collectives of precompute alone
    amax: int  # amax all-reduces


def variants(mesh: str) -> list[Variant]:
    """The variants that apply to a mesh."""
    found = list(VARIANTS)
    if mesh == TP:
        found = [variant for variant in found if not variant.gradients]
    if candidates.torchao is not None:
        # torchao's precompute covers only weights that FSDP2 shards.
        found += [TORCHAO] if mesh == TP else [TORCHAO, TORCHAO_PRECOMPUTED]
    return found


def rows_of(name: str, chosen: Sequence[Variant], mesh: DeviceMesh | None = None) -> list[Row]:
    """A row for each variant; called on every rank of a mesh."""
    if mesh is None:
        mesh = init_device_mesh("cpu", MESHES[name], mesh_dim_names=("dp", "tp"))
    return [measure(name, variant, mesh) for variant in chosen]


def measure(name: str, variant: Variant, mesh: DeviceMesh) -> Row:
    """Run two steps and count the communication of the second; called on every rank."""
    sharded = mesh["dp"].size() > 1
    model = build(variant.candidate, SIZES, mesh, reduce_dtype=torch.bfloat16)
    if sharded:
        model.set_reshard_after_forward(True)  # the root too: all parameters are gathered twice
    if variant.gradients is not None:
        set_gradient_transport(model, variant.gradients)
    update = after_step(variant.candidate, sharded) if variant.update else lambda model: None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (BATCH, SEQUENCE))
    for _ in range(2):
        step, after = comm_audit(mesh), comm_audit(mesh)
        with step:
            model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with after:
            update(model)
    both = [*step.rows, *after.rows]
    return Row(
        name,
        variant.name,
        counts={op: sum(row.count for row in both if row.op == op) for op in OPS},
        sizes={op: sum(row.bytes for row in both if row.op == op) for op in OPS},
        float8_gathered=sum(row.float8_bytes for row in step.rows if row.op == "all_gather"),
        precompute=after.count(),
        amax=sum(row.count for row in step.rows if _are_amaxes(row)),
    )


def _are_amaxes(row: CommRow) -> bool:
    """Whether a row reduces amaxes: as bits or exponents, or, in torchao, as single numbers."""
    bits = row.dtype in (torch.int32, torch.uint8)
    return row.op == "all_reduce" and (bits or row.elements == row.count)


def rows_table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    head = ["mesh", "variant", "all-gathers", "float8 in them", "reduce-scatters", "all-to-alls"]
    head.append("all-reduces")
    lines = []
    for row in rows:
        gathers, *others = (f"{row.counts[op]} ({row.sizes[op]:,} B)" for op in OPS)
        counted = [str(row.precompute), f"{row.amax / LAYERS:g}"]
        float8 = f"{row.float8_gathered:,} B"
        lines.append([row.mesh, row.variant, gathers, float8, *others, *counted])
    return table([*head, "precompute", "amax / layer"], lines)


def checks(rows: Sequence[Row]) -> list[Check]:
    """The conditions of `--assert`, about the library's rows."""
    found = []
    known = {(row.mesh, row.variant): row for row in rows}

    def add(row: Row, sentence: str, holds: bool) -> None:
        found.append(Check(f"{row.mesh}, {row.variant}: {sentence}", holds))

    for (mesh, name), peer in known.items():
        if name in (TORCHAO.name, TORCHAO_PRECOMPUTED.name):
            ours = known[mesh, OURS.name if name == TORCHAO.name else OURS_PRECOMPUTED.name]
            pairs = ((ours.counts, peer.counts), (ours.sizes, peer.sizes))
            more = [op for one, other in pairs for op in OPS if one[op] > other[op]]
            add(ours, f"no more collectives or bytes of any kind than {name}", not more)
    for mesh in MESHES:
        gathers = known[mesh, OURS.name].counts["all_gather"]
        for variant in (FOLDED, DELAYED, BLOCKWISE, MXFP8, MXFP4):
            ours = known[mesh, variant.name]
            same = ours.counts["all_gather"] == gathers
            add(ours, f"{gathers} all-gathers, as tensorwise", same)
    for variant in (FOLDED, MXFP8, MXFP4):
        ours = known[FSDP, variant.name]
        add(ours, "no all-reduce", ours.counts["all_reduce"] == 0)
    plain, ours = (known[FSDP, v.name] for v in (OURS_PRECOMPUTED, FLOAT8_GRADIENTS))
    add(plain, "one all-reduce", plain.counts["all_reduce"] == 1)
    share = ours.sizes["all_to_all"] / plain.sizes["reduce_scatter"]
    sentence = f"gradients take {share:.3f} of bf16's bytes, at most {MOST_OF_GRADIENTS}"
    add(ours, sentence, share <= MOST_OF_GRADIENTS and not ours.counts["reduce_scatter"])
    return found


def run(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    for name, (dp, tp) in MESHES.items():
        by_rank = run_on_ranks(dp * tp, rows_of, name, variants(name), threads=args.threads)
        assert all(theirs == by_rank[0] for theirs in by_rank), "ranks count differently"
        rows += by_rank[0]
    return finish(args, {"rows": rows_table(rows)}, checks(rows))
