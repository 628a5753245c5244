"""The site of the documentation builds without warnings, and all its links work."""

import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Page as BrowserPage
from playwright.sync_api import sync_playwright

from scripts.site import __main__ as site

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert site.build(folder) == 0
    return folder


class Page(HTMLParser):
    """The links of a page, and the anchors in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("a", "link", "img", "script"):
            self.links.add(given.get("href") or given.get("src") or "")
        self.ids.add(given.get("id") or "")


def test_links_lead_somewhere(built: Path) -> None:
    pages = {path: Page(path) for path in built.rglob("*.html")}
    assert len(pages) > 20
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchors = pages[target].ids if target in pages else set()
            if not target.exists() or (address.fragment and address.fragment not in anchors):
                broken.append(f"{path.relative_to(built)}: {link}")
    assert broken == []


@pytest.mark.parametrize("package", site.PACKAGES)
def test_every_public_name_is_there(built: Path, package: str) -> None:
    text = (built / "api" / f"{package}.html").read_text()
    page = Page(built / "api" / f"{package}.html")
    short = {text.split(".")[-1] for text in page.ids}
    names = site.public_names(package)
    assert [name for name in names if name not in short and f">{name}<" not in text] == []


def test_guides_are_in_groups_and_the_api_begins_with_what_is_called_first(built: Path) -> None:
    front = (built / "index.html").read_text()
    captions = re.findall(r'caption-text">([^<]+)', front)
    assert captions == [*site.guides(), "API"]
    named = [name for names in site.guides().values() for name in names]
    pages = {page.name for page in (site.ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(named) == sorted(pages)
    first = list(site.public_names("fp8_dist"))[:5]
    assert {"convert_to_float8_training", "attach_update", "Float8LinearConfig"} <= {*first}


@pytest.fixture(scope="module")
def front_page(built: Path) -> Iterator[BrowserPage]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        required = os.environ.get("FP8_DIST_REQUIRE_BROWSER") == "1"
        (pytest.fail if required else pytest.skip)("no Chromium or Chrome is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--disable-gpu"])
        page = browser.new_page()
        page.goto((built / "index.html").as_uri())
        yield page
        browser.close()


@pytest.mark.parametrize("width", [500, 1400])
def test_no_line_of_code_is_cut_off(built: Path, front_page: BrowserPage, width: int) -> None:
    front_page.set_viewport_size({"width": width, "height": 900})
    wider = (
        "pres => pres.filter(pre => pre.scrollWidth > pre.clientWidth).map(pre => pre.innerText)"
    )
    for name in ("debugging", "tensor_parallel", "api/fp8_dist"):
        front_page.goto((built / f"{name}.html").as_uri())
        assert front_page.locator("pre").count()
        assert front_page.eval_on_selector_all("pre", wider) == [], name
