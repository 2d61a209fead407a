"""The planner's first rows beside published meshes, as docs/planner.md shows them."""

from pathlib import Path

import pytest

from benchmarks.first_rows import CLOSE, NAMES, rows

pytestmark = pytest.mark.pure

PAGE = (Path(__file__).parents[2] / "docs/planner.md").read_text(encoding="utf-8")
QUICK = ("1.5B, one RTX 4090",)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_published_mesh_is_close_or_the_page_says_why(name):
    for row in rows(name):
        assert row.line in PAGE
        assert bool(row.case.reason) == (row.ratio > CLOSE)
        setting = row.first.setting
        assert setting.mesh.tp <= row.first.request.hardware.sharing(setting.mesh.ranks)


def test_page_has_a_row_for_each_of_twelve_requests():
    assert len(NAMES) == 12
    assert all(f"| {name}, " in PAGE for name in NAMES)
