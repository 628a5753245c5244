"""skip_head: heads, routers, adapters and misaligned layers stay in high precision."""

from collections import OrderedDict

import pytest
import torch
from reference import raised
from torch import nn

from fp8_dist import Float8Linear, auto_filter, convert_to_float8_training, skip_head


def skipped(model: nn.Module, with_model: bool) -> set[str]:
    """The names of the linear layers that are left unconverted."""
    convert_to_float8_training(model, module_filter_fn=skip_head(model if with_model else None))
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name for name, m in linear.items() if not isinstance(m, Float8Linear)}


def nested(*names: str) -> nn.Module:
    """A module with a linear layer at each of these names."""
    root = nn.Module()
    for name in names:
        parent = root
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.add_module(last, nn.Linear(16, 16))
    return root


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize(
    "head",
    [
        "lm_head",  # transformers' causal models
        "output",  # torchtitan, torchtune
        "lm_head.decoder",  # RoBERTa
        "1.lm_head",  # nn.Sequential(body, nn.ModuleDict({"lm_head": ...}))
        "_fsdp_wrapped_module._checkpoint_wrapped_module.output",
        "score",  # transformers' classifiers
        "classifier.out_proj",
        "qa_outputs",
        "embed_out",
        "cls.predictions.decoder",
        "base_model.model.score.modules_to_save.default",  # PEFT
        "layers.0.q_proj.lora_A.default",
    ],
)
def test_heads_by_their_names(head: str, with_model: bool) -> None:
    others = ["layers.0.attention.output", "layers.0.output.dense", "outputs", "attention.output"]
    others += ["layers.0.score", "layers.0.q_proj.base_layer", "encoder.classifier"]
    assert skipped(nested(head, *others), with_model) == {head}


class CausalLM(nn.Module):
    """A model like transformers' PreTrainedModel: ``get_output_embeddings`` returns the head."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.model = nn.Linear(16, 16)
        self.decoder = nn.Sequential(OrderedDict(dense=nn.Linear(16, 16), proj=nn.Linear(16, 16)))
        self.heads = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = head

    def get_output_embeddings(self) -> object:
        if self.head == "not implemented":
            raise NotImplementedError
        return {
            "decoder.proj": self.decoder.proj,
            "decoder": self.decoder,
            "heads": self.heads,
            "list": list(self.heads),
            "none": None,
        }[self.head]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("decoder.proj", {"decoder.proj"}),
        ("decoder", {"decoder.dense", "decoder.proj"}),
        ("heads", {"heads.0", "heads.1"}),
        ("list", {"heads.0", "heads.1"}),
        ("none", set()),
        ("not implemented", set()),
    ],
)
def test_heads_that_the_model_names(head: str, expected: set[str]) -> None:
    assert skipped(CausalLM(head), True) == expected
    assert skipped(nn.ModuleDict({"text": CausalLM(head)}), True) == {f"text.{x}" for x in expected}


def test_without_the_model_only_names_are_known() -> None:
    assert skipped(CausalLM("decoder.proj"), False) == set()


def test_sizes_that_a_gpu_refuses() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 16))
    assert skipped(model, True) == {"1", "2"}
    not_head = skip_head(model)
    assert not not_head(nn.Linear(40, 16), "gate")
    assert not_head.reasons["gate"] == "skip_head: in = 40 is not a multiple of 16"


def test_what_is_not_a_model_is_refused() -> None:
    text = raised(TypeError, lambda: skip_head(torch.ones(2)))  # type: ignore[arg-type]
    assert "module_filter_fn=skip_head(model)" in text


H, E = 64, 16


def many(number: int = E) -> nn.ModuleList:
    """MLPs with a gate, like experts."""
    expert_layers = {"gate": nn.Linear(H, 32), "down": nn.Linear(32, H)}
    return nn.ModuleList([nn.ModuleDict(expert_layers) for _ in range(number)])


class Bank(nn.Module):
    """Experts whose weights are parameters."""

    def __init__(self, **others: nn.Module) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(E, H, H))
        for name, module in others.items():
            self.add_module(name, module)


class Flat(nn.Module):
    """Experts whose weights are matrices, one row an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(E, H * H))


