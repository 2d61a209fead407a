"""What the documents show is what the commands print, and what they link to is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.architectures_page import architectures_document
from docs.config_page import config_document
from parallel3d import models

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]


def draw(*arguments):
    command = [sys.executable, "launch/draw.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_readme_shows_the_schedule_printed_by_draw(tmp_path):
    picture = tmp_path / "schedule.svg"
    grid = draw("--schedule", "gpipe", "--pp", "2", "--microbatches", "4", "--svg", str(picture))
    readme = (ROOT / "README.md").read_text()
    for line in grid.splitlines()[:3]:
        assert line.rstrip() in readme, line
    assert picture.read_text() == (ROOT / "docs" / "gpipe-pp2-m4.svg").read_text()


def headings(page):
    """The anchors of a Markdown file's headings, as mkdocs makes them."""
    anchors = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", page.read_text()):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        anchors.add(re.sub(r"[-\s]+", "-", plain))
    return anchors


def test_links_lead_to_files_and_headings():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"`[^`]*`", "", page.read_text())
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path, _, anchor = target.partition("#")
            if "://" not in target:
                place = page.parent / path if path else page
                assert place.exists(), (page.name, target)
                assert not anchor or anchor in headings(place), (page.name, target)


def test_table_of_settings_is_up_to_date(monkeypatch):
    """Of the families that it names: one that is being added does not make it wrong."""
    page = (ROOT / "docs" / "config.md").read_text()
    named = [family for family in models.families() if f'"{family}"' in page]
    assert {"gpt", "llama"} <= set(named)
    monkeypatch.setattr(models, "families", lambda: named)
    assert page == config_document(), "run: python docs/config_page.py > docs/config.md"


def test_table_of_architectures_is_up_to_date():
    page = (ROOT / "docs" / "architectures.md").read_text()
    command = "python docs/architectures_page.py > docs/architectures.md"
    assert page == architectures_document(), f"run: {command}"
