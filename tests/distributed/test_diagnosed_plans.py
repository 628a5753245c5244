"""What ``check_tp_plan`` says of wrong entries: the layer, and the style that fits."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

from fp8_dist import convert_to_float8_training, skip_head
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
    check_tp_plan,
)

DIM, HEAD, WORDS = 64, 16, 96
WHOLE, LENGTH = Replicate(), Shard(1)
Plan = dict[str, Any]


class Attention(nn.Module):
    def __init__(self, heads: int = -1) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        projected = (layer(normed) for layer in (self.wq, self.wk, self.wv))
        q, k, v = (y.unflatten(-1, (self.heads, HEAD)).transpose(1, 2) for y in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.wo(y.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    """A feed-forward that adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    length: int


class Model(nn.Module):
    """A stack of attention and feed-forward; ``returns``: makes its output of logits and hidden."""

    def __init__(self, returns: Callable[..., Any] = lambda x, _: x, heads: int = -1) -> None:
        super().__init__()
        self.returns = returns
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(WORDS, DIM)
            self.blocks = nn.Sequential(Attention(heads), Gated(), Gated())
            self.norm, self.unembed = nn.RMSNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.blocks(self.embedding(tokens))
        return self.returns(self.unembed(self.norm(x)), x)


class Case(NamedTuple):
    """Styles of torch or of the library, with or without sequence parallelism."""

    is_float8: bool
    stream: Placement

    def column(self, **layouts: Placement) -> Any:
        style = Float8ColwiseParallel if self.is_float8 else ColwiseParallel
        return style(**{"input_layouts": self.stream} | layouts)

    def row(self, **layouts: Placement) -> Any:
        style = Float8RowwiseParallel if self.is_float8 else RowwiseParallel
        return style(**{"output_layouts": self.stream} | layouts)

    def model(self, *arguments: Any) -> Model:
        model = Model(*arguments)
        if self.is_float8:
            convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "unembed")
        return model

    def plan(self, **changes: Any) -> Plan:
        """The right plan, with entries that are replaced, or left out (None)."""
        plan: Plan = {"embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=self.stream)}
        for name in ("0.wq", "0.wk", "0.wv", "1.gate", "1.up", "2.gate", "2.up"):
            plan[f"blocks.{name}"] = self.column()
        for name in ("0.wo", "1.down", "2.down"):
            plan[f"blocks.{name}"] = self.row()
        if self.stream == LENGTH:
            norms = ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "norm")
            plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
        plan["unembed"] = ColwiseParallel(input_layouts=self.stream, output_layouts=WHOLE)
        plan |= {name.replace("_", "."): style for name, style in changes.items()}
        return {name: style for name, style in plan.items() if style is not None}

    def wrong(self) -> dict[str, Plan]:
        other: Placement = LENGTH if self.stream == WHOLE else WHOLE
        return {
            "a writer of columns": self.plan(blocks_1_down=self.column()),
            "a writer alone": self.plan(
                blocks_1_gate=None, blocks_1_up=None, blocks_1_down=self.column()
            ),
            "a writer without an entry": self.plan(blocks_1_down=None),
            "a reader of rows": self.plan(blocks_1_up=self.row(output_layouts=WHOLE)),
            "a reader that is gathered": self.plan(
                blocks_0_wq=self.row(input_layouts=self.stream, output_layouts=WHOLE)
            ),
            "a reader without an entry": self.plan(blocks_0_wv=None),
            "wo of columns": self.plan(blocks_0_wo=self.column(input_layouts=WHOLE)),
            "another input": self.plan(blocks_2_up=self.column(input_layouts=other)),
            "another output": self.plan(blocks_1_down=self.row(output_layouts=other)),
            "another start": self.plan(
                embedding=RowwiseParallel(input_layouts=WHOLE, output_layouts=other)
            ),
            "a sum that is missing": self.plan(blocks_1_down=self.row(output_layouts=Partial())),
            "two mistakes": self.plan(
                blocks_1_down=self.column(input_layouts=WHOLE),
                blocks_2_up=self.row(),
                unembed=ColwiseParallel(input_layouts=self.stream),
            ),
        }


def tokens() -> torch.Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(0))


