"""The ``FP8_DIST_*`` environment switches. No other module reads them.

=============================  ==========================================================
switch                         effect
=============================  ==========================================================
FP8_DIST_STRICT_ALIGNMENT=1    the CPU refuses the operand shapes that a GPU would refuse
                               (dims that aren't multiples of 16, ``pad_inner_dim=False``)
=============================  ==========================================================
"""

import os

SWITCHES = ("FP8_DIST_STRICT_ALIGNMENT",)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def strict_alignment() -> bool:
    """``FP8_DIST_STRICT_ALIGNMENT``: apply the GPU's alignment rule on every device."""
    value = os.environ.get("FP8_DIST_STRICT_ALIGNMENT", "").strip().lower()
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise ValueError(f"FP8_DIST_STRICT_ALIGNMENT={value!r}: expected one of {_TRUE + _FALSE}")


def set_switches() -> dict[str, str]:
    """The ``FP8_DIST_*`` variables that are set, including any that are not in ``SWITCHES``."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("FP8_DIST_")}
