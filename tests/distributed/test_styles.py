"""The float8 styles: their arguments, their errors, local and DTensor outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import MLP, Distributed, Net, full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import raised, same_bits, sqnr
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    float8_layers,
)
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
    declare_placements,
)

OFF = CastConfig(ScalingType.DISABLED)


def declared(layer: nn.Linear, kind: str, input_at: Placement, output_at: Placement) -> None:
    """Give a layer plain local tensors with declared placements."""
    mesh = device_mesh(tp=2)
    weight_at = {"column": Shard(0), "row": Shard(1), "replicated": Replicate()}[kind]
    bias_at = weight_at if kind == "column" else Replicate()
    for parameter, at in ((layer.weight, weight_at), (layer.bias, bias_at)):
        if isinstance(at, Shard):
            parameter.data = parameter.data.chunk(2, at.dim)[mesh.get_local_rank()].clone()
    assert isinstance(layer, Float8Linear)
    declare_placements(layer, mesh, weight=weight_at, input=input_at, output=output_at)


def one_layer(
    kind: str, input_at: Any, output_at: Any, local: bool, prepared: bool, declare: bool
) -> dict[str, float]:
    """A single layer under one style, or declared, against one device; SQNR of every result in dB."""
    mesh = device_mesh(tp=2)
    torch.manual_seed(0)
    layer, twin = (nn.Sequential(nn.Linear(32, 48)) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    for model in (layer, twin):
        convert_to_float8_training(model)
    if declare:
        declared(layer[0], kind, input_at, output_at)
    else:
        style = Float8ColwiseParallel if kind == "column" else Float8RowwiseParallel
        arguments = {"input_layouts": input_at, "output_layouts": output_at}
        apply_tp_plan(layer, mesh, {"0": style(**arguments, use_local_output=local)})
    x, grad = torch.randn(2, 6, 32), torch.randn(2, 6, 48)
    mine = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [input_at]).to_local()
    mine = mine.detach().requires_grad_()
    given = DTensor.from_local(mine, mesh, [input_at]) if prepared else mine
    output = layer(given)
    assert isinstance(output, DTensor) is not local
    out_grad = DTensor.from_local(grad, mesh, [Replicate()]).redistribute(mesh, [output_at])
    output.backward(out_grad.to_local() if local else out_grad)
    x.requires_grad_()
    expected = twin(x)
    expected.backward(grad)

    def whole(tensor: torch.Tensor, at: Placement) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return full(DTensor.from_local(local.detach(), mesh, [at]))

    found = {
        "output": sqnr(expected, whole(output, output_at)),
        # The gradient of a replicated plain tensor is already summed over the ranks.
        "grad_input": sqnr(x.grad, whole(mine.grad, input_at)),
    }
    for (name, p), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) is not declare
        at = Shard(0) if kind == "column" else Replicate()
        if kind == "row" and name.endswith("weight"):
            at = Shard(1)
        assert declare or p.grad.placements == p.placements == (at,)
        found[name] = sqnr(other.grad, whole(p.grad, at))
    return found


@pytest.mark.parametrize(
    ("kind", "declare"),
    [("column", False), ("row", False), ("column", True), ("row", True), ("replicated", True)],
)
@on_ranks(2)
def test_any_layouts(kind: str, declare: bool) -> None:
    """The results of one layer, for every pair of layouts."""
    every = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for i, input_at in enumerate(every):
        for j, output_at in enumerate(every):
            local = declare or (i + j) % 2 == 0
            prepared = not declare and (i + j // 2) % 2 == 0
            results = one_layer(kind, input_at, output_at, local, prepared, declare)
            assert min(results.values()) > 120, (input_at, output_at, results)


@on_ranks(2)
def test_torchs_styles_accept_converted_layers() -> None:
    """Check the SQNR of every result of a converted MLP under torch's styles."""
    net, twin = (convert_to_float8_training(Net(layers=1)) for _ in range(2))
    mlp, x = net.layers[0], torch.randn(2, 8, 64, requires_grad=True)
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    parallelize_module(mlp, device_mesh(tp=2), plan)
    whole = mlp(x)
    whole.sum().backward()
    gradient, x.grad = x.grad, None
    expected = twin.layers[0](x)
    expected.sum().backward()
    pairs = zip(net.named_parameters(), twin.parameters(), strict=True)
    found = {name: sqnr(other.grad, full(p.grad)) for (name, p), other in pairs}
    found |= {"output": sqnr(expected, whole), "grad_input": sqnr(x.grad, gradient)}
    assert min(found.values()) > 120, found


