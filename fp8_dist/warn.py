"""Warnings that a training step would repeat: each kind is given once in a process."""

import warnings

_warned: set[str] = set()


def warn_once(kind: str, message: str) -> None:
    """Warn about the first module that meets a condition; the others are alike."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, stacklevel=3)
