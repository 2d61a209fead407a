"""The page on schedules shows what the commands give."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from parallel3d.schedule.schedules import names

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
# A command, and the indented lines below it.
COMMANDS = re.findall(r"(?m)^    \$ python (launch/draw\.py .*)\n((?:    [^$].*\n)*)", PAGE)


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_a_command_of_the_page_gives_what_the_page_shows(
    command, shown, tmp_path, monkeypatch, capsys
):
    arguments = shlex.split(command)
    picture = tmp_path / "picture.svg"
    expected = None
    if "--svg" in arguments:
        place = arguments.index("--svg") + 1
        expected = (ROOT / arguments[place]).read_text()
        assert f"]({Path(arguments[place]).relative_to('docs')})" in PAGE
        arguments[place] = str(picture)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(arguments[0], run_name="__main__")
    assert exit_.value.code == 0
    lines = [line.removeprefix("    ").rstrip() for line in shown.rstrip().splitlines()]
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    if lines:
        assert lines == printed[: len(lines)]
    if expected is not None:
        assert picture.read_text() == expected


def test_the_page_shows_every_measured_schedule_planned_and_measured():
    """A schedule that was added without a measured run needs no place on the page."""
    measured = {file.stem for file in (ROOT / "docs" / "schedules").glob("*.json")}
    assert {"gpipe", "interleaved", "one_f_one_b", "v_shape"} <= measured <= set(names())
    for name in measured:
        assert f"## `{name}`" in PAGE
        assert any(f"--schedule {name} " in command for command, _ in COMMANDS), name
        assert any(f"--measured docs/schedules/{name}.json" in c for c, _ in COMMANDS), name