@on_ranks(4, returns=[])
def test_column_parallel_outputs() -> list[str]:
    world = Distributed(1, 4)
    for model in (world.net, world.twin):
        model.to(torch.bfloat16)
    outputs: dict[str, dict[str, torch.Tensor]] = {"net": {}, "twin": {}}
    for kind, model in (("net", world.net), ("twin", world.twin)):
        for name, layer in float8_layers(model).items():
            layer.register_forward_hook(
                lambda m, i, o, kind=kind, name=name: outputs[kind].setdefault(name, o)
            )
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    world.net.layers[0](world.mine(x))
    world.twin.layers[0](x)
    rank = world.mesh.get_local_rank("tp")
    return [
        name
        for name in ("layers.0.w1", "layers.0.w3")
        if not same_bits(
            outputs["net"][name], outputs["twin"][name].chunk(4, dim=-1)[rank].contiguous()
        )
    ]


class WithMask(nn.Module):
    """A float8 layer whose module also takes an integer tensor, and its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, mask: torch.Tensor, *, x: torch.Tensor) -> torch.Tensor:
        mask = mask.to_local() if isinstance(mask, DTensor) else mask
        return self.layer(x) * mask.unsqueeze(-1)


@pytest.mark.parametrize("use_local_output", [False, True])
@on_ranks(2, returns=(True, 1, 2 * 4 * 32))
def test_keyword_inputs_and_integer_tensors(use_local_output: bool) -> tuple[bool, int, int]:
    mesh = device_mesh(tp=2)
    torch.manual_seed(0)
    net = convert_to_float8_training(WithMask())
    twin = convert_to_float8_training(WithMask())
    twin.load_state_dict(net.state_dict())
    prepare = PrepareFloat8ModuleInput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Replicate(),),
        input_kwarg_layouts={"x": Shard(1)},
        desired_input_kwarg_layouts={"x": Replicate()},
        use_local_output=use_local_output,
    )
    layer = Float8ColwiseParallel(output_layouts=Replicate())
    apply_tp_plan(net, mesh, {"": prepare, "layer": layer})
    x, mask = torch.randn(2, 4, 32), torch.randint(0, 2, (2, 4))
    part = x.chunk(2, 1)[mesh.get_local_rank()].contiguous().requires_grad_()
    with comm_audit(mesh) as audit:
        output = net(mask, x=part)
    output.sum().backward()
    gathered = sum(row.float8_bytes for row in audit.rows if row.op == "all_gather")
    gathers = audit.count("all_gather", dtype=torch.float8_e4m3fn)
    return same_bits(output, twin(mask, x=x)), gathers, gathered


def converted(cls: Callable[[], nn.Module], **config: Any) -> nn.Module:
    return convert_to_float8_training(cls(), config=Float8LinearConfig(**config))


@on_ranks(2, returns=[])
def test_refusals() -> list[str]:
    mesh = device_mesh(tp=2)

    def small() -> MLP:
        return MLP(32, 32)

    def prepare(**others: Any) -> PrepareFloat8ModuleInput:
        return PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), **others
        )

    in_high_precision = converted(
        small,
        cast_config_input_for_grad_weight=OFF,
        cast_config_grad_output_for_grad_weight=OFF,
    )
    cases = [
        (small().w1, Float8ColwiseParallel(), "needs a Float8Linear, found a Linear; convert"),
        (small(), prepare(), "this MLP contains no Float8Linear; convert the model first, or use"),
        (
            rounding_to(("w1",), small()),
            prepare(),
            "the layers that share this input cast it differently: {'w1':",
        ),
        (
            converted(small),
            prepare(float8_dtype=torch.float8_e5m2),
            "but the layers (w1, w3, w2) cast their input to torch.float8_e4m3fn; drop the",
        ),
        (
            converted(small),
            prepare(fwd_config_submodule_fqn="w4"),
            "fwd_config_submodule_fqn='w4' is not a Float8Linear in this MLP; it has ['w1',",
        ),
        (in_high_precision, prepare(), "no single float8 copy of the input serves all GEMMs of w1"),
    ]
    texts = [raised(ValueError, partial(parallelize_module, m, mesh, s)) for m, s, _ in cases]
    plain = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8_training(plain)
    parallelize_module(plain, mesh, {"0": Float8ColwiseParallel()})
    again = partial(parallelize_module, plain, mesh, {"0": Float8ColwiseParallel()})
    texts.append(raised(ValueError, again))
    plain[0]._forward_pre_hooks.clear()  # as if no style annotated the input
    texts.append(raised(ValueError, lambda: plain(torch.randn(2, 32))))
    parts = [part for *_, part in cases]
    parts += ["parallelize_module: 0 is distrib", "0: the weight is on the mesh "]
    return [text for text, part in zip(texts, parts, strict=True) if part not in text]


def rounding_to(powers_of_2: tuple[str, ...], model: nn.Module) -> nn.Module:
    """Convert a model, with the scales of some layers rounded to powers of two."""
    for name in ("w1", "w2", "w3"):
        convert_to_float8_training(
            model,
            module_filter_fn=lambda _, fqn, name=name: fqn.endswith(name),
            config=Float8LinearConfig(round_scales_to_power_of_2=name in powers_of_2),
        )
    return model


FOLLOWS_W1 = {
    "input_layouts": Shard(1),
    "desired_input_layouts": Replicate(),
    "fwd_config_submodule_fqn": "w1",
}


@on_ranks(2)
def test_the_one_to_follow_may_be_named() -> None:
    """The cast of the input is that of w1, though w2's differs."""
    mlp = rounding_to(("w1", "w3"), MLP(32, 32))
    parallelize_module(mlp, device_mesh(tp=2), PrepareFloat8ModuleInput(**FOLLOWS_W1))
    seen: list[Any] = []
    mlp.forward = lambda x: seen.append(x.to_local())
    mlp(torch.randn(2, 4, 32))
    assert torch.frexp(seen[0].scale).mantissa.item() == 0.5


