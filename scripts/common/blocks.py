"""Replaces the generated parts of documents that are otherwise written by hand.

A *block* is what stands between two markers, each on a line of its own:

    <!-- begin NAME: python -m scripts.bench.linear --write -->
    <!-- end NAME -->

The command in the first marker is for readers: it says what writes the block.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def replace_block(path: Path, name: str, text: str) -> None:
    """Writes `text` between the markers of a block; everything else in the document stays.

    Raises:
        ValueError: the document does not have exactly one pair of markers of that name.
    """
    document = path.read_text()
    start, end = _span(path, document, name)
    path.write_text(f"{document[:start]}\n\n{text.strip()}\n\n{document[end:]}")


def read_block(path: Path, name: str) -> str:
    """Returns what stands between the markers of a block; raises as `replace_block` does."""
    document = path.read_text()
    start, end = _span(path, document, name)
    return document[start:end].strip()


def _span(path: Path, document: str, name: str) -> tuple[int, int]:
    """Where the text of a block starts and ends."""
    escaped = re.escape(name)
    begins = list(re.finditer(rf"^<!-- begin {escaped}(: .*)? -->$", document, re.MULTILINE))
    ends = list(re.finditer(rf"^<!-- end {escaped} -->$", document, re.MULTILINE))
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise ValueError(
            f"{path}: block {name!r} has {len(begins)} begin and {len(ends)} end markers; it needs "
            f"one '<!-- begin {name}: COMMAND -->' and, after it, one '<!-- end {name} -->'"
        )
    return begins[0].end(), ends[0].start()
