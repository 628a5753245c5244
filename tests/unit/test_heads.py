"""Heads are recognized by what they do, by their names, and by what the caller names."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference import all_warnings, raised
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8_dist import (
    Float8Linear,
    auto_filter,
    conversion_summary,
    convert_to_float8_training,
    convert_to_linear,
    float8_layers,
    skip_head,
)
from fp8_dist.moe import convert_experts_to_float8_training

VOCABULARY, DIM = 512, 64


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.qkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        # The order of the reference Llama: no later layer takes the outputs of the last one.
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.w3 = nn.Linear(dim, hidden)


def blocks(number: int = 2, dim: int = DIM, hidden: int = 4 * DIM) -> nn.ModuleList:
    return nn.ModuleList(Block(dim, hidden) for _ in range(number))


def embedding(rows: int = VOCABULARY, dim: int = DIM) -> nn.Embedding:
    return nn.Embedding(rows, dim)


def linear(out: int = VOCABULARY, in_: int = DIM) -> nn.Linear:
    return nn.Linear(in_, out, bias=False)


def model(**parts: nn.Module) -> nn.Module:
    """A model with these children, in this order."""
    return nn.ModuleDict(parts)


def tied(**parts: nn.Module) -> nn.Module:
    """A model whose part ``out`` has the weight of ``tok``."""
    parts["out"].weight = parts["tok"].weight
    return model(**parts)


class Table(nn.Module):
    """A model whose embedding is a parameter, or that shares a head's weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.token_embedding = nn.Parameter(torch.zeros(VOCABULARY, DIM))
        self.blocks, self.unembed = blocks(hidden=VOCABULARY), linear()
        if is_tied:
            self.unembed.weight = self.token_embedding


class OwnEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VOCABULARY, DIM))


NO_HEAD: set[str] = set()
# By case: the model, and its heads.
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    **{
        name: (
            lambda name=name: model(tok=embedding(), blocks=blocks(), **{name: linear()}),
            {name},
        )
        for name in ("unembed", "out", "proj_out", "to_logits", "fc_out", "decoder")
    },
    "before the blocks": (lambda: model(out=linear(), tok=embedding(), blocks=blocks()), {"out"}),
    "within a module": (
        lambda: model(
            tok=embedding(), blocks=blocks(), top=model(norm=nn.LayerNorm(64), fc=linear())
        ),
        {"top.fc"},
    ),
    "a sequence": (lambda: nn.Sequential(embedding(), Block(64, 128), nn.ReLU(), linear()), {"3"}),
    "sequences in a sequence": (
        lambda: nn.Sequential(nn.Sequential(embedding(), linear(64)), nn.Sequential(linear())),
        {"1.0"},
    ),
    "a model as wide as its vocabulary is large": (
        lambda: nn.Sequential(embedding(64), linear(64), nn.ReLU(), linear(64), linear(64)),
        {"4"},
    ),
    "the same, with blocks": (
        lambda: model(tok=embedding(64), blocks=blocks(), unembed=linear(64)),
        {"unembed"},
    ),
    "an MLP as wide as the vocabulary is large": (
        lambda: model(tok=embedding(256), block=Block(64, 256), unembed=linear(256)),
        {"unembed"},
    ),
    "an MLP as wide as there are positions": (
        lambda: model(
            tok=embedding(),
            pos=embedding(256),
            kinds=embedding(16),
            up=linear(256),
            down=linear(64, 256),
            unembed=linear(),
        ),
        {"unembed"},
    ),
    "the same, without a head": (
        lambda: model(tok=embedding(), pos=embedding(256), up=linear(256), down=linear(64, 256)),
        NO_HEAD,
    ),
    "blocks as wide as there are positions": (
        lambda: model(tok=embedding(), pos=embedding(192), more=embedding(256), blocks=blocks(1)),
        NO_HEAD,
    ),
    "blocks in a sequence": (
        lambda: model(tok=embedding(), pos=embedding(192), blocks=nn.Sequential(*blocks(2))),
        NO_HEAD,
    ),
    "more positions than tokens": (
        lambda: model(
            tok=embedding(256), pos=embedding(1024), blocks=blocks(), to_logits=linear(256)
        ),
        {"to_logits"},
    ),
    "several heads": (
        lambda: model(
            text=embedding(),
            sound=embedding(1024),
            blocks=blocks(),
            to_text=linear(),
            to_sound=linear(1024),
            value=linear(16),
        ),
        {"to_text", "to_sound"},
    ),
    "a list of heads": (
        lambda: model(tok=embedding(), blocks=blocks(), out=nn.ModuleList([linear(), linear()])),
        {"out.0", "out.1"},
    ),
    "an encoder and a decoder": (
        lambda: model(
            source=embedding(1024),
            target=embedding(),
            body=nn.Transformer(64, 4, 2, 2, 128),
            generator=linear(),
        ),
        {"generator"},
    ),
    "tied": (lambda: tied(tok=embedding(), blocks=blocks(), out=linear()), {"out"}),
    "tied, and as wide as the vocabulary": (
        lambda: tied(tok=embedding(64), out=linear(64), up=linear(64), down=linear(64)),
        {"out"},
    ),
    "known by its name, and as wide as the vocabulary": (
        lambda: model(tok=embedding(64), head=linear(64), up=linear(64), down=linear(64)),
        {"head"},
    ),
    "beside a head with a known name": (
        lambda: model(tok=embedding(64), up=linear(64), out=linear(64), classifier=linear(16)),
        {"out", "classifier"},
    ),
    "a table": (lambda: Table(False), {"unembed"}),
    "a tied table": (lambda: Table(True), {"unembed"}),
    "an embedding of one's own": (
        lambda: model(tok=OwnEmbedding(), up=linear(64), out=linear()),
        {"out"},
    ),
    "vision": (lambda: model(patches=nn.Conv2d(3, 64, 4), blocks=blocks(), fc=linear(16)), NO_HEAD),
    "an encoder": (lambda: model(tok=embedding(), blocks=blocks(), pooler=linear(64)), NO_HEAD),
    "padded rows": (lambda: model(tok=embedding(500), blocks=blocks(), out=linear()), NO_HEAD),
}


