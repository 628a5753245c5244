"""The verdict on a property case: right, a documented error, or a described failure."""

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fp8_dist

LIBRARY = Path(fp8_dist.__file__).resolve().parent
SOURCES = (LIBRARY, LIBRARY.parent / "fsdp", LIBRARY.parent / "tensor_parallel")
# Errors of torch itself, which docs/support.md lists ("Not possible").
OF_TORCH = re.compile(r"FSDP does not support uneven sharding on dim 1")
# Every message begins with its subject: a layer, a function, a class, or the user's code.
SUBJECT = re.compile(
    r"^(layers\.\d+\.)?(w\d|layer|Float8\w+|CastConfig\S*|[a-z]\w*(_\w+)+|float8 GEMM of|a \w+ owns|"
    r"these weights|FSDP2's first gather)\b"
)


class WrongResult(Exception):
    """A result is wrong; the text says how it differs."""


@dataclass(frozen=True)
class Verdict:
    """kind: "right", "error" (a documented one) or "FAILED"; text: the error or the failure."""

    kind: str
    text: str = ""

    @property
    def name(self) -> str:
        """The first line of the text, shortened and without numbers, for counting."""
        return re.sub(r"\d+", "N", self.text.splitlines()[0])[:90] if self.text else ""


def documented(error: Exception) -> bool:
    """Whether this is a user error of the library whose message begins with its subject."""
    if isinstance(error, NotImplementedError) and OF_TORCH.search(str(error)):
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(frame.filename).resolve()
    raised_here = any(source in file.parents for source in SOURCES)
    kinds = (ValueError, TypeError, NotImplementedError)
    return raised_here and type(error) in kinds and bool(SUBJECT.match(str(error)))


def judge(run: Callable[[], None]) -> Verdict:
    """The verdict on a run, which raises WrongResult if a result is wrong."""
    try:
        run()
    except WrongResult as error:
        return Verdict("FAILED", f"wrong: {error}")
    except Exception as error:
        if documented(error):
            return Verdict("error", f"{type(error).__name__}: {error}")
        return Verdict("FAILED", "".join(["raised: ", *traceback.format_exception(error)[-6:]]))
    return Verdict("right")
