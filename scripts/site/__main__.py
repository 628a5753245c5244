"""Build the site: python -m scripts.site [FOLDER] (default: build/site).

The front page is the README. The other pages are those of docs/, grouped as in docs/README.md, and
a page of docstrings for each public package. Warnings of Sphinx are errors. Needs the extra `docs`.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.cmd.build import main as sphinx
from sphinx.ext.autodoc.mock import mock

import fp8_dist
from scripts.common.options import command_parser

ROOT = Path(__file__).resolve().parents[2]
# Each package with a public interface, and its title.
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


def staged(page: Path) -> str:
    """The text of a page for the site, where only links to pages of the site remain links."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if "://" in target or target.endswith(".png"):
            return match.group()
        path = (page.parent / target).resolve()
        name = "index.md" if path == ROOT / "README.md" else path.name
        is_page = name == "index.md" or (path.parent == ROOT / "docs" and name != "README.md")
        return f"[{text}]({name}{anchor or ''})" if is_page else text

    return LINK.sub(link, page.read_text())


def public_names(package: str) -> dict[str, Any]:
    """The objects of a package's ``__all__``, by name, sorted by how often the pages use them."""
    with mock(["torchtitan"]):  # it is installed in its own environment
        module = import_module(package)
    texts = [page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    uses = Counter(re.findall(r"\w+", " ".join(texts)))
    names = sorted(module.__all__, key=lambda name: (-uses[name], name))
    return {name: getattr(module, name) for name in names}


def api_page(package: str, title: str) -> str:
    """A page with the docstrings of all public names of a package."""
    lines = [f"# {package}: {title}", "", "```{eval-rst}"]
    lines += [f".. automodule:: {package}", "   :no-members:", ""]
    for name, value in public_names(package).items():
        if name.startswith("__"):
            lines += [f".. py:data:: {package}.{name}", f"   :value: {value!r}", ""]
            continue
        kind = "class" if isinstance(value, type) else "function"
        lines += [f".. auto{kind}:: {package}.{name}"]
        lines += ["   :members:"] * (kind == "class")
        bases = {base.__module__ for base in getattr(value, "__mro__", ()) if base is not object}
        if bases and all(module.startswith("fp8_dist") for module in bases):
            lines += ["   :inherited-members:"]
        elsewhere = package != "fp8_dist" and name in fp8_dist.__all__
        lines += ["   :no-index:"] * elsewhere + [""]
    return "\n".join([*lines, "```", ""])


def guides() -> dict[str, list[str]]:
    """The pages of each group of docs/README.md."""
    _, *sections = re.split("^## ", (ROOT / "docs" / "README.md").read_text(), flags=re.M)
    links = {text.partition("\n")[0]: [link[1] for link in LINK.findall(text)] for text in sections}
    return {group: [n for n in names if not n.startswith("..")] for group, names in links.items()}


def contents(groups: Mapping[str, Sequence[str]]) -> str:
    """The site's table of contents: a list of pages under each title."""
    tree = "```{{toctree}}\n:hidden:\n:caption: {}\n{}\n```\n"
    return "".join("\n" + tree.format(title, "\n".join(names)) for title, names in groups.items())


def build(target: Path) -> int:
    """Build the site in a folder, and return Sphinx's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        (source / "api").mkdir()
        groups = guides()
        for name in [name for names in groups.values() for name in names]:
            (source / name).write_text(staged(ROOT / "docs" / name))
        for picture in (ROOT / "docs").glob("*.png"):
            (source / picture.name).write_bytes(picture.read_bytes())
        groups["API"] = [f"api/{package}" for package in PACKAGES]
        (source / "index.md").write_text(staged(ROOT / "README.md") + contents(groups))
        for package, title in PACKAGES.items():
            (source / "api" / f"{package}.md").write_text(api_page(package, title))
        options = ["-W", "--keep-going", "-q", "-E", "-b", "html", "-c", str(Path(__file__).parent)]
        return sphinx([*options, str(source), str(target)])


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.site", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    target = parser.parse_args(argv).folder
    status = build(target)
    if status == 0:
        print(f"open {target / 'index.html'}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
