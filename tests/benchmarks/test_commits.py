"""benchmarks/commits leaves out what no two runs share, and names the first difference."""

import json

import pytest

from benchmarks.commits.__main__ import cases, is_wanted
from benchmarks.commits.recording import MEASURED, first_difference, json_lines, untimed

pytestmark = pytest.mark.pure

HELP = """\
--mesh block (default {"pp": 1, "ring": false, "tp": 1})
    Ranks per axis.
--mesh.ring boolean (default false)
    Pass keys and values around.
--mesh.tp integer (default 1)
    Ranks; a search took 2.5 s and 0:01:30.
"""


def test_measured_values_and_missing_settings_are_left_out():
    line = json.dumps({"loss": 1.5, "mfu": 0.3, "mesh": {"pp": 2, "ring": False}})
    assert json.loads(json_lines(line, MEASURED | {"ring"})) == {"loss": 1.5, "mesh": {"pp": 2}}
    assert untimed(HELP, frozenset({"ring"})).splitlines() == [
        '--mesh block (default {"pp": 1, "tp": 1})',
        "    Ranks per axis.",
        "--mesh.tp integer (default 1)",
        "    Ranks; a search took TIME and TIME.",
    ]


def test_first_difference_is_named_by_file_and_line(tmp_path):
    for folder, loss in (("before", "2.25"), ("after", "2.26")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same\n")
        (tmp_path / folder / "metrics.txt").write_text(f"step 1\nloss {loss}\nstep 2\n")
    before = tmp_path / "before"
    after = tmp_path / "after"
    difference = first_difference(before, after)
    assert difference == "metrics.txt:2: before 'loss 2.25', after 'loss 2.26'"
    assert first_difference(before, before) == ""
    (after / "a.txt").unlink()
    assert first_difference(before, after) == "a.txt is missing after"


def test_only_selects_parts_and_single_comparisons():
    wanted = [name for name in cases() if is_wanted(name, ["published", "train/llama-muon"])]
    assert "train/llama-muon" in wanted
    assert {name.partition("/")[0] for name in wanted} == {"published", "train"}
    assert all(is_wanted(name, []) for name in cases())
