"""The candidates that scripts compare, by name: bf16, the library's recipes, and torchao's.

The name of a *candidate* is "bf16" (nn.Linear), a recipe of the library, if need be with a weight
format ("mxfp8+mxfp4"), or "torchao RECIPE".
"""

import dataclasses
import functools
import logging
from typing import Any, get_args

import torch
from torch import nn

from fp8_dist import Float8Linear, Float8LinearConfig
from fp8_dist.recipe import Operand
from scripts.common.recipes import BF16, PEERS, RECIPES

# torchao warns about kernels that it can't load, and torch about types that torchao registers.
for _logger in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_logger).setLevel(logging.ERROR)
try:
    from torchao import float8 as torchao
    from torchao.float8 import float8_ops as torchao_ops  # noqa: F401
    from torchao.float8 import float8_tensor_parallel as torchao_styles  # noqa: F401
    from torchao.float8.float8_linear import Float8Linear as TorchaoLinear
except ImportError:
    torchao = None

TORCHAO = () if torchao is None else PEERS
# Rowwise scaling on CPUs needs a kernel that torch has since 2.12.
if torch.__version__.startswith("2.11.") and torch.version.cuda is None:
    TORCHAO = TORCHAO[:1]


def is_torchaos(name: str) -> bool:
    """Whether a candidate is torchao's."""
    return name.startswith("torchao ")


def peer_of(name: str) -> str | None:
    """The torchao candidate most like bf16 or a recipe of the library, to compare it with."""
    if name not in RECIPES:
        return None
    like = {BF16: "tensorwise", "delayed": "tensorwise", "rowwise_folded": "rowwise"}
    return f"torchao {like.get(name, name)}"


def config_of(name: str, **changes: Any) -> Any:
    """The config of a recipe, of the library or of torchao, with some fields replaced."""
    if is_torchaos(name):
        config = torchao.Float8LinearConfig.from_recipe_name(name.removeprefix("torchao "))
        return dataclasses.replace(config, **changes)
    recipe, weight_format = recipe_and_format(name)
    return Float8LinearConfig.from_recipe_name(recipe, weight_format=weight_format, **changes)


def recipe_and_format(name: str) -> tuple[Any, Any]:
    """The recipe of a candidate of the library, and the format of its weights."""
    recipe, _, weight_format = name.partition("+")
    return recipe, weight_format or "e4m3"


def gathers_float8(recipe: str) -> bool:
    """Whether a recipe gathers all operands in float8: each has one float8 copy for both GEMMs."""
    return recipe != BF16 and all(
        config_of(recipe).recipe.gather_scheme[operand] is not None for operand in get_args(Operand)
    )


def linear_of(name: str, linear: nn.Linear) -> nn.Linear:
    """A candidate's layer with the parameters of ``linear``.

    All layers of a candidate share one config object, as in a converted model.
    """
    if is_torchaos(name):
        return TorchaoLinear.from_float(linear, _config_of(name))
    return linear if name == BF16 else Float8Linear.from_float(linear, _config_of(name))


_config_of = functools.cache(config_of)
