"""torchtitan's debug Llama in float8 on CPU ranks."""

import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documented import run_shown
from expecttest import assert_expected_inline
from processes import run
from reference import raised
from torch import nn
from torchtitan.config.manager import ConfigManager
from torchtitan.models.llama3 import config_registry

from fp8_dist import Float8LinearRecipeName, float8_layers
from fp8_dist.integrations.torchtitan import with_float8
from fp8_dist.integrations.torchtitan.parallelize import _moved_input
from scripts.train import torchtitan_cpu

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/torchtitan.md").read_text()
# The page's command for training on CPUs. scripts/test_torchtitan.sh ran the commands before it.
(COMMAND,) = re.findall(r"^(torchrun .* scripts\.train\.torchtitan_cpu (?:.*\\\n)*.*)", PAGE, re.M)
# The first release whose FSDP2 supports the local tensors of spmd_types.
HAS_SPMD_TYPES = torch.__version__ >= "2.15"
BACKENDS = ["partial_dtensor"] + ["spmd_types"] * HAS_SPMD_TYPES


def train(
    folder: Path, config: str, ranks: int, tp: int, backend: str, *extra: str
) -> tuple[list[float], str]:
    """Train; return the losses by step, and the gathers and reduce-scatters of the last step.

    ``extra``: more options of the command.
    """
    command = COMMAND
    for option, value in {
        "nproc-per-node": ranks,
        "config": config,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.spmd_backend": backend,
    }.items():
        command, found = re.subn(rf"(?<=--{re.escape(option)} )\S+", str(value), command)
        assert found == 1
    torchrun, *options = shlex.split(command.replace("\\\n", ""))
    assert torchrun == "torchrun"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, *extra],
        cwd=folder,  # torchtitan writes its logs there
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    losses = dict(re.findall(r"step: +(\d+) +loss: +([\d.]+)", output))
    assert len(losses) == torchtitan_cpu.STEPS
    rows = re.findall(r"^(?:op|all_gather|all_to_all|reduce_scatter) .*", output, re.MULTILINE)
    return [float(loss) for loss in losses.values()], "\n".join(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_parallelism(backend: str, tmp_path: Path) -> None:
    expected, theirs = train(tmp_path, "llama3_debugmodel", 2, 2, backend)
    losses, ours = train(tmp_path, "llama3_debugmodel_tensorwise", 2, 2, backend)
    assert losses[-1] < losses[0] - 2
    assert max(abs(a - b) for a, b in zip(expected, losses, strict=True)) < 0.05
    # The embedding and the output head stay in bf16.
    assert f"{theirs}\n\n{ours}" in PAGE


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_and_sums_travel_in_float8(backend: str, tmp_path: Path) -> None:
    losses, rows = train(tmp_path, "llama3_debugmodel_encoded", 4, 2, backend)
    assert losses[-1] < losses[0] - 2
    # The embedding and the output head keep torch's reduce-scatters.
    assert_expected_inline(
        rows.replace("dp_shard", "fsdp    "),
        """\
op              axis       dtype          count   elements       bytes
all_gather      fsdp       bfloat16           5  1,311,488   2,622,976
reduce_scatter  tp         bfloat16           2    131,072     262,144
all_gather      fsdp       float8_e4m3fn     12  5,111,808   5,111,808
all_gather      fsdp       bfloat16           +      6,144      12,288
all_gather      tp         float8_e4m3fn     12    786,432     786,432
all_to_all      tp         float8_e4m3fn     24  1,572,864   1,572,864
all_to_all      tp         uint8              +     12,288      12,288
all_gather      tp         bfloat16           2    131,072     262,144
all_to_all      fsdp       float8_e4m3fn      9  3,342,336   3,342,336
all_to_all      fsdp       float32            +      3,696      14,784
all_to_all      fsdp       uint8              +     26,112      26,112
all_gather      tp         float8_e5m2       12    786,432     786,432""",
    )


def test_fsdp(tmp_path: Path) -> None:
    losses, rows = train(tmp_path, "llama3_debugmodel_delayed", 2, 1, BACKENDS[-1])
    assert losses[-1] < losses[0] - 2
    (float8,) = [row.split() for row in rows.splitlines() if "float8" in row]
    assert float8[2:] == ["float8_e4m3fn", "12", "10,223,616", "10,223,616"]


def layers_of(config: Any) -> dict[str, Any]:
    """The float8 layers of the model that a config builds."""
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        return float8_layers(config.model_spec.model.build())


def parsed(config: str, *args: str) -> Any:
    module = "fp8_dist.integrations.torchtitan"
    return ConfigManager().parse_args(["--module", module, "--config", config, *args])


@pytest.mark.parametrize("recipe", [recipe.value for recipe in Float8LinearRecipeName])
def test_recipes_are_chosen_on_the_command_line(recipe: str) -> None:
    config = parsed(f"llama3_8b_{recipe}", "--training.steps", "7")
    assert config.training.steps == 7
    layers = layers_of(config)
    assert len(layers) == 32 * 5
    assert layers["layers.0.attention.wo"].fqn == "layers.0.attention.wo"
    assert {layer.config.fsdp_float8_all_gather for layer in layers.values()} == {
        not recipe.startswith("rowwise") or recipe == "rowwise_folded"
    }


def test_the_examples() -> None:
    scope: dict[str, Any] = {}
    run_shown("".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), scope)
    mixture = scope["my_mixture"]().model_spec.model.layers[0].moe.routed_experts.inner_experts
    assert mixture.float8.recipe == "rowwise_folded"
    layers = layers_of(scope["my_qwen3"]())
    assert layers
    assert all("lm_head" not in name for name in layers)
    text = (ROOT / "scripts/examples/torchtitan.sh").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^torchrun .*? -m torchtitan\.train (.*)$", text, re.M)
    config = ConfigManager().parse_args(command.split())
    assert config.parallelism.tensor_parallel_degree == 2
    assert layers_of(config)["layers.0.attention.wo"].config.fsdp_float8_all_gather


