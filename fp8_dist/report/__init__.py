"""The report of runs: ``RunWriter`` writes a run's folder, ``python -m fp8_dist.report`` shows it.

The writer needs torch alone. The command needs the extra ``report``.
"""

from fp8_dist.report.writer import RunWriter

__all__ = ["RunWriter"]