def left_out(net: nn.Module) -> set[str]:
    rows = conversion_summary(net).skipped
    return {row.name for row in rows if "it is the model's head" in row.reason}


@pytest.mark.parametrize("case", MODELS)
def test_heads_by_what_they_do(case: str) -> None:
    make, expected = MODELS[case]
    with torch.device("meta"):
        net = make()
    with all_warnings() as texts:
        by_size = auto_filter("tensorwise", model=net)
        admits = skip_head(net)
    convert_to_float8_training(net, module_filter_fn=admits)
    assert left_out(net) == expected
    assert [text.partition(": no layer of the ")[0] for text in texts] == (
        [] if expected else ["auto_filter", "skip_head"]
    )
    for fqn, module in net.named_modules():
        if isinstance(module, nn.Linear):
            reason = "" if by_size(module, fqn) else by_size.reasons[fqn]
            assert ("it is the model's head" in reason) == (fqn in expected), fqn


def test_the_summary_names_the_head_and_the_sign() -> None:
    cases = {
        "out: it is the model's head, with as many outputs as tok has rows": MODELS["out"],
        "unembed: it is the model's head, tied to token_embedding": MODELS["a tied table"],
        "head: it is the model's head, by its name": (
            MODELS["known by its name, and as wide as the vocabulary"]
        ),
    }
    for text, (make, _) in cases.items():
        net = make()
        convert_to_float8_training(net, module_filter_fn=skip_head(net))
        skipped = {row.name: row.reason for row in conversion_summary(net).skipped}
        name, _, reason = text.partition(": ")
        assert skipped[name] == f"skip_head: {reason}"


def test_a_model_without_a_head_is_warned_of_once() -> None:
    net = MODELS["vision"][0]()
    with all_warnings() as texts:
        convert_to_float8_training(net, module_filter_fn=skip_head(net))
    assert texts == [
        "skip_head: no layer of the ModuleDict was taken for its head: none has the name of a "
        "head, the weight of an embedding, or as many outputs as an embedding has rows (that no "
        "other layer takes as inputs). If a linear layer makes the logits, name it "
        "(skip_head(model, 'fc'), if it is the last one). If the model has no head, or takes the "
        "weight of an embedding itself, skip_head() does not look for one"
    ]
    with all_warnings() as texts:
        skip_head(blocks())
    assert "name it. If the model has no head" in texts[0]  # no layer within blocks is proposed
    with all_warnings() as texts:
        skip_head(net, "fc")
        skip_head(nn.ReLU())  # it has no layer
        skip_head()
        auto_filter("tensorwise", ["fc"], model=net)
    assert texts == []


