"""docs/museum.md is what the recorded results and the exhibits say."""

import json
from pathlib import Path

import pytest

from parallel3d.verify.museum import exhibits
from parallel3d.verify.museum.page import page

pytestmark = pytest.mark.gloo

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_one_that_is_generated():
    measured = json.loads((DOCS / "museum.json").read_text())
    assert measured["exhibits"].keys() == set(exhibits.names())
    assert all(record["seen"] for record in measured["exhibits"].values())
    assert (DOCS / "museum.md").read_text() == page(measured)