@on_ranks(2)
def test_siblings_of_the_one_to_follow_must_round_alike() -> None:
    net = rounding_to(("w1",), nn.ModuleDict({"mlp": MLP(32, 32)}))
    plan = {
        "mlp": PrepareFloat8ModuleInput(**FOLLOWS_W1),
        "mlp.w1": Float8ColwiseParallel(),
        "mlp.w3": Float8ColwiseParallel(),
        "mlp.w2": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    apply_tp_plan(net, device_mesh(tp=2), plan)
    text = raised(ValueError, lambda: net["mlp"](torch.randn(2, 4, 32)))  # type: ignore[index]
    cast, taken = text.split(", but the layer takes")
    assert cast.startswith(
        "mlp.w3: the input is float8 already, torch.float8_e4m3fn with one scale"
    )
    assert ("power_of_2=True" in cast, "power_of_2=False" in taken) == (True, True)
    assert "give the layers that share an input one config" in taken


@on_ranks(2, returns=[True] * 3)
def test_one_style_on_modules_that_cast_differently() -> list[bool]:
    """One style on two modules: each casts its input as its own layers do."""
    recipes = ("tensorwise", "rowwise_folded")
    net = nn.Sequential(*(MLP(32, 32) for _ in recipes))
    for mlp, recipe in zip(net, recipes, strict=True):
        convert_to_float8_training(mlp, config=Float8LinearConfig.from_recipe_name(recipe))
    attributes = [set(vars(mlp)) for mlp in net]
    style = PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    apply_tp_plan(net, device_mesh(tp=2), {"*": style})
    shapes = []
    for mlp in net:
        mlp.register_forward_pre_hook(
            lambda _, inputs: shapes.append(inputs[0].to_local().scale.shape)
        )
        mlp.forward = lambda x: None
        mlp(torch.randn(2, 4, 32))
    kept = [
        set(vars(mlp)) - {"forward"} == before for mlp, before in zip(net, attributes, strict=True)
    ]
    return [*kept, shapes == [(), (2, 8, 1)]]
