"""The museum's page and table say what was measured, and what the exhibits say."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from parallel3d.base.mesh_sizes import MeshSizes
from tests.museum import command, exhibits
from tests.museum.curve import OTHER_RUNS, Leg, curve_config, curve_of
from tests.museum.exhibit import KINDS
from tests.museum.halls import hall
from tests.museum.page import page
from tests.museum.shown import PARTS, mark, mark_of, stored
from tests.museum.tour import Visit

pytestmark = pytest.mark.gloo

DOCS = Path(__file__).parents[2] / "docs"


def test_page_is_up_to_date():
    measured = json.loads((DOCS / "museum.json").read_text())
    assert measured["exhibits"].keys() == set(exhibits.names())
    assert all(record["seen"] for record in measured["exhibits"].values())
    curves = stored()["exhibits"]
    halls = {name: record["hall"] for name, record in measured["exhibits"].items()}
    assert {name: of["hall"] for name, of in curves.items()}.items() <= halls.items()
    assert (DOCS / "museum.md").read_text() == page(measured, stored())


@pytest.mark.parametrize(
    ("curve", "shows", "tenth"),
    [
        ([3.0] * PARTS, False, None),
        ([3.2] * PARTS, False, None),  # right runs are 0.2 apart: as far again is no sign
        ([3.0] * 6 + [3.31] + [3.0] * 3, True, 6),
        ([3.0] * 6 + [2.69] + [3.0] * 3, True, 6),
        ([3.0] * 9 + [None], True, 9),
        ([3.0, 3.31, 3.0, 3.0, 3.0], True, 6),  # a run that goes on from halfway
        ([None], True, 9),
    ],
)
def test_curve_is_compared_with_right_runs_of_other_seeds(curve, shows, tenth):
    right = [[2.9] * PARTS, [3.1] * PARTS, [3.0] * PARTS]
    result = mark_of(tuple(curve), right)
    assert result.shows == shows
    assert tenth is None or result.tenth == tenth


def test_stored_curves_come_from_halls_without_a_false_alarm():
    """A right run of the exhibits' seed shows nothing; a bug that ruins training is shown."""
    curves = stored()
    for title, (own, *others) in curves["right"].items():
        assert len(others) == OTHER_RUNS and len(own) == PARTS, title
        assert not mark_of(tuple(own), others).shows, title
    marks = [mark(name, curves) for name in ("read_before_it_arrived", "evaluated_with_dropout")]
    assert [one.shows for one in marks] == [True, False]


def test_table_has_eighty_columns_and_a_miss_fails(monkeypatch, tmp_path):
    names = exhibits.names()
    visits = [Visit(name, "resume: order of samples", 2e-3, 123.4) for name in names]
    visits += [Visit(names[0]), Visit(names[0], not_held="fewer key/value heads than tp")]
    monkeypatch.setattr(command, "tour", lambda *of: (("gpt", visit) for visit in visits))
    curves = stored()
    del curves["exhibits"][names[1]]
    monkeypatch.setattr(command, "stored", lambda: curves)
    text = io.StringIO()
    report = command.show(None, tmp_path, Console(file=text, width=300))
    head, *lines = text.getvalue().splitlines()
    assert head.split() == ["exhibit", "seen", "by", "size", "s", "curve"]
    assert len(lines) == len(visits) + 2 + len(KINDS) and max(map(len, lines)) <= 80
    assert lines[names.index("read_before_it_arrived")].endswith(" 123.4  shown")
    assert lines[1].endswith(" -") and " MISSED " in lines[len(names)]
    assert not report["passed"]
    for kind, words in KINDS.items():
        own = [name for name in names if exhibits.load(name).EXHIBIT.kind == kind]
        missed = exhibits.load(names[0]).EXHIBIT.kind == kind
        right = {"seen": len(own), "total": len(own) + missed}
        assert report["kinds"][kind] == right and any(line.endswith(words) for line in lines)
    shown = {record["name"]: record["curve_shows"] for record in report["exhibits"]}
    assert shown["read_before_it_arrived"] is True and shown[names[1]] is None


@pytest.mark.slow
def test_curve_resumed_on_another_mesh_equals_the_unbroken_one(tmp_path):
    """So what an exhibit of a resume shows is the exhibit's."""
    config = hall("gpt")
    saved = tmp_path / "saved"
    whole = curve_of(curve_config(config, MeshSizes(tp=2), 0, tmp_path), Leg(saves=saved), tmp_path)
    rest = curve_of(
        curve_config(config, MeshSizes(pp=2, dp=2), 0, tmp_path), Leg(resumes=saved), tmp_path
    )
    assert rest == pytest.approx(whole[PARTS // 2 :], abs=2e-3)
    assert whole[-1] < whole[0] - 1
