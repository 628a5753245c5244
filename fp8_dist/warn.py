"""Warnings that are issued once per kind and process, because training steps would repeat them."""

import warnings

_warned: set[str] = set()


def warn_once(kind: str, message: str) -> None:
    """Issue a warning unless one of the same kind was issued before."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, stacklevel=3)
