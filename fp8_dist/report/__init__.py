"""Reports of runs: ``RunWriter`` writes a run's folder, ``python -m fp8_dist.report`` shows it.

The writer needs torch alone. The command needs the extra ``report``.
"""

from typing import TYPE_CHECKING

from fp8_dist.imports import export

if TYPE_CHECKING:
    from fp8_dist.report.writer import *
    from fp8_dist.report.writer import __all__ as __all__

export(__name__, "fp8_dist.report.writer")
