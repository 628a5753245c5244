"""Converted layers through torch.export: what was exported runs in another process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from reference import raised, same_bits

from fp8_dist import Float8LinearConfig, convert_to_float8_training

RECIPES = ["tensorwise", "rowwise_folded", "mxfp8"]

LOAD = """
import sys
from pathlib import Path
import torch
import fp8_dist  # the graphs call its operators

for path in Path(sys.argv[1]).glob("*.pt2"):
    program = torch.export.load(path).module()
    torch.save(program(torch.load(path.with_suffix(".input"))), path.with_suffix(".output"))
"""


def net_of(recipe: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 48, bias=False))
    return convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))


def test_exported_layers_run_in_another_process(tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for recipe in RECIPES:
        for grad in (False, True):
            net, x = net_of(recipe), torch.randn(4, 64)
            with torch.set_grad_enabled(grad):
                program = torch.export.export(net, (torch.randn(4, 64),))
            name = f"{recipe} {grad}"
            torch.export.save(program, tmp_path / f"{name}.pt2")
            torch.save(x, tmp_path / f"{name}.input")
            expected[name] = net(x).detach()
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)], check=True)
    for name, output in expected.items():
        assert same_bits(torch.load(tmp_path / f"{name}.output"), output), name


def test_an_exported_layer_scales_the_weight_that_it_has() -> None:
    """The graph holds none of the layer's scales."""
    net, x = net_of("tensorwise"), torch.randn(4, 64)
    net(x).sum().backward()
    program = torch.export.export(net, (x,)).module()
    for module in (net, program):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(10)
    assert same_bits(program(x).detach(), net(x).detach())


@pytest.mark.parametrize("grad", [False, True])
def test_delayed_scales_are_refused_by_name(grad: bool) -> None:
    net, x = net_of("delayed"), torch.randn(4, 64)
    with torch.set_grad_enabled(grad):
        text = raised(NotImplementedError, lambda: torch.export.export(net, (x,)))
    assert_expected_inline(
        text.splitlines()[0],
        """0: a layer with DELAYED scales can't be exported, because its amax histories are kept by Python; convert the model with another recipe (the state_dict is the same), or export layer.to_linear()""",
    )
