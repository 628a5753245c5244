"""transformers' ``save_pretrained`` of models with weights that are stored in float8.

Their state dict has float8 data and scales. This module lets ``save_pretrained`` write a
``config.json`` by which plain transformers multiplies them, or refuse what it can't read.
``freeze_to_float8`` imports it for models of transformers.
"""

from collections.abc import Mapping
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fp8_dist.device import is_float8
from fp8_dist.linear.weight import Float8Weight
from fp8_dist.model.export import entries_of, quantization_config, weights_by_key
from fp8_dist.scaling import BlockScheme

_save = PreTrainedModel.save_pretrained


@wraps(_save)
def _save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    state = signature(_save).bind(self, *args, **kwargs).arguments.get("state_dict")
    stored = {key: weight for key, weight in weights_by_key(self).items() if weight.is_stored}
    has_codes = state is None or any(
        isinstance(each, torch.Tensor) and is_float8(each.dtype) for each in state.values()
    )
    # A model with adapters of transformers' own saves these alone.
    if not stored or not has_codes or getattr(self, "_hf_peft_config_loaded", False):
        return _save(self, *args, **kwargs)
    _check(self, stored, state)
    former = vars(self.config).get("quantization_config", _save)
    self.config.quantization_config = _config_of(self, stored, state)
    try:
        return _save(self, *args, **kwargs)
    finally:
        if former is _save:
            del self.config.quantization_config
        else:
            self.config.quantization_config = former


PreTrainedModel.save_pretrained = _save_pretrained


def _check(
    model: nn.Module, stored: dict[str, Float8Weight], state: Mapping[str, Any] | None
) -> None:
    """Raise ValueError if transformers would not multiply some weight by its scales.

    With a state dict of the caller's only what no loader reads is refused.
    """
    for fqn, weight in stored.items():
        why, sizes = "", weight.parameter().shape
        if len(sizes) > 2 and (state is None or fqn in state):
            parts = entries_of(model, weight, fqn, torch.empty(sizes, device="meta"))
            if state is None or parts.keys() != {fqn}:
                why = "has one tensor of scales for all experts"
        elif state is None:
            (level,) = weight.schemes[0].levels
            blocks = [level.block(dim, len(sizes)) for dim in range(len(sizes))]
            if any(b and n > b and n % b for n, b in zip(sizes, blocks, strict=True)):
                why = f"is {list(sizes)}, which is not divisible by its blocks of {blocks}"
        if why:
            raise ValueError(
                f"save_pretrained: {fqn} is stored in float8 and {why}, which transformers does "
                "not read. For servers and load_float8_checkpoint (for layers, "
                "Fp8DistConfig(freeze=True) too), pass state_dict=float8_state_dict(model); for "
                "plain transformers, call unfreeze_from_float8(model) first"
            )


def _config_of(
    model: nn.Module, stored: dict[str, Float8Weight], state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the ``quantization_config`` by which transformers reads the saved weights."""
    coded = list(stored.values())
    if state is not None:  # float8_state_dict has other weights in float8, too
        coded += [
            weight
            for key, weight in weights_by_key(model).items()
            if weight.schemes and (key not in state or is_float8(state[key].dtype))
        ]
    schemes = [weight.schemes[0] for weight in coded]
    sizes = {(s.rows, s.columns) if isinstance(s, BlockScheme) else None for s in schemes}
    # Without the kernels of blocks, weights of any scales are dequantized when they are loaded.
    block = None if len(sizes) > 1 or schemes[0].dtype is not torch.float8_e4m3fn else sizes.pop()
    found = quantization_config(model, block and list(block), coded)
    return found if block else found | {"dequantize": True}
