"""The counts of `scripts.measure.memory`, and its tables and checks."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8_dist import float8_layers, invalidate_float8_scales, selective_checkpoint_policy
from scripts.common.candidates import TORCHAO, linear_of
from scripts.common.llama import Block, LlamaConfig, rope_tables
from scripts.common.markdown import table
from scripts.common.models import build
from scripts.common.ranks import run_on_ranks
from scripts.common.recipes import BF16, OURS
from scripts.common.report import Check, finish
from scripts.common.saved_bytes import OTHER, saved_bytes

NAMES = (BF16, *OURS, *TORCHAO)
# With these sizes activations and weights have different numbers of elements.
ROWS, FEATURES = 1024, 512
BATCH, SEQUENCE, RANKS = 2, 320, 2
CONFIG = LlamaConfig(256, 1, 8, 8, 768, vocab_size=1024, max_seq_len=SEQUENCE)
DEPTHS = (2, 4)  # blocks of two models; the difference is what a block keeps
MODES = ("plain", "selective", "full")
LIMIT = 0.55  # of the bytes of the bf16 input: half, and some for scales
HIGH_PRECISION_INPUT = "rowwise_with_gw_hp"  # its GEMM of grad_weight is in high precision
WEIGHT = "weight"
Held = Mapping[str, int]  # bytes by kind: OTHER (activations), WEIGHT


def kept_by(
    forward: Callable[[], torch.Tensor],
    model: nn.Module,
    kinds: Mapping[int, str],
    checkpoints: Sequence[Any] = (),
) -> Held:
    """Bytes that the second forward keeps for its backward, including its input if it is needed.

    Args:
        forward: makes an input, and returns an output.
        model: the model or layer that `forward` runs.
        kinds: the kinds of tensors, by their number of elements.
        checkpoints: a list to which each forward appends the cache of selective checkpointing.
    """
    forward().float().square().mean().backward()
    change_weights(model)
    there = (*model.parameters(), *model.buffers())

    def caches() -> list[torch.Tensor]:
        results = [getattr(leaf, "val", None) for leaf in tree_leaves(checkpoints[-1:])]
        return [t for t in results if isinstance(t, torch.Tensor)]

    kept = saved_bytes(forward, kinds, there, caches)
    return {kind: kept[kind] for kind in (OTHER, WEIGHT)}


def change_weights(model: nn.Module) -> None:
    """Drop gradients and cached statistics of weights, as after an optimizer step."""
    model.zero_grad()
    if float8_layers(model):
        invalidate_float8_scales(model)


def weight_sizes(module: nn.Module) -> set[int]:
    """The numbers of elements of the weights of linear layers."""
    return {m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)}


def held_by_layer(name: str) -> Held:
    """Bytes that a candidate's linear layer keeps."""
    layer = linear_of(name, nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16))
    x = torch.randn(ROWS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    return kept_by(lambda: layer(x * 1), layer, {layer.weight.numel(): WEIGHT})


def held_by_block(name: str, mode: str) -> Held:
    """Bytes that a candidate's block keeps; `mode` is one of `MODES`."""
    block = Block(CONFIG).bfloat16()
    tables = rope_tables(CONFIG)
    for buffer, rotation in zip(("cos", "sin"), tables, strict=True):
        block.register_buffer(buffer, rotation)  # so that they are not counted
    for parent in (block.attention, block.feed_forward):
        for child, linear in list(parent.named_children()):
            setattr(parent, child, linear_of(name, linear))
    x = torch.randn(BATCH, SEQUENCE, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
    checkpoints: list[Any] = []

    def contexts() -> tuple[Any, Any]:
        caching, cached = create_selective_checkpoint_contexts(selective_checkpoint_policy)
        checkpoints.append(caching.storage)
        return caching, cached

    options = {"context_fn": contexts} if mode == "selective" else {}

    def forward() -> torch.Tensor:
        if mode == "plain":
            return block(x * 1, *tables)
        return checkpoint(block, x * 1, *tables, use_reentrant=False, **options)

    kinds = dict.fromkeys(weight_sizes(block), WEIGHT)
    return kept_by(forward, block, kinds, checkpoints)


def held_by_models(names: Sequence[str]) -> dict[str, tuple[Held, Held]]:
    """Bytes that a rank keeps, by candidate, for models of both depths; called on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    tokens = torch.randint(CONFIG.vocab_size, (BATCH // mesh.size(), SEQUENCE))
    kinds = dict.fromkeys(weight_sizes(Block(CONFIG)), WEIGHT)

    def held(name: str, depth: int) -> Held:
        model = build(name, dataclasses.replace(CONFIG, n_layers=depth), mesh)
        return kept_by(partial(model, tokens), model, kinds)

    return {name: (held(name, DEPTHS[0]), held(name, DEPTHS[1])) for name in names}


def per_block(models: tuple[Held, Held]) -> int:
    """Bytes of activations that each block adds."""
    shallow, deep = models
    return (deep[OTHER] - shallow[OTHER]) // (DEPTHS[1] - DEPTHS[0])


def kept_table(head: Sequence[str], kept: Mapping[str, tuple[int, int]]) -> str:
    """A table with a line per candidate: bytes of activations, their ratio to bf16, and weights."""
    lines = [
        [name, f"{activations:,}", f"{activations / kept[BF16][0]:.3f}", f"{weights:,}"]
        for name, (activations, weights) in kept.items()
    ]
    return table(head, lines, "lr")


def block_table(kept: Mapping[str, Mapping[str, Held]]) -> str:
    """A table with a line per candidate, and columns per mode of checkpointing."""
    heads = [head for mode in MODES for head in (f"{mode}, B", "of bf16")]
    lines = []
    for name, by_mode in kept.items():
        cells = []
        for mode in MODES:
            held = by_mode[mode][OTHER]
            cells += [f"{held:,}", f"{held / kept[BF16][mode][OTHER]:.3f}"]
        lines.append([name, *cells, f"{by_mode['plain'][WEIGHT]:,}"])
    return table(["block", *heads, "copies of weights, B"], lines, "lr")


def checks(layers: Mapping[str, Held], models: Mapping[str, tuple[Held, Held]]) -> list[Check]:
    """The conditions of `--assert` on the library's recipes."""
    conditions = []
    for name in OURS:
        share = layers[name][OTHER] / layers[BF16][OTHER]
        if name != HIGH_PRECISION_INPUT:
            sentence = f"{name}: a layer keeps {share:.3f} of bf16, at most {LIMIT}"
            conditions.append(Check(sentence, share <= LIMIT))
        weights = models[name][1][WEIGHT]
        sentence = f"{name}: {weights:,} B of unsharded weights outlive their layer, at most 0"
        conditions.append(Check(sentence, weights == 0))
    return conditions


def run(args: argparse.Namespace) -> int:
    layers = {name: held_by_layer(name) for name in NAMES}
    blocks = {name: {mode: held_by_block(name, mode) for mode in MODES} for name in NAMES}
    models = run_on_ranks(RANKS, held_by_models, NAMES)[0]
    by_layer = {name: (held[OTHER], held[WEIGHT]) for name, held in layers.items()}
    by_block = {name: (per_block(held), held[1][WEIGHT]) for name, held in models.items()}
    layer_head = ["layer", "activations, B", "of bf16", "copies of the weight, B"]
    model_head = ["model", "each block, B", "of bf16", "unsharded weights, B"]
    tables = {"layer": kept_table(layer_head, by_layer), "block": block_table(blocks)}
    tables["model"] = kept_table(model_head, by_block)
    return finish(args, tables, checks(layers, models))
