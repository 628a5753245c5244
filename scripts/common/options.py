"""Command-line parsers, and types of options."""

import argparse
from collections.abc import Sequence


def positive(text: str) -> int:
    """Parse a count: an integer of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def mesh_type(text: str, axes: Sequence[str] = ("dp", "tp")) -> dict[str, int]:
    """Parse `--mesh`, such as "dp=2,tp=2". An axis left out has size 1; "none" leaves out all."""
    sizes = dict.fromkeys(axes, 1)
    for part in [] if text == "none" else text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not (size.isdecimal() and int(size)):
            known = " or ".join(f"{axis}=SIZE" for axis in axes)
            raise argparse.ArgumentTypeError(f"{text}: {part!r} is not {known}")
        sizes[name] = int(size)
    return sizes


def mesh_text(sizes: dict[str, int]) -> str:
    """The text of a mesh: the inverse of `mesh_type`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "none"


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` or a script, without abbreviated option names."""
    return argparse.ArgumentParser(
        prog=module if module.endswith(".sh") else f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
