"""The common options of measurements, and their output: tables, and the checks of `--assert`."""

import argparse
import dataclasses
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scripts.common.options import command_parser, positive

DEVICE = "default: cuda where there is a GPU"


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition of `--assert`: a sentence with its figures, and whether it holds."""

    sentence: str
    holds: bool


def make_parser(
    module: str,
    description: str | None,
    *,
    repeat: int | None = None,
    asserts: str | None = None,
    ratio: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the options of all measurements.

    Args:
        module: such as "scripts.bench.linear".
        description: the module's docstring.
        repeat: the default of `--repeat`; None: nothing is timed, and the device is the CPU.
        asserts: when `--assert` fails, for its help; None: there is no such option.
        ratio: `--assert` takes an argument, a ratio of times.
    """
    parser = command_parser(module, description)
    parser.set_defaults(device="cpu", clock="wall", asserted=False)
    add = parser.add_argument
    add("--threads", type=positive, default=1, help="of each process on a CPU; %(default)s")
    if repeat is not None:
        add("--device", choices=["cpu", "cuda"], default=None, help=DEVICE)
        add("--repeat", type=positive, default=repeat, help="turns of each candidate; %(default)s")
        clock = "cpu: CPU time of the process, where others use the machine; default: wall"
        add("--clock", choices=["wall", "cpu"], help=clock)
    if ratio:
        least = "fail unless tensorwise is so many times as fast as torchao's"
        add("--assert", dest="asserted", type=float, metavar="RATIO", help=least)
    if asserts is not None:
        add("--assert", dest="asserted", action="store_true", help=f"fail where {asserts}")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and add `command`, the command line that repeats the run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.clock == "cpu":
        if args.device == "cuda":
            parser.error("--clock cpu does not see what a GPU does: use wall")
        args.device = "cpu"
    args.command = shlex.join([*parser.prog.split(), *argv])
    return args


def run(module: str, args: argparse.Namespace) -> int:
    """Set the device, threads and seed, call the `run` of a module, and return its exit status.

    torch is imported here, and not before.
    """
    torch = import_module("torch")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return import_module(module).run(args)


def finish(
    args: argparse.Namespace, tables: Mapping[str, str], checks: Sequence[Check] = ()
) -> int:
    """Print the command, the machine, the tables and the checks; return the exit status.

    Args:
        args: the options from `parse`.
        tables: Markdown tables by title.
        checks: the conditions; with `--assert` the status is 1 if one does not hold.
    """
    print(f"`{args.command}` on {machine(args.device, args.threads)}\n")
    for title, text in tables.items():
        print(f"{title}\n\n{text}\n")
    for check in checks:
        print(f"{'holds' if check.holds else 'BROKEN'}: {check.sentence}")
    return 1 if args.asserted and not all(check.holds for check in checks) else 0


def machine(device: str, threads: int) -> str:
    """The device, its threads, and the releases of torch and torchao."""
    if device == "cuda":
        kind = import_module("torch").cuda.get_device_name()
    else:
        kind = f"{_cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}"
    try:
        peer = f"torchao {version('torchao')}"
    except PackageNotFoundError:
        peer = "no torchao"
    return f"{kind}, torch {version('torch')}, {peer}"


def _cpu_name() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()
