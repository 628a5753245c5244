"""Report on the float8 support of this machine and of a model: ``python -m fp8_dist.doctor``.

It prints the relevant versions and devices, the layers of a model that would be converted, and
which of them would gain::

    python -m fp8_dist.doctor
    python -m fp8_dist.doctor --model package.module:function --recipe rowwise_folded --tp 2

``function`` takes no arguments and returns the model, an nn.Module that is not converted yet. It
is called on the meta device, and if it fails there, on the CPU. In a checkout, a model can also be
one of ``python -m scripts.plan``, such as ``8b``. The exit status is 0, or 2 for wrong arguments.
"""

import argparse
import pkgutil
import platform
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.device import BLOCK_RECIPES, device_has_float8_gemm, device_kind
from fp8_dist.env import SWITCHES, set_switches, strict_alignment
from fp8_dist.kernels import ALIGNMENT
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import skip_head, smallest_parts
from fp8_dist.model.report import ConversionSummary, WeightSummary, alike_rows, conversion_summary
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.version import __version__

OLDEST_TORCH = "2.11"
_NAMED = "scripts.common.llama:named"  # of a checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default those of the process; return 0.

    Raises:
        SystemExit: with status 2, for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fp8_dist.doctor",
        description="What this machine, and a model, would do in float8.",
        allow_abbrev=False,
    )
    made = "makes the model to look at; in a checkout also the name of one, such as 8b"
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help=made)
    recipes = [recipe.value for recipe in Float8LinearRecipeName]
    parser.add_argument("--recipe", choices=recipes, default="tensorwise")
    parser.add_argument("--tp", type=_ranks, default=1, metavar="N", help="tensor-parallel ranks")
    args = parser.parse_args(argv)
    if args.model is None and args != parser.parse_args([]):
        parser.error("--recipe and --tp describe the use of a model: give --model")
    lines = [*_environment()]
    if args.model is not None:
        try:
            model, where = build_model(args.model)
        except ValueError as error:
            parser.error(str(error))
        lines.append(f"\nmodel {args.model}, built on {where}")
        lines += _model_report(model, args.recipe, args.tp)
    print("\n".join(lines))
    return 0


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def build_model(path: str) -> tuple[nn.Module, str]:
    """Build the model of an option ``--model``.

    Args:
        path: ``"MODULE:FUNCTION"``, or the name of a model of ``scripts.plan``.

    Returns:
        The model, and a description of the device it was built on.

    Raises:
        ValueError: there is no such model.
    """
    is_name = ":" not in path
    try:
        function = pkgutil.resolve_name(_NAMED if is_name else path)
    except Exception as error:  # whatever the import of the module raises
        if is_name:
            raise ValueError(f"--model {path}: it is not MODULE:FUNCTION") from error
        raise ValueError(f"--model {path}: it can't be imported: {_told(error)}") from error
    function = partial(function, path) if is_name else function
    if isinstance(function, nn.Module) or not callable(function):
        raise ValueError(f"--model {path}: it is a {type(function).__name__}, not a function")
    where = "the meta device"
    try:
        with torch.device("meta"):
            model = function()
    except Exception as meta_error:  # code that reads values of tensors fails there
        where = f"the CPU; on the meta device: {_told(meta_error)}"
        try:
            model = function()
        except Exception as error:
            raise ValueError(f"--model {path}: the function raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {path}: it returned a {type(model).__name__}, not an nn.Module")
    return model, where


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# The machine.


def _environment() -> Iterator[str]:
    is_old = torch.__version__ < OLDEST_TORCH
    oldest = f"{OLDEST_TORCH} or later"
    yield f"fp8_dist {__version__}, Python {platform.python_version()}"
    supported = f"not supported: fp8_dist needs {oldest}" if is_old else f"supported ({oldest})"
    yield f"torch {torch.__version__}: {supported}"
    yield "\nfloat8 GEMMs"
    yield "  cpu: emulated in a wider type, as on every CPU"
    yield from _gpus()
    yield "\ncommunication"
    missing, has_nccl = "not in this build of torch", dist.is_nccl_available()
    yield f"  NCCL: {'.'.join(map(str, torch.cuda.nccl.version())) if has_nccl else missing}"
    yield f"  gloo: {'available' if dist.is_gloo_available() else missing}"
    yield "\ncasts on GPUs"
    if find_spec("triton") is None:
        yield "  Triton: not installed; GPUs cast with torch's operators, which is slower"
    else:
        of = packages_distributions().get("triton")  # not called triton for ROCm
        yield f"  Triton: {version(of[0]) if of else 'found'}, fused kernels"
    yield "\nFP8_DIST_* switches"
    switches = set_switches()
    for name, value in switches.items():
        yield f"  {name}={value}" + ("" if name in SWITCHES else ": not a switch of the library")
    try:
        strict_alignment()
    except ValueError as error:
        yield f"  {error}"
    if not switches:
        yield "  none is set"


