"""Versions, devices, communication and switches of this machine, and whether float8 runs on it."""

import platform
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from fp8_dist.device import is_as_measured
from fp8_dist.env import SWITCHES, set_switches, strict_alignment
from fp8_dist.gemm_table import BLOCK_RECIPES, GEMMS, TABLE, block_of_gemm, has_gemm, release
from fp8_dist.version import __version__

OLDEST_TORCH = "2.11"


def environment() -> Iterator[str]:
    """Yield lines about the versions, the devices and the switches of this machine."""
    oldest = f"{OLDEST_TORCH} or later"
    yield f"fp8_dist {__version__}, Python {platform.python_version()}"
    supported = f"not supported: fp8_dist needs {oldest}" if _is_old() else f"supported ({oldest})"
    yield f"torch {torch.__version__}: {supported}"
    yield "\nfloat8 GEMMs"
    yield "  cpu: emulated in a wider type, as on every CPU"
    yield from _gpus()
    yield from _table()
    yield "\ncommunication"
    missing = "not in this build of torch"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else missing
    yield f"  NCCL: {nccl}"
    yield f"  gloo: {'available' if dist.is_gloo_available() else missing}"
    yield "\ncasts on GPUs"
    if find_spec("triton") is None:
        yield "  Triton: not installed; GPUs cast with torch's operators, which is slower"
    else:
        packages = packages_distributions().get("triton")  # for ROCm, another name
        yield f"  Triton: {version(packages[0]) if packages else 'found'}, fused kernels"
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


def outlook() -> str:
    """Return a sentence on whether float8 runs on this machine, and how fast."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    native = [device for device in devices if has_gemm("scaled", device)]
    if _is_old():
        return f"float8 does not run here: install torch {OLDEST_TORCH} or later."
    if native:
        runs = "runs" if any(map(is_as_measured, native)) else "was never tried, but should run"
        end = "." if find_spec("triton") else ": install Triton for fused casts."
        return f"float8 {runs} natively on {len(native)} of {len(devices)} GPUs{end}"
    if devices:
        return "float8 is only emulated on this GPU, slower than bf16: train in bf16 here."
    return "float8 runs on this CPU, but emulated: for tests, not for speed."


def _is_old() -> bool:
    return release(torch.__version__) < release(OLDEST_TORCH)


def _gpus() -> Iterator[str]:
    hip, cuda = torch.version.hip, torch.version.cuda
    if not torch.cuda.is_available():
        build = f"ROCm {hip}" if hip else f"CUDA {cuda}"
        target = f"{build}, but finds no device" if hip or cuda else "CPUs"
        yield f"  no GPU: torch is built for {target}"
        return
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        kind = f"compute capability {properties.major}.{properties.minor}"
        where = "from compute capability 8.9 on"
        if hip:
            kind, where = properties.gcnArchName, "on gfx94x, gfx95x and gfx12x"
        device = torch.device("cuda", index)
        how = f"emulated in a wider type (native {where})"
        if has_gemm("scaled", device):
            blocks = BLOCK_RECIPES.get(block_of_gemm(device) or 0, "none")
            how = f"native; of the recipes with scales of blocks: {blocks}; experts: "
            how += _experts(device)
        yield f"  cuda:{index}: {properties.name}, {kind}: {how}"


def _experts(device: torch.device) -> str:
    """How the experts of the recipes with scales of rows are multiplied."""
    if has_gemm("groups", device):
        return "in float8"
    return "in bf16" if has_gemm("groups in bf16", device) else "one after the other"


def _table() -> Iterator[str]:
    """Yield the table of GEMMs, whatever GPUs are here."""
    yield "\nGEMMs that torch has, by compute capability or AMD's name"
    for gemm, description in GEMMS.items():
        yield f"  {description}"
        for row in TABLE:
            if row.gemm == gemm:
                since = f"from torch {row.torch} on" if row.torch else "not yet"
                since += f", CUDA {row.cuda}" if row.cuda else ""
                since += f", not CUDA {row.without}" if row.without else ""
                yield f"    {row.architectures}: {since} ({row.source})"
