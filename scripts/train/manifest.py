"""Manifest of a checkpoint, which names every file of a folder, with its size and checksum.

A checkpoint is written into a hidden folder beside its final place. Its files are synced, its
manifest is written and synced last, and the folder is renamed. So a folder with the final name was
complete once; :func:`read_checkpoint` finds out whether it still is.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# DCP's own table of contents. It is not among the files of a rank.
_METADATA = ".metadata"
_NAME = re.compile(r"step-(\d{8,})")


class RefusedCheckpoint(ValueError):
    """A run can't continue from a checkpoint; the text names it and says why."""


class DamagedCheckpoint(RefusedCheckpoint):
    """A folder is no complete checkpoint; the text names the folder and what is wrong."""


def folder_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint after a step."""
    return root / f"step-{step:08d}"


def unfinished_folder_of(root: Path, step: int) -> Path:
    """Folder of a checkpoint while it is written."""
    return root / f".{folder_of(root, step).name}.unfinished"


def checkpoints_in(root: Path) -> dict[int, Path]:
    """The folders that are called like a checkpoint, by step, the newest first."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def publish(root: Path, step: int, facts: dict[str, Any]) -> Path:
    """Turn a written, unfinished folder into a checkpoint; one process calls it.

    Args:
        root: the folder of all checkpoints.
        step: the step that the checkpoint was taken after.
        facts: what else the manifest says, as JSON can hold it.

    Raises:
        OSError: a file could not be written or renamed; there is no such checkpoint then.
    """
    source, target = unfinished_folder_of(root, step), folder_of(root, step)
    files = {
        str(file.relative_to(source)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(source.rglob("*"))
        if file.is_file()
    }
    with (source / MANIFEST).open("w") as stream:
        stream.write(json.dumps({"step": step, **facts, "files": files}, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(source)
    remove(target)  # a damaged one, or it would not have been written again
    source.rename(target)
    _sync_folder(root)
    return target


def read_checkpoint(path: Path, contents: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint, all of whose files were compared with it.

    Args:
        path: the folder.
        contents: read the files and compare their checksums; False: only their sizes.

    Raises:
        DamagedCheckpoint: it is not complete, or a file has changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {str(name): dict(facts) for name, facts in manifest["files"].items()}
        for key in ("step", "mesh", "recipe", "model"):
            manifest[key]
    except FileNotFoundError:
        what = f"has no {MANIFEST}" if path.is_dir() else "does not exist"
        raise DamagedCheckpoint(f"{path} {what}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{path}: {MANIFEST} can't be read ({type(error).__name__}: {error})"
        ) from None
    if _METADATA not in files:
        raise DamagedCheckpoint(f"{path}: {MANIFEST} does not list {_METADATA}")
    for name, facts in files.items():
        _check_file(path, name, facts, contents)
    return manifest


def _check_file(folder: Path, name: str, facts: dict[str, Any], contents: bool) -> None:
    file = folder / name
    if not file.is_file():
        raise DamagedCheckpoint(f"{folder}: {name} is missing")
    size = file.stat().st_size
    if size != facts.get("bytes"):
        raise DamagedCheckpoint(f"{folder}: {name} has {size} of {facts.get('bytes')} bytes")
    try:
        if contents and _sha256(file) != facts.get("sha256"):
            raise DamagedCheckpoint(f"{folder}: the contents of {name} have changed")
    except OSError as error:
        raise DamagedCheckpoint(f"{folder}: {name} can't be read ({error})") from None


def remove(path: Path) -> None:
    """Delete a folder, if it is there, such that a part of it is never taken for a checkpoint."""
    if path.name.startswith("."):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        hidden = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Delete what killed runs were writing or deleting."""
    for pattern in (".step-*.unfinished", ".step-*.deleted"):
        for path in root.glob(pattern):
            remove(path)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
