"""What the documents refer to exists: linked files and sections, commands, paths, public names."""

import re
from collections.abc import Iterator
from pathlib import Path

import fp8_dist
from fp8_dist import debug, fsdp, tensor_parallel

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    README,
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *ROOT.glob("scripts/*.md"),
    *DOCS,
]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"(?:^|[\s`])-m\s+(scripts(?:\.\w+)+)")
FOLDERS = "docs|fp8_dist|fsdp|scripts|tensor_parallel|tests"
FILE = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w/]+\.(?:md|png|py|sh))\b")
# A call in the text, on the model or the optimizer of the reader.
CALL = re.compile(r"`(\w+)\((?:model|optimizer)\b[^`]*\)`")


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            yield target


def unknown_files(text: str) -> Iterator[str]:
    for module in MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            yield module
    for file in FILE.findall(text):
        if not (ROOT / file).is_file():
            yield file


def unknown_calls(text: str) -> set[str]:
    public = {*fp8_dist.__all__, *debug.__all__, *fsdp.__all__, *tensor_parallel.__all__}
    return set(CALL.findall(text)) - public


def test_what_pages_refer_to_exists() -> None:
    for page in PAGES:
        text = page.read_text()
        placeholders = [line for line in text.splitlines() if re.fullmatch(r"[A-Z_]{4,}", line)]
        found = [*broken_links(page, text), *unknown_files(text), *unknown_calls(text)]
        assert [*found, *placeholders] == [], page


def test_what_the_checks_find() -> None:
    text = "[a](nowhere.md) [b](docs/README.md#no-such) [c](https://x.y/z) [d](docs/README.md)"
    assert list(broken_links(README, text)) == ["nowhere.md", "docs/README.md#no-such"]
    text = "`python -m scripts.no.such --assert`, `torchrun -m scripts.none`, `bash scripts/no.sh`"
    assert list(unknown_files(text)) == ["scripts.no.such", "scripts.none", "scripts/no.sh"]
    assert unknown_calls("`no_such_call(model)`, `attach_precompute(optimizer, model)`") == {
        "no_such_call"
    }


def test_the_index_lists_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs/README.md").read_text()))
    assert {page.name for page in DOCS} - {"README.md"} <= linked
