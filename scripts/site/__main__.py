"""Builds the site: python -m scripts.site [FOLDER] (default: build/site).

The front page is the README, the pages are those of docs/, and each public package has a page of
its docstrings. What Sphinx warns of is an error. Needs the extra `docs`.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.cmd.build import main as sphinx
from sphinx.ext.autodoc.mock import mock

import fp8_dist
from scripts.common.options import command_parser

ROOT = Path(__file__).resolve().parents[2]
# Each package with a public interface, and what it is for.
PACKAGES = {
    "fp8_dist": "Converting and training",
    "fp8_dist.fsdp": "FSDP2",
    "fp8_dist.moe": "Experts",
    "fp8_dist.tensor_parallel": "Tensor and sequence parallelism",
    "fp8_dist.debug": "Debugging",
    "fp8_dist.report": "Reports of runs",
    "fp8_dist.integrations.transformers": "transformers",
    "fp8_dist.integrations.torchtitan": "torchtitan",
    "fp8_dist.tensor": "Float8Tensor",
}
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)]*)?\)")


def page_of(path: Path) -> str | None:
    """The name in the site of a Markdown file of the repository; None if it has none."""
    if path == ROOT / "README.md":
        return "index.md"
    return path.name if path.parent == ROOT / "docs" and path.name != "README.md" else None


def staged(page: Path) -> str:
    """The text of a page with links as the site has them: to other pages; else as plain text."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if "://" in target or target.endswith(".png"):
            return match.group()
        name = page_of((page.parent / target).resolve())
        return f"[{text}]({name}{anchor or ''})" if name else text

    return LINK.sub(link, page.read_text())


def public_names(package: str) -> dict[str, Any]:
    """The objects of a package's ``__all__``, by name."""
    with mock(["torchtitan"]):  # which has an environment of its own
        module = import_module(package)
    return {name: getattr(module, name) for name in sorted(module.__all__, key=str.swapcase)}


def api_page(package: str, title: str) -> str:
    """A page with the docstring of every public name of a package."""
    lines = [f"# {package}: {title}", "", "```{eval-rst}"]
    lines += [f".. automodule:: {package}", "   :no-members:", ""]
    for name, value in public_names(package).items():
        if name.startswith("__"):
            lines += [f".. py:data:: {package}.{name}", f"   :value: {value!r}", ""]
            continue
        kind = "class" if isinstance(value, type) else "function"
        lines += [f".. auto{kind}:: {package}.{name}"]
        lines += ["   :members:"] * (kind == "class")
        lines += ["   :inherited-members:"] * (kind == "class" and _is_ours(value))
        elsewhere = package != "fp8_dist" and name in fp8_dist.__all__
        lines += ["   :no-index:"] * elsewhere + [""]
    return "\n".join([*lines, "```", ""])


def _is_ours(cls: type) -> bool:
    """Whether all that a class inherits is the library's."""
    return all(base is object or base.__module__.startswith("fp8_dist") for base in cls.__mro__)


def contents(pages: Sequence[str]) -> str:
    """The site's table of contents."""
    api = [f"api/{package}" for package in PACKAGES]
    lines = ["", "```{toctree}", ":hidden:", ":caption: Guides", *pages, "```"]
    return "\n".join([*lines, "```{toctree}", ":hidden:", ":caption: API", *api, "```", ""])


def build(target: Path) -> int:
    """Build the site in a folder; returns Sphinx's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        (source / "api").mkdir()
        index = (ROOT / "docs" / "README.md").read_text()
        links = dict.fromkeys(name for _, name, _ in LINK.findall(index))
        pages = [name for name in links if page_of((ROOT / "docs" / name).resolve()) == name]
        for name in pages:
            (source / name).write_text(staged(ROOT / "docs" / name))
        for picture in (ROOT / "docs").glob("*.png"):
            (source / picture.name).write_bytes(picture.read_bytes())
        (source / "index.md").write_text(staged(ROOT / "README.md") + contents(pages))
        for package, title in PACKAGES.items():
            (source / "api" / f"{package}.md").write_text(api_page(package, title))
        conf = str(Path(__file__).parent)
        strict = ["-W", "--keep-going", "-q"]
        return sphinx([*strict, "-E", "-b", "html", "-c", conf, str(source), str(target)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("scripts.site", __doc__)
    default = ROOT / "build" / "site"
    parser.add_argument(
        "folder", nargs="?", type=Path, default=default, help="default: %(default)s"
    )
    target = parser.parse_args(argv).folder
    status = build(target)
    if status == 0:
        print(f"open {target / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
