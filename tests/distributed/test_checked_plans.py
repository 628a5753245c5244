"""check_tp_plan names what a plan computes wrongly, and apply_tp_plan what looks fused."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_tests import on_ranks
from ranks import device_mesh
from reference import all_warnings, raised, same_bits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    freeze_to_float8,
    skip_head,
)
from fp8_dist.linear import Float8Linear
from fp8_dist.tensor_parallel import (
    Float8RowwiseParallel,
    apply_tp_plan,
    check_tp_plan,
    llama_tp_plan,
)
from fp8_dist.tensor_parallel.plans import colwise_style, prepare_style
from fp8_dist.text import without_wrappers
from scripts.common.llama import Llama, LlamaConfig

DIM, HEAD_DIM, VOCABULARY = 64, 8, 64
Plan = dict[str, ParallelStyle]


class Attention(nn.Module):
    """Causal attention with one projection, whose rows are all of q, then k, then v; or by head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.n_head, self.by_head = DIM // HEAD_DIM, by_head
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_head:
            parts = self.qkv(x).unflatten(-1, (-1, 3, HEAD_DIM)).unbind(-2)
        else:
            parts = [y.unflatten(-1, (-1, HEAD_DIM)) for y in self.qkv(x).chunk(3, -1)]
        q, k, v = (y.transpose(1, 2) for y in parts)
        q = self.q_norm(q)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.drop = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Dropout(0.5)
        self.attn, self.mlp = Attention(by_head), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class GPT(nn.Module):
    """A model like nanoGPT, which returns logits, and with targets also the loss."""

    def __init__(self, by_head: bool = True, layers: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wte = nn.Embedding(VOCABULARY, DIM)
            self.h = nn.ModuleList(Block(by_head) for _ in range(layers))
            self.ln_f, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def gpt(recipe: str | None = None, **arguments: Any) -> GPT:
    model = GPT(**arguments)
    if recipe is not None:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
    return model


def rowwise(layer: nn.Module, **layouts: Any) -> ParallelStyle:
    style = Float8RowwiseParallel if isinstance(layer, Float8Linear) else RowwiseParallel
    return style(**layouts)


def gpt_plan(model: GPT, sequence_parallel: bool) -> Plan:
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: Plan = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
    for i, block in enumerate(model.h):
        for name, reader in (("attn", "qkv"), ("mlp", "fc")):
            module = block.get_submodule(name)
            layer = module.get_submodule(reader)
            plan[f"h.{i}.{name}"] = prepare_style({reader: layer}, stream)
            plan[f"h.{i}.{name}.{reader}"] = colwise_style(layer)
            plan[f"h.{i}.{name}.proj"] = rowwise(module.proj, output_layouts=stream)
        if sequence_parallel:
            plan |= {f"h.{i}.ln_1": SequenceParallel(), f"h.{i}.ln_2": SequenceParallel()}
    if sequence_parallel:
        plan["ln_f"] = SequenceParallel()
    plan["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    return plan


def tokens(length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def check(model: nn.Module, plan: Plan, batch: Any = None, **options: Any) -> None:
    mesh = device_mesh(tp=dist.get_world_size())
    check_tp_plan(model, mesh, plan, tokens() if batch is None else batch, **options)


def refused(model: nn.Module, plan: Plan, batch: Any = None, **options: Any) -> str:
    return raised(ValueError, lambda: check(model, plan, batch, **options))


RECIPES = {2: (None, "tensorwise", "rowwise", "blockwise"), 4: ("rowwise_folded", "delayed")}


@pytest.mark.parametrize("tp", RECIPES)
@on_ranks("tp")
def test_right_plans_pass_and_chunks_of_a_sharded_qkv_are_found(tp: int) -> None:
    for number, recipe in enumerate(RECIPES[tp]):
        sequence_parallel = number % 2 == 0
        model = gpt(recipe, layers=1)
        check(model, gpt_plan(model, sequence_parallel))
        model.h[0].attn.by_head = False
        text = refused(model, gpt_plan(model, sequence_parallel))
        assert "the output of 'h.0.attn.proj' is the first that differs from one" in text
        assert "Before it, that of 'h.0.attn.qkv' agrees" in text


@on_ranks(2)
def test_right_plans_in_low_precision_pass() -> None:
    for recipe in (None, "tensorwise", "rowwise_folded"):
        model = gpt(recipe).bfloat16()
        check(model, gpt_plan(model, True))
        with torch.autocast("cpu", torch.bfloat16):
            model = gpt(recipe)
            check(model, gpt_plan(model, True))
    # Rounding errors of the later residual blocks hide the mistake in the first one.
    wrong = gpt("tensorwise", by_head=False, layers=8).bfloat16()
    assert "'h.0.attn.proj' is the first that differs" in refused(wrong, gpt_plan(wrong, True))


class Doubled(ParallelStyle):
    """A style whose backward counts a gradient twice."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight.register_hook(lambda grad: 2 * grad)
        return module


class Failing(ParallelStyle):
    """A style whose backward fails."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight.register_hook(lambda grad: grad.view(-1, 7))
        return module


def without(plan: Plan, *names: str) -> Plan:
    return {name: style for name, style in plan.items() if name not in names}


@on_ranks(2)
def test_wrong_plans_are_named() -> None:
    for recipe in (None, "tensorwise"):
        model = gpt(recipe)
        row, sequences = partial(rowwise, model.h[0].mlp.proj), gpt_plan(model, True)
        plan = gpt_plan(model, False)
        found = [
            # A row-parallel layer for a column-parallel one, which takes x for a part of x.
            refused(model, without(plan, "h.1.mlp") | {"h.1.mlp.fc": row()}),
            # A sum that nobody makes.
            refused(model, plan | {"h.1.attn.proj": row(output_layouts=Partial())}),
            # Gradients of parts of the sequence that nobody sums.
            refused(model, without(sequences, "h.0.ln_2")),
            refused(model, plan | {"h.0.ln_2": Doubled()}),
            refused(model, plan | {"h.1.ln_1": Failing()}),
        ]
        shown = (
            "this rank's input has 64 features, but" if recipe else "of 'h.1.mlp.fc' fails: ",
            "check_tp_plan: the output of 'h.1.ln_2' is the first that differs from one ",
            "under the plan, the gradient of 'h.0.ln_2.weight' differs from that on one device by",
            "under the plan, the gradient of 'h.0.ln_2.weight' differs from that on one device by",
            "check_tp_plan: under the plan, the gradient of 'h.1.ln_1.weight' fails: ",
        )
        for text, part in zip(found, shown, strict=True):
            assert part in text, text
        assert "that of 'h.1.drop', summed over ranks, agrees" in found[1]


@on_ranks(2)
def test_parameters_of_few_elements_that_ranks_read_for_their_heads() -> None:
    """Each rank has the gradient of its own heads, which would be summed."""
    for recipe in (None, "tensorwise", "rowwise_folded"):
        model = gpt(recipe)
        for block in model.h:
            block.attn.q_norm = nn.RMSNorm(HEAD_DIM)
        for sequence_parallel in (False, True):
            text = refused(model, gpt_plan(model, sequence_parallel))
            assert "the gradient of 'h.0.attn.q_norm.weight' differs between the ranks" in text
            assert "so its copies would train apart" in text


@on_ranks(2)
def test_zeros_hide_nothing() -> None:
    """Branches, heads and biases that begin with zeros multiply, or add to, other values later."""

    def zeroed(by_head: bool = True) -> GPT:
        model = gpt("tensorwise", by_head=by_head)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "proj" in name or "head" in name or "bias" in name:
                    parameter.zero_()
        return model

    model = zeroed()
    plan = gpt_plan(model, sequence_parallel=True)
    check(model, plan)
    assert not model.h[0].mlp.proj.weight.any()
    text = refused(model, without(plan, "h.1.ln_2"))
    assert "the gradient of 'h.1.ln_2." in text
    assert "Does it need a style that sums its gradient, such as SequenceParallel?" in text
    partial_sums = Float8RowwiseParallel(output_layouts=Partial())
    plan = gpt_plan(model, sequence_parallel=False)
    assert "the output of 'h.0' is" in refused(model, plan | {"h.0.mlp.proj": partial_sums})
    assert "the output of 'h.0.attn.proj'" in refused(zeroed(by_head=False), plan)


@on_ranks(2)
def test_the_model_and_the_random_numbers_are_as_before() -> None:
    model = gpt("delayed")
    before, hooks = (
        copy.deepcopy(model.state_dict()),
        [len(m._forward_hooks) for m in model.modules()],
    )
    random = torch.get_rng_state()
    with torch.no_grad():
        check(model, gpt_plan(model, True))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def logits_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens().flatten())


def loss_in_parallel(logits: torch.Tensor) -> torch.Tensor:
    with loss_parallel():  # without the backward
        return logits_loss(logits)


@on_ranks(2)
def test_batches_losses_and_frozen_weights() -> None:
    model = gpt()
    plan = gpt_plan(model, True)
    named = {"tokens": tokens(), "targets": tokens()}
    for batch in ((tokens(),), [*named.values()], named):
        check(model, plan, batch)
    check(model, plan, loss=logits_loss)
    # Logits of which every rank has a part, as a plain tensor.
    divided = plan | {"head": ColwiseParallel(input_layouts=Shard(1))}
    check(model, divided, output_layouts=Shard(-1))
    assert "the model returns this rank's part of what it returns" in refused(model, divided)
    sizes = {"n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "max_seq_len": 16}
    llama = Llama(LlamaConfig(dim=DIM, n_layers=1, vocab_size=VOCABULARY, **sizes))
    with loss_parallel():
        check(llama, llama_tp_plan(llama, loss_parallel=True), loss=logits_loss)
    text = refused(llama, llama_tp_plan(llama, loss_parallel=True), loss=loss_in_parallel)
    assert text.endswith("must run there, too: call check_tp_plan within loss_parallel()")
    convert_to_float8_training(llama)
    for length in (7, 1):  # uneven parts of the sequence, and a rank that has none
        check(llama, llama_tp_plan(llama), tokens(length))
    frozen = gpt(by_head=False).requires_grad_(False)
    assert "'h.0.attn.proj' is the first" in refused(frozen, gpt_plan(frozen, True))
    frozen, stored = gpt().requires_grad_(False), gpt("tensorwise")
    stored.h.requires_grad_(False)
    assert freeze_to_float8(stored)
    for model in (frozen, stored):
        check(model, gpt_plan(model, True))


@on_ranks(2)
def test_what_can_not_be_checked() -> None:
    rank = dist.get_rank()
    model = gpt()
    plan = gpt_plan(model, False)
    other = gpt()
    with torch.no_grad():
        other.h[1].mlp.fc.bias += rank
    text = refused(other, plan)
    assert "different ways: the values of 'h.1.mlp.fc.bias': " in text
    assert "Give the same weights to all ranks" in text
    text = refused(model, plan, tokens().roll(rank))
    assert " were given different batches: tensor 0: torch.int64 [2, 16] " in text
    assert "on one device, the forward of 'wte' fails: " in refused(
        model, plan, tokens() + VOCABULARY
    )
    assert "'wte.weight' is on the meta device" in refused(copy.deepcopy(model).to("meta"), plan)
    parallel = apply_tp_plan(gpt(), device_mesh(tp=2), plan)
    assert "'wte.weight' is sharded already" in refused(parallel, plan)
    with torch.no_grad():
        model.h[1].ln_2.weight[0] = torch.nan
    assert "'h.1.ln_2' is the first that differs" in (text := refused(model, plan))
    assert "in shape, or by NaN" in text


@on_ranks(2)
def test_scalar_losses_in_bf16_and_checkpointed_blocks() -> None:
    batch = (tokens(), tokens().roll(-1, 1))
    for seed in range(6):  # the rounding error of a single number may happen to be tiny
        torch.manual_seed(seed)
        model = gpt(("tensorwise", "rowwise_folded", "mxfp8")[seed % 3], layers=1).bfloat16()
        check(model, gpt_plan(model, False), batch)
    for block in model.h:
        block.__class__ = Checkpointed
    check(model, gpt_plan(model, True), batch)


@on_ranks(2)
def test_wrapped_blocks_and_layers_keep_their_names() -> None:
    for recipe in (None, "tensorwise"):
        model, wrong = gpt(recipe), gpt(recipe, by_head=False)
        plan = gpt_plan(model, True)
        for wrapped in (model, wrong):
            wrapped.h[0].mlp.fc = checkpoint_wrapper(wrapped.h[0].mlp.fc)
            for i, block in enumerate(wrapped.h):
                wrapped.h[i] = checkpoint_wrapper(block)
        check(model, plan)
        text = refused(wrong, plan)
        assert "the output of 'h.0.attn.proj' is the first that differs from one" in text
        assert "that of 'h.0.attn.qkv' agrees" in text
        text = refused(model, without(plan, "h.0.ln_2"))
        assert "the gradient of 'h.0.ln_2.weight' differs from that on one device" in text
        apply_tp_plan(model, device_mesh(tp=2), plan)
        placed = {
            without_wrappers(n) for n, p in model.named_parameters() if isinstance(p, DTensor)
        }
        assert placed >= {f"h.0.{name}.weight" for name in ("ln_1", "attn.qkv", "mlp.fc")}


def warned(mesh: DeviceMesh, layers: nn.Module, plan: Plan) -> list[str]:
    with all_warnings() as texts:
        apply_tp_plan(layers, mesh, plan)
    return [text for text in texts if "several projections" in text]


def block_of(*names: str) -> nn.Module:
    """A model with one block, of layers with these names."""
    block = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})
    return nn.ModuleDict({"block": block})


FUSED = [
    *("qkv", "Wqkv", "to_qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj"),
    *("kv", "to_kv", "kv_proj", "wkv", "gate_up_proj"),
]


def test_layers_that_look_fused_are_warned_of(fake_tp: DeviceMesh) -> None:
    for name in FUSED:
        model = block_of(name, "o")
        plan = {f"block.{name}": ColwiseParallel(), "block.o": RowwiseParallel()}
        (text,) = warned(fake_tp, model, plan)
        assert text.startswith(f"apply_tp_plan: block.{name}: column-parallel, and called like ")
    model = gpt("tensorwise", by_head=False)
    (text,) = warned(fake_tp, model, gpt_plan(model, True))
    assert "apply_tp_plan: h.*.attn.qkv (2): column-parallel" in text
    assert "unflatten(-1, (-1, 3, head_dim))" in text
    assert "check_tp_plan compares the model with one device" in text


def test_ordinary_layers_are_not_warned_of(fake_tp: DeviceMesh) -> None:
    # Llama's, DeepSeek's and GPT-2's.
    names = ("wq", "q_proj", "q_b_proj", "wk", "v_proj", "kv_b_proj", "w1", "c_fc", "gate_proj")
    plan = {f"block.{name}": ColwiseParallel() for name in names}
    assert warned(fake_tp, block_of(*names), plan) == []
    # An output that is gathered, and a layer that is not column-parallel.
    for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel()):
        assert warned(fake_tp, block_of("qkv"), {"block.qkv": style}) == []
    llama = Llama(LlamaConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=192))
    assert warned(fake_tp, llama, llama_tp_plan(llama)) == []


@on_ranks(2)
def test_a_model_that_passed_is_not_warned_of() -> None:
    mesh, right, wrong = device_mesh(tp=2), gpt(), gpt(by_head=False)
    check(right, gpt_plan(right, True))
    refused(wrong, gpt_plan(wrong, True))
    convert_to_float8_training(right, module_filter_fn=skip_head(right))
    assert warned(mesh, right, gpt_plan(right, True)) == []
    assert len(warned(mesh, wrong, gpt_plan(wrong, True))) == 1
    other = gpt(by_head=False)
    check(other, {"h.*.attn.qkv": ColwiseParallel(output_layouts=Replicate())})
    assert len(warned(mesh, other, gpt_plan(other, True))) == 1
