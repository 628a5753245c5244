"""Names of candidates (scripts/common/candidates.py), for parsers, which don't import torch."""

import argparse
from importlib.util import find_spec

from fp8_dist.recipe_names import Float8LinearRecipeName

BF16 = "bf16"
OURS = tuple(recipe.value for recipe in Float8LinearRecipeName)
RECIPES = (BF16, *OURS)
PACKED = ("blockwise+mxfp4", "mxfp8+mxfp4")
PEERS = ("torchao tensorwise", "torchao rowwise", "torchao rowwise_with_gw_hp")
if find_spec("torchao") is None:
    PEERS = ()


def add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add an option for the candidates to time."""
    names = (BF16, *OURS, *PEERS)
    text = f"of {', '.join(names)}; default: all. On some CPUs torchao's take seconds for a layer"
    parser.add_argument("--candidates", nargs="+", choices=names, metavar="NAME", help=text)
