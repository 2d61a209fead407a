"""The site of mkdocs.yml: pages, and (`-m slow`, with the extra `docs`) its build."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from docs import site_pages

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]


def test_navigation_names_each_existing_page_once():
    named = re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(named) == len(set(named)) > 20
    missing = [name for name in named if not (ROOT / "docs" / name).is_file()]
    assert missing == ["index.md"]  # made from README.md


def test_reference_has_every_module():
    rooms = dict(site_pages.rooms())
    names = {"parallel3d.base", "parallel3d.plan", "parallel3d.schedule", "parallel3d.mesh"}
    assert names <= rooms.keys()
    assert "parallel3d.plan.memory.peak" in rooms["parallel3d.plan"]
    assert "parallel3d.base.errors" in rooms["parallel3d.base"]
    page = site_pages.reference_page("parallel3d.plan", rooms["parallel3d.plan"])
    assert page.startswith("# parallel3d.plan\n") and "::: parallel3d.plan.setting" in page


def test_readme_links_are_rewritten_for_the_site():
    page = site_pages.home_page(
        "[a](docs/planner.md) ![b](docs/c.svg) [d](configs/ds.json) [e](https://f.org/g)"
    )
    assert page == "[a](planner.md) ![b](c.svg) d (`configs/ds.json`) [e](https://f.org/g)"


class Page(HTMLParser):
    """What a built page links to, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.links = []
        self.anchors = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_built_site_has_no_broken_links(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {path: Page(path) for path in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 40
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlparse(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            is_missing = anchor and target in pages and anchor not in pages[target].anchors
            if is_missing or not target.exists():
                broken.append((path.name, link))
    assert broken == []