class Adapted(nn.Module):
    """A layer with an adapter, which has the sizes of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base_layer, self.lora_A = base, nn.Linear(base.in_features, 16)


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(H, E)


def linear(out: int = E) -> nn.Linear:
    return nn.Linear(H, out)


def mlp(last: int = E) -> nn.Sequential:
    return nn.Sequential(linear(H), nn.ReLU(), linear(last))


# Sibling modules, and the names of the layers that are routers.
MIXTURES: dict[str, tuple[dict[str, nn.Module], set[str]]] = {
    "gate": ({"gate": linear(), "experts": many()}, {"gate"}),
    "experts of other ranks": ({"gate": linear(2 * E), "experts": many(4)}, {"gate"}),
    "gate with layers": ({"gate": mlp(), "experts": many()}, {"gate.0", "gate.2"}),
    "the number of experts": ({"score": linear(), "experts": many()}, {"score"}),
    "3-D parameters": ({"ffn": Bank(wg=linear(), gate_proj=linear(H))}, {"ffn.wg"}),
    "beside the mixture": ({"gate": linear(), "moe": nn.ModuleDict({"experts": many()})}, {"gate"}),
    "class": ({"select": TopKRouter(), "experts": many()}, {"select.proj"}),
    "experts in a router": (
        {"router": nn.ModuleDict({"gate": linear(), "experts": many()})},
        {"router.gate"},
    ),
    "depths": ({"mod_router": linear(32), "block": mlp(H)}, {"mod_router"}),
    "adapted": (
        {"gate": nn.ModuleDict({"base_layer": linear()}), "experts": many()},
        {"gate.base_layer"},
    ),
    "gates that multiply": (
        {
            "gate": linear(H),
            "shared_expert": nn.ModuleDict({"gate": linear(32), "up": linear(32)}),
            "gate_proj": linear(32),
            "per_layer_input_gate": linear(32),
            "experts": many(),
        },
        set(),
    ),
    "DiT": ({"gate": linear(H), "layers": many(12)}, set()),
    "as many outputs as layers": ({"proj_out": linear(), "layers": many()}, {"proj_out"}),
    "a decoder beside as many layers": (
        {"head": nn.Sequential(mlp(H), linear(H), linear()), "experts": many()},
        set(),
    ),
    "attention": (
        {
            "attn": nn.ModuleDict({"qkv": nn.Linear(E, 96), "proj": nn.Linear(32, E)}),
            "experts": many(),
        },
        set(),
    ),
    "module without a name": (
        {"topk": nn.ModuleDict({"proj": linear(), "noise": linear()}), "experts": many()},
        {"topk.proj", "topk.noise"},
    ),
    "adapted layers": (
        {"select": nn.ModuleDict({"proj": Adapted(linear())}), "experts": many()},
        {"select.proj.base_layer", "select.proj.lora_A"},
    ),
    "experts above": ({"experts": many(), "top": nn.ModuleDict({"a": linear()})}, {"top.a"}),
    "2-D parameters": ({"scorer": linear(), "experts": Flat()}, {"scorer"}),
    "3-D parameters without a name": ({"ffn": Bank(scorer=linear(), up=linear(H))}, {"ffn.scorer"}),
    "convolution": ({"gate": linear(128), "conv": nn.Conv1d(H, 128, 3)}, set()),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_routers(case: str) -> None:
    parts, expected = MIXTURES[case]
    model = nn.ModuleDict({"mlp": nn.ModuleDict(parts), "pad": linear(H)})
    admits, by_size = skip_head(model), auto_filter("tensorwise", model=model)
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            is_router = fqn.removeprefix("mlp.") in expected
            for each in (admits, by_size):
                said = not each(module, fqn) and each.reasons[fqn].endswith(": it is a router")
                assert said == is_router, (fqn, each.reasons[fqn])


def test_routers_by_their_names_alone() -> None:
    for fqn, out, expected in [
        ("layers.0.mlp.router.classifier", 64, True),
        ("layers.0.router.experts.0.up", 64, False),
        ("layers.0.mlp.gate", 16, True),
        ("layers.0.mlp.gate.wg", 16, True),
        ("layers.0.mlp.gate", 32, False),  # may be that of a gated MLP
        ("layers.0.mlp.gate_proj", 16, False),
    ]:
        assert skip_head()(linear(out), fqn) != expected, fqn