def check(model: nn.Module, plan: Plan, **options: Any) -> None:
    check_tp_plan(model, device_mesh(tp=dist.get_world_size()), plan, tokens(), **options)


def refused(model: nn.Module, plan: Plan, **options: Any) -> str:
    return raised(ValueError, lambda: check(model, plan, **options))


def diagnoses(case: Case) -> dict[str, str]:
    """The last lines of the errors: what the shapes tell."""
    model = case.model()
    check(model, case.plan())
    found = {name: refused(model, plan) for name, plan in case.wrong().items()}
    found["fixed heads"] = refused(case.model(lambda x, _: x, DIM // HEAD), case.plan())
    return {name: text.splitlines()[-1] for name, text in found.items()}


def shown(found: dict[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in found.items())


def test_torchs_styles(ranks: RankPools) -> None:
    found = ranks(2).run_same(diagnoses, Case(False, WHOLE))
    assert_expected_inline(
        shown(found),
        """\
a writer of columns: 'blocks.1.down' (ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean RowwiseParallel?
a writer alone: The output of 'blocks.1.down' (ColwiseParallel) is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64], but the input of 'blocks.1' is whole, [2, 8, 64]. Did you mean RowwiseParallel?
a writer without an entry: 'blocks.1.down' (no entry) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean RowwiseParallel?
a reader of rows: 'blocks.1.up' (RowwiseParallel) reads its input as Shard(-1), but it is whole, [2, 8, 64]. Did you mean ColwiseParallel, or input_layouts=Replicate()?
a reader that is gathered: The output of 'blocks.0.wq' (RowwiseParallel) is whole, [2, 8, 64], but that of 'blocks.0.wk' (ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean ColwiseParallel?
a reader without an entry: The output of 'blocks.0.wv' (no entry) is whole, [2, 8, 64], but that of 'blocks.0.wq' (ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean ColwiseParallel?
wo of columns: 'blocks.0.wo' (ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean RowwiseParallel?
another input: 'blocks.2.up' (ColwiseParallel) reads its input as Shard(1), but it is whole, [2, 8, 64]. Did you mean input_layouts=Replicate(), or output_layouts=Shard(1) for 'blocks.1.down'?
another output: The output of 'blocks.1.down' (RowwiseParallel) is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64], but the input of 'blocks.1' is whole, [2, 8, 64]. Did you mean output_layouts=Replicate()?
another start: 'blocks.0.wq' (ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean input_layouts=Shard(1), or output_layouts=Replicate() for 'embedding'?
a sum that is missing: 'blocks.1.down' (RowwiseParallel) has output_layouts=Partial(), which leaves to the code behind it to sum its outputs over ranks. Did you mean output_layouts=Replicate()?
two mistakes: 'blocks.1.down' (ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean RowwiseParallel?
fixed heads: The output of 'blocks.0.wq' (ColwiseParallel) is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Does code behind it take that for all features? Attention has a part of the heads: unflatten(-1, (-1, head_dim)). To gather it, give the entry output_layouts=Replicate()""",
    )


def test_float8_styles_and_sequence_parallelism(ranks: RankPools) -> None:
    found = ranks(2).run_same(diagnoses, Case(True, LENGTH))
    assert_expected_inline(
        shown(found),
        """\
a writer of columns: 'blocks.1.down' (Float8ColwiseParallel) reads its input as Shard(1), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean Float8RowwiseParallel?
a writer alone: The output of 'blocks.1.down' (Float8ColwiseParallel) is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64], but the input of 'blocks.1' is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean Float8RowwiseParallel(output_layouts=Shard(1))?
a writer without an entry: 'blocks.1.down' (no entry) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean Float8RowwiseParallel?
a reader of rows: 'blocks.1.up' (Float8RowwiseParallel) reads its input as Shard(-1), but it is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean Float8ColwiseParallel(input_layouts=Shard(1))?
a reader that is gathered: The output of 'blocks.0.wq' (Float8RowwiseParallel) is whole, [2, 8, 64], but that of 'blocks.0.wk' (Float8ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean Float8ColwiseParallel(input_layouts=Shard(1))?
a reader without an entry: The output of 'blocks.0.wv' (no entry) is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64], but that of 'blocks.0.wq' (Float8ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean Float8ColwiseParallel(input_layouts=Shard(1))?
wo of columns: 'blocks.0.wo' (Float8ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean Float8RowwiseParallel?
another input: 'blocks.2.up' (Float8ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean input_layouts=Shard(1), or output_layouts=Replicate() for 'blocks.2.norm'?
another output: The output of 'blocks.1.down' (Float8RowwiseParallel) is whole, [2, 8, 64], but the input of 'blocks.1' is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean output_layouts=Shard(1)?
another start: 'blocks.0.norm' (SequenceParallel) reads its input as Shard(1), but it is whole, [2, 8, 64]. Did you mean output_layouts=Shard(1) for 'embedding'?
a sum that is missing: The output of 'blocks.1.down' (Float8RowwiseParallel) is whole, [2, 8, 64], but the input of 'blocks.1' is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean output_layouts=Shard(1)?
two mistakes: 'blocks.1.down' (Float8ColwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean Float8RowwiseParallel?
fixed heads: The output of 'blocks.0.wq' (Float8ColwiseParallel) is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Does code behind it take that for all features? Attention has a part of the heads: unflatten(-1, (-1, head_dim)). To gather it, give the entry output_layouts=Replicate()""",
    )


class Positioned(Model):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.positions = nn.Embedding(8, DIM)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(8))
        return self.unembed(self.norm(self.blocks(x)))


def embedded(layout: Placement) -> RowwiseParallel:
    return RowwiseParallel(input_layouts=WHOLE, output_layouts=layout)


def forgotten(case: Case) -> dict[str, str]:
    """The last lines of the errors, where norms return DTensors."""
    model = Positioned()
    if case.is_float8:
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "unembed")
    right = case.plan(positions=embedded(Shard(0)))
    norms = [name for name, style in right.items() if isinstance(style, SequenceParallel)]
    right |= {name: SequenceParallel() for name in norms}
    check(model, right)
    reader = ("blocks.0.wq", "blocks.0.wv", "blocks.1.up", "blocks.1.gate")
    left_out = {f"no {n}": {n: None} for n in (*reader, "unembed", "embedding", "positions")}
    whole = {f"whole {n}": {n: case.column(output_layouts=WHOLE)} for n in reader}
    changes: dict[str, Plan] = {
        **left_out,
        **whole,
        "whole embedding": {"embedding": embedded(WHOLE)},
        "positions by feature": {"positions": embedded(Shard(1))},
        "row of wholes": {"blocks.1.down": case.row(input_layouts=WHOLE)},
        "row of columns": {"blocks.1.down": case.row(output_layouts=Shard(-1))},
        "no readers": {"embedding": None} | dict.fromkeys(norms) | dict.fromkeys(reader),
    }
    others = ("blocks.0.wk", "blocks.2.up", "blocks.2.gate", "unembed")
    changes["no readers"] |= dict.fromkeys(others)
    found = {}
    for name, change in changes.items():
        plan = {n: style for n, style in (right | change).items() if style is not None}
        found[name] = refused(model, plan).splitlines()[-1]
    return found


@pytest.mark.parametrize("is_float8", [False, True])
def test_entries_that_are_missing_or_gather(ranks: RankPools, is_float8: bool) -> None:
    found = shown(ranks(2).run_same(forgotten, Case(is_float8, LENGTH)))
    assert ("Float8" in found) == is_float8
    assert_expected_inline(
        found.replace("Float8", ""),
        """\
no blocks.0.wq: The plan has no entry for 'blocks.0.wq', but one for 'blocks.0.wk' (ColwiseParallel) beside it. Did you mean ColwiseParallel(input_layouts=Shard(1))?
no blocks.0.wv: The plan has no entry for 'blocks.0.wv', but one for 'blocks.0.wq' (ColwiseParallel) beside it. Did you mean ColwiseParallel(input_layouts=Shard(1))?
no blocks.1.up: The plan has no entry for 'blocks.1.up', but one for 'blocks.1.gate' (ColwiseParallel) beside it. Did you mean ColwiseParallel(input_layouts=Shard(1))?
no blocks.1.gate: The plan has no entry for 'blocks.1.gate', but one for 'blocks.1.up' (ColwiseParallel) beside it. Did you mean ColwiseParallel(input_layouts=Shard(1))?
no unembed: The plan has no entry for 'unembed', but its input is a DTensor. Did you mean ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())?
no embedding: The output of 'embedding' (no entry) is whole, [2, 8, 64], but 'blocks.0.norm' (SequenceParallel) behind it reads a part of dim 1 of [2, 8, 64]. Did you mean RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))?
no positions: The output of 'positions' (no entry) is whole, [8, 64], but 'blocks.0.norm' (SequenceParallel) behind it reads a part of dim 1 of [2, 8, 64]. Did you mean RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))?
whole blocks.0.wq: The output of 'blocks.0.wq' (ColwiseParallel) is whole, [2, 8, 64], but that of 'blocks.0.wk' (ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean output_layouts=Shard(-1), the default?
whole blocks.0.wv: The output of 'blocks.0.wv' (ColwiseParallel) is whole, [2, 8, 64], but that of 'blocks.0.wq' (ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64]. Did you mean output_layouts=Shard(-1), the default?
whole blocks.1.up: The output of 'blocks.1.up' (ColwiseParallel) is whole, [2, 8, 128], but that of 'blocks.1.gate' (ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean output_layouts=Shard(-1), the default?
whole blocks.1.gate: The output of 'blocks.1.gate' (ColwiseParallel) is whole, [2, 8, 128], but that of 'blocks.1.up' (ColwiseParallel), which reads the same input, is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean output_layouts=Shard(-1), the default?
whole embedding: The output of 'embedding' (RowwiseParallel) is whole, [2, 8, 64], but 'blocks.0.norm' (SequenceParallel) behind it reads a part of dim 1 of [2, 8, 64]. Did you mean output_layouts=Shard(1)?
positions by feature: The output of 'positions' (RowwiseParallel) is this rank's part of dim 1, [8, 32] of [8, 64], but 'blocks.0.norm' (SequenceParallel) behind it reads a part of dim 1 of [2, 8, 64]. Did you mean output_layouts=Shard(0)?
row of wholes: 'blocks.1.down' (RowwiseParallel) reads its input as Replicate(), but it is this rank's part of dim 2, [2, 8, 64] of [2, 8, 128]. Did you mean input_layouts=Shard(-1)?
row of columns: The output of 'blocks.1.down' (RowwiseParallel) is this rank's part of dim 2, [2, 8, 32] of [2, 8, 64], but the input of 'blocks.1' is this rank's part of dim 1, [2, 4, 64] of [2, 8, 64]. Did you mean output_layouts=Shard(1)?
no readers: The outputs of embeddings are divided in different ways: that of 'embedding' (no entry) is whole, [2, 8, 64]; that of 'positions' (RowwiseParallel) is this rank's part of dim 0, [4, 64] of [8, 64]. If they are added, divide both along the same dim (output_layouts), or neither""",
    )


@on_ranks(2)
def test_where_a_forward_fails_the_layer_is_named() -> None:
    case = Case(True, WHOLE)
    found = refused(case.model(), case.wrong()["a writer alone"])
    assert found.startswith("check_tp_plan: under the plan, the forward of 'blocks.1' fails: Runti")
    assert "\nThe output of 'blocks.1.down' (Float8ColwiseParallel) is this rank's part" in found
    assert found.endswith("Did you mean Float8RowwiseParallel?")


@on_ranks(2)
def test_prepared_inputs() -> None:
    for recipe, prepare in ((None, PrepareModuleInput), ("tensorwise", PrepareFloat8ModuleInput)):
        case = Case(recipe is not None, LENGTH)
        inner = {name: case.column(input_layouts=WHOLE) for name in ("gate", "up")}

        def plan(
            layout: Placement, case: Case = case, inner: Plan = inner, prepare: Any = prepare
        ) -> Plan:
            entries = {f"mlp.{name}": style for name, style in inner.items()}
            entries |= {"mlp.down": case.row(), "embedding": case.plan()["embedding"]}
            prepared = prepare(input_layouts=layout, desired_input_layouts=WHOLE)
            head = ColwiseParallel(input_layouts=LENGTH, output_layouts=WHOLE)
            return entries | {"mlp": prepared, "unembed": head}

        model = Prepared()
        if recipe is not None:
            convert_to_float8_training(model, module_filter_fn=skip_head(model))
        check(model, plan(LENGTH))
        text = refused(model, plan(WHOLE))
        assert f"'mlp' ({prepare.__name__}) reads its input as Replicate(), but it is this" in text
        assert "Did you mean input_layouts=Shard(1), or output_layouts=Replicate() for 'emb" in text
        wrong = plan(LENGTH) | {"mlp.gate": case.row()}
        text = refused(model, wrong)
        assert "'mlp.gate' (" in text
        assert f"Did you mean {type(inner['gate']).__name__}" in text


class FeedForward(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Prepared(nn.Module):
    """A feed-forward whose input is gathered once, called by keyword or position."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.mlp = nn.Embedding(WORDS, DIM), FeedForward()
            self.mlp.norm.requires_grad_(False)  # not used
            self.unembed = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.unembed(x + self.mlp(x))


RETURNS: dict[str, Callable[..., Any]] = {
    "logits": lambda logits, x: logits,
    "a tuple": lambda logits, x: (x.detach(), logits),
    "a dict": lambda logits, x: {"logits": logits, "length": 8},
    "nested": lambda logits, x: [{"out": (logits, None)}],
    "a dataclass": lambda logits, x: Output(logits, (), 8),
}


@on_ranks(2)
def test_a_model_that_returns_a_part_is_refused() -> None:
    for case in (Case(False, WHOLE), Case(True, LENGTH)):
        half = case.plan(unembed=ColwiseParallel(input_layouts=case.stream))
        for name, returns in RETURNS.items():
            if case.is_float8 and name not in ("logits", "a dataclass"):
                continue
            model = case.model(returns)
            text = refused(model, half)
            assert text.startswith(
                "check_tp_plan: under the plan, the model returns this rank's part of what it "
                "returns on one device. The output of 'unembed' (ColwiseParallel) is this rank's "
                "part of dim 2, [2, 8, 48] of [2, 8, 96], a plain tensor that a loss takes for the "
                "whole. Give it output_layouts=Replicate(), or keep it a DTensor "
                "(output_layouts=Shard(-1), use_local_output=False), and use loss_parallel"
            ), text
    model, plan = case.model(), case.plan()
    assert "'unembed' (ColwiseParallel) is this rank's part of dim 1, [2, 4, 96] of" in refused(
        model, plan | {"unembed": ColwiseParallel(input_layouts=LENGTH, output_layouts=LENGTH)}
    )
    # A head that the plan forgets.
    assert "Give it ColwiseParallel(input_layouts=Shard(1), output_layouts=Repl" in refused(
        model, case.plan(unembed=None)
    )


@on_ranks(2)
def test_a_loss_of_a_part_is_refused() -> None:
    """One that the model computes, of logits that it takes for all; or that fails without them."""

    def loss(logits: torch.Tensor, modulus: int) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens().flatten() % modulus)

    head = "The output of 'unembed' (ColwiseParallel) is this rank's part of dim 2, [2, 8, 48] of "
    remedy = "for the whole. Give it output_layouts=Replicate(), or keep it a DTensor ("
    for case in (Case(False, WHOLE), Case(True, LENGTH)):
        half = case.plan(unembed=ColwiseParallel(input_layouts=case.stream))
        for frozen in ("no parameter", "unembed", ""):
            model = case.model(lambda logits, _: loss(logits, WORDS // 2))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
            check(model, case.plan())
            text = refused(model, half)
            assert "the output of the model is the first that differs from one" in text, text
            assert head in text
            assert remedy in text
        text = refused(case.model(lambda logits, _: loss(logits, WORDS)), half)
        assert "the forward of the model fails: IndexError: Target" in text
        assert head in text


@on_ranks(2)
def test_parts_that_are_declared_and_dtensors_pass() -> None:
    case = Case(False, LENGTH)
    model, plan = case.model(RETURNS["a dict"]), case.plan()
    for placement in (LENGTH, Shard(-1)):
        head = ColwiseParallel(input_layouts=LENGTH, output_layouts=placement)
        check(model, plan | {"unembed": head}, output_layouts=placement)
    other = refused(model, plan | {"unembed": head}, output_layouts=LENGTH)
    assert "the model returns this rank's part" in other
    check(model, plan, output_layouts=LENGTH)  # whole logits
    kept = ColwiseParallel(input_layouts=LENGTH, use_local_output=False)
    check(model, plan | {"unembed": kept})

    def loss(output: Any) -> torch.Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), tokens().flatten())

    with loss_parallel():
        check(model, plan | {"unembed": kept}, loss=loss)


def refused_scores() -> str:
    model = nn.Sequential(nn.Embedding(WORDS, DIM), nn.Linear(DIM, 1))
    return refused(model, {"1": ColwiseParallel()})


def test_ranks_whose_part_is_whole_raise_too(ranks: RankPools) -> None:
    """Of a single feature the first rank has all, the second nothing."""
    first, second = ranks(2).run(refused_scores)
    assert first.startswith("check_tp_plan: the output of the model is the first that differs")
    assert "'1' (ColwiseParallel) is this rank's part of dim 2, [2, 8, 0] of [2, 8, 1]" in second


@on_ranks(2)
def test_a_float8_layer_refuses_a_part_of_its_features() -> None:
    """A column-parallel layer behind another one, in training, without a check."""
    model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM))
    convert_to_float8_training(model)
    gathered = Float8ColwiseParallel(output_layouts=WHOLE)
    apply_tp_plan(model, device_mesh(tp=2), {"0": Float8ColwiseParallel(), "1": gathered})
    assert_expected_inline(
        raised(ValueError, lambda: model(torch.ones(2, DIM))),
        """\
1: the input has 64 features, but the layer takes 128; if they are this rank's part, from a column-parallel layer, give this one a row-parallel style (Float8RowwiseParallel)""",
    )


class Cross(nn.Module):
    """Attention of one stream to another."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        projected = self.to_q(x), self.to_k(memory), self.to_v(memory)
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in projected)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return x + self.out(y)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.encoder = nn.Embedding(WORDS, DIM), Gated()
        self.target, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(8, DIM)
        self.cross, self.decoder = Cross(), Gated()
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.source(tokens[:, :4]))
        x = self.target(tokens) + self.places(torch.arange(8))
        return self.head(self.decoder(self.cross(x, memory)))

    def plan(self, stream: Placement) -> Plan:
        column, row = Case(False, stream).column, Case(False, stream).row
        plan: Plan = {f"cross.to_{name}": column() for name in "qkv"} | {"cross.out": row()}
        for part in ("encoder", "decoder"):
            plan |= {f"{part}.{name}": column() for name in ("gate", "up")}
            plan |= {f"{part}.down": row()}
            if stream == LENGTH:
                plan[f"{part}.norm"] = SequenceParallel(use_local_output=True)
        if stream == LENGTH:
            plan |= {"source": embedded(LENGTH), "target": embedded(LENGTH)}
            plan |= {"places": embedded(Shard(0))}
        return plan | {"head": column(output_layouts=WHOLE)}


def of_cross_attention() -> dict[str, str]:
    """The last lines of the errors for plans without an entry."""
    found = {}
    for stream, names in ((WHOLE, ["cross.to_q"]), (LENGTH, ["cross.to_q", "places", "target"])):
        torch.manual_seed(0)
        model = EncoderDecoder()
        check(model, model.plan(stream))
        for name in names:
            plan = {n: style for n, style in model.plan(stream).items() if n != name}
            found[f"{stream}, no {name}"] = refused(model, plan).splitlines()[-1]
    return found


def test_an_encoder_and_a_decoder(ranks: RankPools) -> None:
    assert_expected_inline(
        shown(ranks(2).run_same(of_cross_attention)),
        """\
R, no cross.to_q: The plan has no entry for 'cross.to_q', but one for 'cross.to_k' (ColwiseParallel) beside it. Did you mean ColwiseParallel?
S(1), no cross.to_q: The plan has no entry for 'cross.to_q', but one for 'cross.to_k' (ColwiseParallel) beside it. Did you mean ColwiseParallel(input_layouts=Shard(1))?
S(1), no places: The output of 'places' (no entry) is whole, [8, 64], but 'cross.to_q' (ColwiseParallel) behind it reads a part of dim 1 of [2, 8, 64]. Did you mean RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))?
S(1), no target: The output of 'target' (no entry) is whole, [2, 8, 64], but 'cross.to_q' (ColwiseParallel) behind it reads a part of dim 1 of [2, 8, 64]. Did you mean RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))?""",
    )
