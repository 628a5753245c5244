"""A fingerprint of the code that decides what a compiled graph contains."""

import os
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

from fp8_dist.scaling.scheme import Scheme, scheme_classes

_LIBRARY = Path(__file__).resolve().parents[1]
PROCESS = uuid4().hex  # a token that no other process has


def code_fingerprint() -> str:
    """The hash of the library's code, and of the modules that define other scaling schemes.

    Processes with the same code have the same fingerprint. It does not cover what such a module
    imports. A scheme that no file defines, such as one of a notebook, may change, so each of its
    classes has a fingerprint of its own.
    """
    digest = blake2b(_library_code(), digest_size=16)
    classes: list[Any] = [*scheme_classes()]  # for mypy they are not hashable
    for code in sorted(map(_code_of, classes)):
        digest.update(code)
    return digest.hexdigest()


@cache
def _library_code() -> bytes:
    paths = []
    for folder, _, files in os.walk(_LIBRARY, followlinks=True):  # some rooms are links
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    if not paths:  # an archive, or compiled files alone
        return PROCESS.encode()
    digest = blake2b()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.digest()


@cache
def _code_of(scheme: type[Scheme]) -> bytes:
    """The code of the module that defines a class, when the class is first seen."""
    file = getattr(sys.modules.get(scheme.__module__), "__file__", None)
    if file is None or not Path(file).is_file():
        return uuid4().bytes
    path = Path(file).resolve()
    return b"" if path.is_relative_to(_LIBRARY) else path.read_bytes()
