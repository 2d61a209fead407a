"""First lines of docstrings: what the page shows, and that each makes sense without its neighbours.

`python docs/first_lines.py` prints the page; docs/architecture.md says how a line is to be written.
"""

import pytest

from docs import first_lines

pytestmark = pytest.mark.pure

ROOMS = sorted(
    f"parallel3d/{path.name}"
    for path in (first_lines.ROOT / "parallel3d").iterdir()
    if (path / "__init__.py").is_file()
)


def line(text):
    return first_lines.Line("a.py", "f", text)


def broken(rooms):
    lines = list(first_lines.of_rooms(rooms))
    assert lines
    return [f"{at.path} {at.name}: {at.text}" for at in lines if at.problem]


@pytest.mark.parametrize("room", ROOMS)
def test_no_line_breaks_a_rule(room):
    assert broken([room]) == []


def test_no_line_of_a_file_outside_the_rooms_breaks_a_rule():
    files = [f"parallel3d/{path.name}" for path in (first_lines.ROOT / "parallel3d").glob("*.py")]
    assert len(files) > 10
    assert broken(files) == []


@pytest.mark.parametrize(
    "text",
    [
        "Those of each coordinate.",
        "That of a setting.",
        "The same where nothing is fixed.",
        "Of the whole run.",
        "Its largest parameter.",
        "Prints the rows.",
        "Bytes in a stage's forwards, in its backwards, as a forward",
        "The bytes, and those of each stage.",
    ],
)
def test_a_line_that_needs_its_neighbours_is_found(text):
    assert line(text).problem


@pytest.mark.parametrize(
    "text",
    [
        "Print the rows that fit.",
        "Bytes of page-locked memory.",
        'What is said of a model, or "".',
        "Whether a schedule can be run.",
        "Checks of the machines that a run is started on.",
    ],
)
def test_a_line_that_stands_alone_is_not(text):
    assert not line(text).problem


def test_the_page_has_files_classes_and_their_members(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["first_lines.py", "parallel3d/plan/search/remedy.py"])
    with pytest.raises(SystemExit) as ended:
        first_lines.main()
    page = capsys.readouterr().out
    assert not ended.value.code
    assert page.startswith("parallel3d/plan/search/remedy.py\n    Whether a setting fits")
    assert "\n    Room: " in page and "\n    Room.fits: " in page and "_nearby" not in page
