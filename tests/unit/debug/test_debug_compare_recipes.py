"""compare_recipes: its numbers, what it leaves as it was, and what it refuses."""

import copy
import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from nets import Net
from reference import raised, sqnr
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    float8_layers,
    update_float8_scales,
)
from fp8_dist.debug import LayerSqnr, RecipeComparison, compare_recipes

RECIPES = [r.value for r in Float8LinearRecipeName if r is not Float8LinearRecipeName.DELAYED]


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(seed))


def recorded(model: nn.Module, x: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """What the layers of a model take and make in a step, and the parameters' gradients."""
    seen: dict[str, dict[str, torch.Tensor]] = {}

    def forward(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen[name] = {"input": args[0].detach(), "output": output.detach()}
        output.register_hook(lambda grad: seen[name].update(grad_output=grad))

    handles = [
        layer.register_forward_hook(lambda *a, name=name: forward(name, *a))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    model(x).square().mean().backward()
    for handle in handles:
        handle.remove()
    for name, parameter in model.named_parameters():
        seen[name] = {"gradient": parameter.grad}
        parameter.grad = None
    return seen


def same(one: RecipeComparison, other: RecipeComparison) -> bool:
    """Whether all rows agree, but for the order in which gradients were added up."""
    rows = [[tuple(row.values()) for row in each.to_dicts()] for each in (one, other)]
    return len(rows[0]) == len(rows[1]) and all(
        a == b or (isinstance(a, float) and a == pytest.approx(b, abs=1e-3))
        for mine, its in zip(*rows, strict=True)
        for a, b in zip(mine, its, strict=True)
    )


def close(found: float | None, expected: float) -> bool:
    return found is not None and (found == expected or abs(found - expected) < 1e-3)


@pytest.mark.parametrize("is_converted", [False, True])
def test_the_numbers_are_those_of_runs_by_hand(is_converted: bool) -> None:
    model, x = Net(), batch()
    exact = recorded(Net(), x)
    if is_converted:
        convert_to_float8_training(model)
    comparison = compare_recipes(model, x)
    assert comparison.recipes == tuple(RECIPES)
    rows = {(row.recipe, row.fqn): row for row in comparison.layers}
    parameters = {(row.recipe, row.name): row.sqnr for row in comparison.parameters}
    for recipe in RECIPES:
        config = Float8LinearConfig.from_recipe_name(recipe)
        float8 = recorded(convert_to_float8_training(Net(), config=config), x)
        for name, _ in Net().named_parameters():
            expected = sqnr(exact[name]["gradient"], float8[name]["gradient"])
            assert close(parameters[recipe, name], expected), name
        for name, layer in Net().named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            row, its = rows[recipe, name], exact[name]
            assert close(row.model_output, sqnr(its["output"], float8[name]["output"]))
            assert row.model_grad_weight == parameters[recipe, f"{name}.weight"]
            alone = Float8Linear.from_float(copy.deepcopy(layer), config)
            taken = float8[name]["input"].clone().requires_grad_()
            made, weight = alone(taken), layer.weight
            made.backward(float8[name]["grad_output"])
            grad = float8[name]["grad_output"].reshape(-1, made.shape[-1])
            bias = 0 if layer.bias is None else layer.bias
            assert close(row.output, sqnr(taken @ weight.t(), made - bias))
            assert close(row.grad_weight, sqnr(grad.t() @ taken.reshape(32, -1), alone.weight.grad))  # type: ignore[arg-type]
            if name.startswith("layers.0") and not name.endswith("w2"):
                assert row.grad_input is row.model_grad_input is None  # nothing asks for it
            else:
                expected = sqnr((grad @ weight).view_as(taken), taken.grad)  # type: ignore[arg-type]
                assert close(row.grad_input, expected)
                assert row.model_grad_input is not None
    # A layer's own error does not grow with depth; what arrives from other layers does.
    last = rows["tensorwise", "layers.1.w2"]
    assert last.output > last.model_output + 1


class Outlier(nn.Module):
    """The other weights of a layer vanish beside one, which multiplies zeros."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        with torch.no_grad():
            self.layers[1].weight[0, 0] = 1e6  # type: ignore[index,operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(second(F.pad(first(x)[..., 1:], (1, 0))))


def test_a_bad_layer_is_found_by_name() -> None:
    comparison = compare_recipes(Outlier(), batch(), recipes=["tensorwise", "rowwise"])
    assert comparison.worst(1, "tensorwise") == ["layers.1"]
    low = comparison.layers_below(20, "tensorwise")
    assert low == ["layers.1"]
    # The input of the next layer lost it all, but that layer is not to blame.
    last = next(row for row in comparison.layers if row.fqn == "layers.2")
    assert last.model_output < 10 < 20 < last.worst[0]
    assert len(comparison.layers_below(math.inf, "rowwise")) == 3
    assert comparison.table().splitlines()[1].startswith("layers.1 ")


class Everything(nn.Module):
    """Dropout, BatchNorm, a buffer that is replaced, and an expert that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.expert = nn.Linear(64, 64)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.5)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, fail: bool = False) -> Any:
        self.calls = self.calls + 1
        y = self.second(self.dropout(self.norm(self.first(x))))
        if fail:
            raise RuntimeError("in the middle")
        return SimpleNamespace(loss=self.frozen(y).square().mean(), other=y)


def state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {n: t.clone() for n, t in model.state_dict().items()}
    found |= {
        f"{n} grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    found["generator"] = torch.get_rng_state()
    for name, layer in float8_layers(model).items():
        for operand, history in layer.histories.items():
            values = [history.history, history.current, history.statistic]
            found |= {
                f"{name} {operand} {i}": v.clone() for i, v in enumerate(values) if v is not None
            }
    return found


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("recipe", [None, "tensorwise", "delayed"])
def test_the_model_is_left_as_it_was(fails: bool, recipe: str | None) -> None:
    model: Any = Everything()
    if recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    x = torch.randn(32, 64, requires_grad=True)
    model(x).loss.backward()
    optimizer.step()
    update_float8_scales(model) if recipe else None
    own_forward = model.norm.forward = lambda x: nn.BatchNorm1d.forward(model.norm, x)
    objects = {n: (t, t.grad) for n, t in model.named_parameters()}
    before, grad, values = state(model), x.grad, x.grad.clone()
    buffers = dict(model.named_buffers())
    if fails:
        arguments = {"x": x, "fail": True}
        assert raised(RuntimeError, lambda: compare_recipes(model, arguments)) == "in the middle"
    else:
        comparison = compare_recipes(model, (x,))
        assert "expert" in comparison.not_called
        assert comparison.recipes == (*RECIPES, *(["delayed"] if recipe == "delayed" else []))
    after = state(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    parameters = dict(model.named_parameters())
    assert parameters.keys() == objects.keys()
    assert all(t is objects[n][0] and t.grad is objects[n][1] for n, t in parameters.items())
    assert all(t is buffers[n] for n, t in model.named_buffers())
    assert x.grad is grad
    assert torch.equal(grad, values)
    assert [m for m in model.modules() if "forward" in vars(m)] == [model.norm]
    assert model.norm.forward is own_forward


def test_all_runs_take_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    comparison = compare_recipes(Everything(), torch.randn(32, 64), recipes="tensorwise")
    gradients = {row.name: row.sqnr for row in comparison.parameters}
    assert gradients["second.weight"] > 15  # with another mask: about 0 dB
    row = next(row for row in comparison.layers if row.fqn == "frozen")
    assert row.grad_weight is row.model_grad_weight is None
    assert row.grad_input is not None
    losses = comparison.losses
    assert losses.keys() == {"high precision", "tensorwise"}
    assert abs(losses["tensorwise"] / losses["high precision"] - 1) < 0.05


def test_delayed_scales_are_those_of_the_histories() -> None:
    model = convert_to_float8_training(Net(), config=Float8LinearConfig.from_recipe_name("delayed"))
    one = compare_recipes(model, batch(), recipes=["delayed", "tensorwise"])
    # Without histories: scales of the tensors themselves.
    assert [r.output for r in one.layers[:6]] == [r.output for r in one.layers[6:]]
    model(1e-3 * batch()).sum().backward()
    update_float8_scales(model)
    comparison = compare_recipes(model, batch(), recipes=["delayed", "tensorwise"])
    first = {row.recipe: row.output for row in comparison.layers if row.fqn == "layers.0.w1"}
    assert first["delayed"] < 10 < first["tensorwise"]  # it saturates


def test_checkpointing_changes_nothing() -> None:
    class Checkpointed(Net):
        reentrant = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

    expected, model = compare_recipes(Net(), batch().requires_grad_()), Checkpointed()
    for model.reentrant in (False, True):
        assert same(compare_recipes(model, batch().requires_grad_()), expected)
    wrapped = Net()
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    assert same(compare_recipes(wrapped, batch().requires_grad_()), expected)


def test_layers_that_run_several_times() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](F.relu(self[0](x)))

    (row,) = compare_recipes(Twice(nn.Linear(64, 64)), batch(), recipes=["rowwise"]).layers
    values = (row.output, row.grad_input, row.grad_weight, row.model_output, row.model_grad_input)
    assert all(value is not None and 20 < value < 40 for value in values)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_holds_in_all_runs(inside: bool) -> None:
    net, x = Net(), batch()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    alone = Float8Linear.from_float(copy.deepcopy(net.layers[0].w1), config)  # type: ignore[union-attr,arg-type]
    with autocast:
        losses = [
            Net()(x).square().mean(),
            convert_to_float8_training(Net(), config=config)(x).square().mean(),
        ]
        expected = sqnr(net.layers[0].w1(x), alone(x))  # type: ignore[union-attr,operator]
    if inside:
        net.forward = autocast(net.forward)  # type: ignore[method-assign]
    with nullcontext() if inside else autocast:
        comparison = compare_recipes(net, x, recipes=["rowwise_with_gw_hp"])
    assert list(comparison.losses.values()) == pytest.approx([each.item() for each in losses])
    assert close(comparison.layers[0].output, expected)
    assert comparison.layers[-1].grad_weight == math.inf  # in high precision: the same product


def test_results_that_can_not_be_compared() -> None:
    class Routed(nn.Module):
        """Of another number of rows where the first layer rounds."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.rows: int | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).reshape(-1, 64)
            first, self.rows = self.rows is None, 16
            return self.second(y if first else y[:16])

    comparison = compare_recipes(Routed(), batch(), recipes=["tensorwise"])
    row = comparison.layers[1]
    assert math.isnan(row.model_output)
    assert comparison.layers_below(20) == []
    x = batch()
    x[0, 0, 0] = math.nan
    comparison = compare_recipes(Net(), x, recipes=["tensorwise"])
    assert "layers.0.w1" in comparison.layers_below(-1000)


def test_a_layer_whose_sqnr_is_nan_is_the_worst() -> None:
    nothing = dict.fromkeys(("model_output", "model_grad_input", "model_grad_weight"))
    rows = [
        LayerSqnr("mxfp8", fqn, output, 30.0, None, **nothing)
        for fqn, output in (("good", 40.0), ("low", 5.0), ("lost", math.nan))
    ]
    comparison = RecipeComparison(rows, [], {"mxfp8": 20.0}, {}, [])
    assert comparison.worst(2) == comparison.layers_below(20) == ["lost", "low"]


def test_which_layers_are_compared() -> None:
    def names(model: nn.Module, **options: Any) -> set[str]:
        comparison = compare_recipes(model, batch(), recipes=["rowwise"], **options)
        return {row.fqn for row in comparison.layers}

    only = {"layers.0.w1"}
    partly = convert_to_float8_training(Net(), module_filter_fn=lambda _, fqn: fqn in only)
    assert names(partly) == only
    of_w2 = names(partly, module_filter_fn=lambda _, fqn: "w2" in fqn)
    assert of_w2 == {"layers.0.w2", "layers.1.w2"}
    assert names(nn.Linear(64, 64)) == {"Linear"}
    gathers = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    converted = convert_to_float8_training(Net(), config=gathers)
    expected = compare_recipes(Net(), batch(), recipes={"mine": Float8LinearConfig()})
    mine = compare_recipes(converted, batch(), recipes={"mine": gathers})
    assert mine.to_dicts() == expected.to_dicts()


def test_layers_that_can_not_be_converted_are_no_layers_that_a_batch_missed() -> None:
    class Attention(nn.Module):
        """With a projection that torch reads and never calls, and a layer that is quantized."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.spare, self.quantized = (nn.Linear(64, 64) for _ in range(3))
            self.attention = nn.MultiheadAttention(64, 2)
            codes = self.quantized.weight.detach().to(torch.int8)
            self.quantized.weight = nn.Parameter(codes, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.attention(y, y, y)[0]

    comparison = compare_recipes(Attention(), batch(), recipes=["rowwise"])
    assert {row.fqn for row in comparison.layers} == {"first"}
    assert comparison.not_called == ["spare"]


def test_losses() -> None:
    class Head(nn.Module):
        def __init__(self, output: Any) -> None:
            super().__init__()
            self.linear, self.output = nn.Linear(64, 64), output

        def forward(self, x: torch.Tensor) -> Any:
            return self.output(self.linear(x))

    def losses(output: Any, **others: Any) -> float:
        torch.manual_seed(0)
        comparison = compare_recipes(Head(output), batch(), recipes=["rowwise"], **others)
        return comparison.losses["high precision"]

    mean = losses(lambda y: y.square().mean())
    for output in (lambda y: y, lambda y: (None, y), lambda y: {"logits": y}):
        assert losses(output) == pytest.approx(mean)
    assert losses(lambda y: {"loss": y.square().mean(), "logits": y.exp()}) == mean
    assert losses(lambda y: SimpleNamespace(loss=y.square().mean())) == mean
    assert losses(lambda y: y, loss=lambda y: y.square().mean()) == mean
    assert losses(lambda y: y, loss=lambda y: -y.sum()) != mean
    for output, loss, found in [
        (lambda y: y, lambda y: y, "a tensor of shape [4, 8, 64]"),
        (lambda y: y, lambda y: y.sum().item(), "a float"),
        (lambda y: y.sum().detach(), None, "a tensor of shape [] without a gradient"),
        (lambda y: None, None, "a NoneType"),
    ]:
        message = raised(ValueError, partial(losses, output, loss=loss))
        assert message.startswith("compare_recipes: the loss must be a tensor with one element")
        assert f"got {found}; give loss=" in message


def test_what_is_refused() -> None:
    x, wrong = batch(), cast(Any, {"mine": "rowwise"})
    hooked, replaced = Net(), Net()
    hooked.layers[1].w1.weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr]
    replaced.layers[0].w2.forward = lambda x: x  # type: ignore[union-attr]
    refused: list[tuple[type[Exception], Any, Any, str]] = [
        (TypeError, x, None, "compare_recipes: expected a model, got a Tensor"),
        (ValueError, nn.ReLU(), None, "compare_recipes: ReLU has no linear layer to compare"),
        (ValueError, Net(), ["fp4"], "recipe_name='fp4' is not one of ['tensorwise'"),
        (ValueError, Net(), [], "recipes=[] must name at least one recipe"),
        (TypeError, Net(), wrong, "recipes must map names to configs, got 'rowwise'"),
        (NotImplementedError, hooked, None, "layers.1.w1.weight has a hook that runs after its"),
        (NotImplementedError, replaced, None, "other code has replaced the forward of layers.0.w2"),
    ]
    for kind, model, recipes, message in refused:
        assert message in raised(kind, partial(compare_recipes, model, x, recipes=recipes))
    comparison = compare_recipes(Net(), x, recipes=["rowwise", "tensorwise"])
    message = raised(ValueError, lambda: comparison.worst(3))
    assert "name the recipe, several were compared: rowwise, tensorwise" in message
    message = raised(ValueError, lambda: comparison.layers_below(3, "delayed"))
    assert "RecipeComparison: name the recipe, 'delayed' is not among them:" in message


def test_the_table() -> None:
    recipes = ["tensorwise", "rowwise"]
    comparison = compare_recipes(Everything(), torch.randn(32, 64), recipes=recipes)
    rows = {(row.fqn, row.recipe): row.worst for row in comparison.layers}
    lines, losses = comparison.table(2).splitlines(), comparison.losses
    assert lines[0].split() == ["layer", *recipes]
    for line, name in zip(lines[1:], ("first", "second"), strict=False):
        cells = [text for r in recipes for text in (f"{rows[name, r][0]:.2f}", rows[name, r][1])]
        assert line.split() == [name, *cells]
    assert lines[3] == "(1 more)"
    assert lines[5].startswith(f"loss ({losses['high precision']:.6g} in high precision) ")
    assert lines[5].split()[-2:] == [f"{losses[recipe]:.6g}" for recipe in recipes]
    assert lines[6] == "not called: expert"
