"""Trains the debug Llama in bf16 and with every float8 recipe, from several seeds, and compares.

    python -m scripts.train.compare_recipes --assert

Every run is a process of its own with one thread; --jobs of them run at a time. The runs of a seed
differ in their recipe alone. They stay in --out.
"""

import sys

from scripts.common.candidates import BF16, OURS
from scripts.train.seeded_runs import Comparison, Limit, compare, options_parser, parse

# The largest differences that pass, in %: of a recipe to bf16, and of rowwise_folded to rowwise.
MAX_TO_BF16 = 1.0
MAX_OF_BLOCKS = {"blockwise": 0.3, "mxfp8": 0.3}
MAX_TO_ROWWISE = 0.3
FOLDED, ROWWISE = "rowwise_folded", "rowwise"


def comparison(recipes: list[str]) -> Comparison:
    """These recipes beside bf16."""
    limits = [Limit(name, BF16, MAX_OF_BLOCKS.get(name, MAX_TO_BF16)) for name in recipes]
    if {FOLDED, ROWWISE} <= {*recipes}:
        limits.append(Limit(FOLDED, ROWWISE, MAX_TO_ROWWISE, noise=True))
    return Comparison("recipe", {name: {"recipe": name} for name in (BF16, *recipes)}, limits)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    module = "scripts.train.compare_recipes"
    parser = options_parser(module, __doc__, steps=300, ranks=1, out="runs/recipes")
    every = [*OURS]
    parser.add_argument("--recipes", nargs="+", choices=OURS, default=every, help="default: all")
    args = parse(parser, argv)
    return compare(args, comparison(args.recipes))


if __name__ == "__main__":
    sys.exit(main())