def _gpus() -> Iterator[str]:
    hip, cuda = torch.version.hip, torch.version.cuda
    if not torch.cuda.is_available():
        build = f"ROCm {hip}" if hip else f"CUDA {cuda}"
        found = f"{build}, but finds no device" if hip or cuda else "CPUs"
        yield f"  no GPU: torch is built for {found}"
        return
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        kind = f"compute capability {properties.major}.{properties.minor}"
        where = "from compute capability 8.9 on"
        if hip:
            kind, where = properties.gcnArchName, "on gfx94x, gfx95x and gfx12x"
        device = torch.device("cuda", index)
        how = f"emulated in a wider type (native {where})"
        if device_has_float8_gemm(device):
            blocks = BLOCK_RECIPES.get(device_kind(device) or "", "none")
            how = f"native; of the recipes with scales of blocks: {blocks}"
        yield f"  cuda:{index}: {properties.name}, {kind}: {how}"


# The model.


def _model_report(model: nn.Module, recipe: str, tp: int) -> Iterator[str]:
    config = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather="auto")
    yield f'recipe {recipe}, enable_fsdp_float8_all_gather="auto"'
    yield "module_filter_fn=skip_head(model)"
    try:
        admits = skip_head(model)
        with warnings.catch_warnings(action="ignore"):  # the summary has the same information
            model = convert_to_float8_training(model, module_filter_fn=admits, config=config)
    except ValueError as error:
        yield f"refused: {error}\n\nverdict: nothing is converted: expect no gain"
        return
    yield from _experts_report(model, recipe)
    summary = conversion_summary(model)
    yield f"\n{summary}"
    yield (
        f'\nfloat8 layers that auto_filter("{recipe}", tp_size={tp}) would leave out (a GPU '
        f"refuses dims that are not multiples of {ALIGNMENT}, unless pad_inner_dim=True)"
    )
    why_small = partial(_why_small, recipe=recipe, tp=tp)
    small = alike_rows(row for row in summary.converted if why_small(row))
    for name, (first, *_) in small:
        out, in_ = first.shape[-2:]
        yield f"  {name}, {out} x {in_}: {why_small(first)}"
    yield "" if small else "  none\n"
    yield from _verdict(summary, {row: why_small(row) for row in summary.converted})


def _experts_report(model: nn.Module, recipe: str) -> Iterator[str]:
    """Convert the experts of a model, and say how, or why not."""
    if all(row.kind != "experts" for row in conversion_summary(model).rows):
        return
    try:
        config = Float8ExpertsConfig.from_recipe_name(recipe)
        convert_experts_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
    except (ValueError, NotImplementedError) as error:
        yield f"experts stay in high precision: {error}"
    else:
        yield f"experts: Float8ExpertsConfig({recipe!r})"


def _why_small(row: WeightSummary, recipe: str, tp: int) -> str:
    """The reasons why the shards of a layer gain nothing; empty if they do."""
    *experts, out, in_ = row.shape
    # Expert parallelism moves whole experts.
    parts = smallest_parts(recipe, (out, in_), ranks=1 if experts else tp)
    return "; ".join(dict.fromkeys(reason for _, reason in parts if reason))


def _verdict(summary: ConversionSummary, small: dict[WeightSummary, str]) -> Iterator[str]:
    """Lines about the layers that gain, and whether they do so on this machine.

    ``small``: the reason why a float8 layer does not; empty if it does.
    """
    count, gaining = len(small), [row for row, why in small.items() if not why]
    if not gaining:
        layers = "the layer is" if count == 1 else f"all {count} layers are"
        misaligned = any("multiple" in why for why in small.values())
        reason = f"{layers} too small{' or misaligned' if misaligned else ''}"
        yield f"verdict: {reason if count else 'no layer is in float8'}: expect no gain"
        return
    names = ", ".join(name for name, _ in alike_rows(gaining))
    yield (
        f"verdict: {len(gaining)} of {count} float8 layers, {summary.share(gaining):.1%} of the "
        f"parameters, are large enough to gain: {names}"
    )
    devices = range(torch.cuda.device_count())
    if not any(device_has_float8_gemm(torch.device("cuda", index)) for index in devices):
        yield "  (this machine has no float8 GEMM, and emulates it: no gain here but for messages)"


if __name__ == "__main__":
    raise SystemExit(main())
