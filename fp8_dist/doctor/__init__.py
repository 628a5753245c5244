"""Report on the float8 support of this machine and of a model: ``python -m fp8_dist.doctor``.

It prints the relevant versions and devices, the layers of a model that would be converted, and
which of them would become faster, from how many tokens on. The last two lines are verdicts, on the
machine and on the model::

    python -m fp8_dist.doctor
    python -m fp8_dist.doctor --model package.module:function --tp 2 --tokens 8192

``function`` takes no arguments and returns the model, an nn.Module that is not converted yet. It
is called on the meta device, and if it fails there, on the CPU. The exit status is 0, or 2 for
wrong arguments.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module

from fp8_dist.recipe_names import Float8LinearRecipeName
from fp8_dist.text import progress

NO_MODEL = (
    "none is given. Next: --model package.module:function says what it would gain on an H100."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default those of the process; return 0.

    Raises:
        SystemExit: with status 2, for wrong arguments.
    """
    parser = argparse.ArgumentParser("python -m fp8_dist.doctor", allow_abbrev=False)
    parser.description = "What this machine, and a model, would do in float8."
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the model: an nn.Module, not converted yet",
    )
    recipes = [recipe.value for recipe in Float8LinearRecipeName]
    parser.add_argument("--recipe", choices=recipes, default="tensorwise")
    parser.add_argument("--tp", type=_count, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--tokens", type=_count, metavar="N", help="tokens per micro-batch")
    text = "layers that stay in high precision: the names for skip_head(model, NAME, ...)"
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help=text)
    args = parser.parse_args(argv)
    if args.model is None and args != parser.parse_args([]):
        parser.error(
            "--recipe, --tp, --tokens and --skip describe the use of a model: give --model"
        )
    machine, models = (import_module(f"{__name__}.{name}") for name in ("machine", "models"))
    lines, gain = [*machine.environment()], NO_MODEL
    if args.model is not None:
        progress(f"building and converting {args.model}")
        try:
            model, where = models.build_model(args.model)
        except ValueError as error:
            parser.error(str(error))
        lines.append(f"\nmodel {args.model}, built on {where}")
        *report, gain = models.model_report(model, args.recipe, args.tp, args.tokens, args.skip)
        lines += report
    print(*lines, f"\nthis machine: {machine.outlook()}", f"the model: {gain}", sep="\n")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
