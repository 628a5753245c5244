"""Text as bytes, and batches of it that depend on (seed, step) alone.

By default the text is the source of the Python standard library of this machine: real text that
needs no download.
"""

import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256  # one token per byte value
MAX_BYTES = 8 * 2**20  # longer texts are cut off
# Folders of the standard library that are left out: tests, and code that is not its own.
_NOT_LIBRARY_SOURCE = {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Corpus:
    """A text, one token per byte."""

    text: bytearray
    source: str  # where the text came from, for people

    def batch(
        self, *, seed: int, step: int, batch_size: int, seq_len: int, rank: int = 0, ranks: int = 1
    ) -> tuple[Any, Any]:
        """Draw the rows of one data-parallel rank from the global batch of a step.

        The global batch depends on `seed`, `step`, `batch_size` and `seq_len` alone, so runs with
        different recipes and meshes see the same data.

        `batch_size` must be a multiple of `ranks`, and the text longer than `seq_len` tokens.

        Returns:
            Inputs and targets, both int64 of shape (batch_size / ranks, seq_len). Targets are the
            inputs shifted by one token.
        """
        assert batch_size % ranks == 0, f"{batch_size} rows on {ranks} ranks"
        torch = import_module("torch")
        # The CPU generator uses only 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
        starts = torch.randint(len(self.text) - seq_len, (batch_size,), generator=generator)
        mine = starts.chunk(ranks)[rank]
        tokens = torch.frombuffer(self.text, dtype=torch.uint8)
        windows = tokens[mine[:, None] + torch.arange(seq_len + 1)].long()
        return windows[:, :-1], windows[:, 1:]


@cache
def load_corpus(path: Path | None, *, seq_len: int) -> Corpus:
    """Read a text. The result is the same in every call and on every rank of a machine.

    Args:
        path: a file, or a folder whose files (except hidden ones) are joined in the order of
            their paths. None: the standard library's `*.py` files.
        seq_len: the length of a row, which the text must exceed.

    Raises:
        ValueError: `path` does not exist, or the text is too short.
    """
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        files = _files(path, "*.py", skip=_NOT_LIBRARY_SOURCE.__contains__)
    elif path.is_file():
        files = [path]
    elif path.is_dir():
        files = _files(path, "*", skip=lambda name: name.startswith("."))
    else:
        raise ValueError(f"{path}: no such file or folder")
    text = _read(files)
    if len(text) <= seq_len:
        raise ValueError(
            f"{path} has {len(text)} bytes of text ({len(files)} files), but rows of {seq_len} "
            f"tokens need more: give a longer text or use shorter rows"
        )
    return Corpus(text, f"{path} ({len(files)} files)")


def load_packages(most: int) -> Corpus:
    """Read the source of the standard library and of installed packages.

    Each content is taken once, however many files have it. The result is the same on every rank of
    a machine.

    Args:
        most: the number of bytes after which the text is cut off.
    """
    folders = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    skip = _NOT_LIBRARY_SOURCE.__contains__
    files = [file for root in folders for file in _files(root, "*.py", skip=skip)]
    text, contents = bytearray(), set[bytes]()
    for file in files:
        if len(text) >= most:
            break
        content = file.read_bytes()
        if content not in contents:
            contents.add(content)
            text += content
    source = f"{len(contents)} files of Python's library and installed packages"
    return Corpus(text[:most], source)


def _files(root: Path, pattern: str, skip: Callable[[str], bool]) -> list[Path]:
    return sorted(
        file
        for file in root.rglob(pattern)
        if file.is_file() and not any(map(skip, file.relative_to(root).parts))
    )


def _read(files: list[Path]) -> bytearray:
    text = bytearray()
    for file in files:
        if len(text) >= MAX_BYTES:
            break
        text += file.read_bytes()
    return text[:MAX_BYTES]
