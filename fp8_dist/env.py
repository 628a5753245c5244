"""Every ``FP8_DIST_*`` environment switch: parsed here, read nowhere else.

=============================  ==========================================================
switch                         effect
=============================  ==========================================================
FP8_DIST_STRICT_ALIGNMENT=1    the CPU refuses the operand shapes that a GPU would refuse
                               (dims that aren't multiples of 16, ``pad_inner_dim=False``)
=============================  ==========================================================
"""

import os

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={value!r}: expected one of {_TRUE + _FALSE}")


def strict_alignment() -> bool:
    """``FP8_DIST_STRICT_ALIGNMENT``: apply the GPU's alignment rule on every device."""
    return _flag("FP8_DIST_STRICT_ALIGNMENT")
