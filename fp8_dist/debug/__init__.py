"""Debugging tools: ``comm_audit`` records collectives, ``float8_stats`` measures casts.

``record`` keeps the last steps' casts, and writes them when something goes wrong.
"""

from typing import TYPE_CHECKING

from fp8_dist.imports import export

if TYPE_CHECKING:
    from fp8_dist.debug.api import *

export(__name__, "fp8_dist.debug.api")