def test_names_are_those_in_the_model() -> None:
    """A part that is converted alone has other names, by which ``output`` would be the head."""
    net = model(attention=model(output=linear(64)), output=linear())
    convert_to_float8_training(net.attention, module_filter_fn=skip_head(net))
    assert isinstance(net.attention.output, Float8Linear)


def named(net: nn.Module, *names: str) -> set[str]:
    """The layers that are left out because they are named."""
    convert_to_float8_training(net, module_filter_fn=skip_head(net, *names))
    return {row.name for row in conversion_summary(net).skipped if "skip_head: named" in row.reason}


def test_heads_that_are_named() -> None:
    def net() -> nn.Module:
        return model(blocks=blocks(), wo=linear(64), top=model(fc=linear(64), wo=linear(64)))

    assert named(net(), "top.fc") == {"top.fc"}
    assert named(net(), "fc", "blocks.0.w1") == {"top.fc", "blocks.0.w1"}
    assert named(net(), "top") == {"top.fc", "top.wo"}
    assert named(net(), "wo") == {"wo"}, "a full name is not taken for a part of others"
    assert named(net(), "w2") == {"blocks.0.w2", "blocks.1.w2"}
    assert named(nn.Sequential(checkpoint_wrapper(net())), "0.wo") == {"0.wo"}
    assert not skip_head(None, "fc")(linear(), "top.fc")
    plain = net()
    convert_to_float8_training(plain, module_filter_fn=skip_head(plain, "top.fc"))
    (row,) = conversion_summary(plain).skipped
    assert row.reason == "skip_head: named top.fc"


def test_names_that_match_nothing() -> None:
    net = model(tok=embedding(), norm=nn.LayerNorm(64), top=model(unembed=linear()))
    for name, near in (
        ("unembd", "did you mean 'unembed' or 'top.unembed'?"),
        ("Top.Unembed", "did you mean 'top.unembed' or 'unembed'?"),
        ("xyz", "of model.named_modules()"),
        ("norm", "of model.named_modules()"),
        ("", "of model.named_modules()"),
    ):
        text = raised(ValueError, partial(skip_head, net, "unembed", name))
        assert f"no linear layer or experts of the model have the name {name!r}. Take" in text
        assert text.endswith(near)
    wrong: Any = ["unembed"]
    text = raised(TypeError, lambda: skip_head(net, wrong))
    assert text == (
        "skip_head takes names of layers after the model, got ['unembed']; write "
        "skip_head(model, 'NAME', 'OTHER')"
    )
    assert "skip_head(model, 'NAME') to name" in raised(TypeError, partial(skip_head, "unembed"))


class Experts(nn.Module):
    float8_weight_names = ("up",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 32, 64))


def test_filters_see_names_without_the_parts_that_wrappers_add() -> None:
    net = model(tok=embedding(), blocks=blocks(), experts=checkpoint_wrapper(Experts()))
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    net.out = checkpoint_wrapper(linear())
    whole = model(_orig_mod=net)  # as torch.compile wraps a model
    seen = []

    def admits(module: nn.Module, fqn: str) -> bool:
        seen.append(fqn)
        return not fqn.startswith("blocks.0.")

    convert_to_float8_training(whole, module_filter_fn=admits)
    layers = [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "wo", "w1", "w2", "w3")]
    assert seen == [*layers, "out"]
    assert [layer.fqn for layer in float8_layers(whole).values()] == [*layers[5:], "out"]
    names = [row.name for row in conversion_summary(whole).rows]
    assert names == [*layers, "experts.up", "out"]
    convert_to_linear(whole)
    convert_to_float8_training(whole, module_filter_fn=skip_head(whole))
    assert left_out(whole) == {"out"}
    assert isinstance(net.blocks[0].w1, Float8Linear)
    convert_experts_to_float8_training(whole, module_filter_fn=admits)
    assert seen[-1] == "experts"
    assert conversion_summary(whole).converted[-1].name == "experts.up"
    assert not float8_layers(convert_to_linear(whole))