def debug_model(w2_bias: bool = False, **arguments: Any) -> tuple[Any, nn.Module]:
    config = config_registry.llama3_debugmodel()
    config.model_spec.model.layers[1].feed_forward.w2.bias = w2_bias
    config = with_float8(config, **arguments)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        return config.model_spec, config.model_spec.model.build()


def test_what_is_refused() -> None:
    def parallelize(backend: str, tp: int = 2, **arguments: Any) -> None:
        spec, model = debug_model(**arguments)
        mesh = SimpleNamespace(mesh_dim_names=("tp",), size=lambda axis: tp)
        dims = SimpleNamespace(tp_enabled=tp > 1, spmd_backend=backend, get_mesh=lambda name: mesh)
        spec.parallelize_fn(model, parallel_dims=dims)

    assert "llama3_8b_int4" in raised(ValueError, lambda: parsed("llama3_8b_int4"))
    messages = [
        raised(NotImplementedError, lambda: parallelize("full_dtensor")),
        raised(ValueError, lambda: parallelize("spmd_types", filter_fqns=["lm_head", "w3"])),
        raised(NotImplementedError, lambda: parallelize("spmd_types", w2_bias=True)),
        raised(ValueError, lambda: debug_model(filter_fqns=["layers", "lm_head"])),
        raised(ValueError, lambda: debug_model(reduce_transport="fp8")),
        raised(ValueError, lambda: parallelize("spmd_types", tp=1, reduce_transport="bf16")),
    ]
    assert_expected_inline(
        "\n".join(messages),
        """\
fp8_dist has no tensor parallelism for parallelism.spmd_backend=full_dtensor; use spmd_types or partial_dtensor
layers.0.feed_forward: ['w1'] are converted to float8 and ['w3'] are not, but they share one gather of their input; convert all of them or none (filter_fqns)
layers.1.feed_forward.w2: the bias is replicated over the tensor-parallel ranks, which fp8_dist does not handle with spmd_types; leave the layer unconverted (filter_fqns), or use parallelism.spmd_backend=partial_dtensor
Float8Converter: the model has no linear layer to convert; its layers are not torchtitan's Linear, have sizes that are no multiples of 16, or have one of ['layers', 'lm_head'] in their names
with_float8: reduce_transport is 'fp8'; it must be one of ('float8', 'bf16', None)
with_float8: reduce_transport='bf16' is for tensor parallelism; set parallelism.tensor_parallel_degree, or drop it""",
    )
    sharding = SimpleNamespace(in_src_shardings={}, in_dst_shardings={})
    text = raised(NotImplementedError, lambda: _moved_input(sharding, "layers.0.attention"))
    assert text.startswith("layers.0.attention: fp8_dist takes over the gather of one input of a")
