"""The pictures, launch/draw.py, and docs/schedules.md, which shows what the command gives."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel3d.base.errors import ScheduleError
from parallel3d.schedule import draw
from parallel3d.schedule.schedule import Action, Op, Span, add_sharding, bubble, simulate, unit_cost
from parallel3d.schedule.schedules import make_schedule, names, why_not

pytestmark = pytest.mark.pure

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "draw.py")
PAGE = (ROOT / "docs" / "schedules.md").read_text()
# A command, and the indented lines below it.
COMMANDS = re.findall(r"(?m)^    \$ python launch/draw\.py (.*)\n((?:    [^$].*\n)*)", PAGE)


def planned(name: str, *sizes: int):
    return simulate(make_schedule(name, *sizes), unit_cost)


def sharded(name="breadth_first", sizes=(2, 4, 3), weights="per_pass"):
    schedule = add_sharding(make_schedule(name, *sizes), weights, True)
    return schedule, simulate(schedule, unit_cost)


def test_wide_grid_is_cut_into_panels() -> None:
    text = draw.text_grid(planned("interleaved", 4, 8, 2))
    assert max(map(len, text.splitlines())) <= 100
    panels = text.split("\n\n")
    assert len(panels) == 3
    rank_0 = "".join(panel.splitlines()[1][8:].ljust(88) for panel in panels)
    assert all(f"{s}{op}{i}" in rank_0 for s in (0, 4) for op in "FB" for i in range(8))


def test_measured_spans_are_drawn_like_planned_ones() -> None:
    shifted = [
        [Span(s.action, 1e9 + 0.0101 * s.start, 1e9 + 0.0101 * s.end) for s in rank]
        for rank in planned("gpipe", 2, 2)
    ]
    lines = draw.text_grid(tuple(map(tuple, shifted))).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert [lines[1].count(label) for label in ("0F0─", "0F1─", "0B0─", "0B1─")] == [1] * 4
    assert lines[2].startswith("rank 1  ·········") and lines[2].endswith("···")


def test_svg_has_a_box_for_each_compute() -> None:
    root = ElementTree.fromstring(draw.figure([("a < b & c", planned("gpipe", 3, 4))]))
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert len(titles) == 3 * 4 * 2 and "0F0: 0 to 1" in titles
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a < b & c", "bubble 33.3%", "forward", "backward", "rank 2"} <= set(texts)


def test_panels_of_a_figure_share_one_time_scale() -> None:
    short = planned("gpipe", 2, 2)
    long = planned("gpipe", 2, 4)
    root = ElementTree.fromstring(draw.figure([("short", short), ("long", long)]))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts.index("short") < texts.index("long") and texts.count("rank 1") == 2
    boxes = [e for e in root.iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]
    widths = {(e.find(f"{SVG}title").text[1], e.get("width")) for e in boxes}
    assert sorted(op for op, _ in widths) == ["B", "F"]  # one width for each, in both
    bottom = max(float(e.get("y")) + float(e.get("height")) for e in boxes)
    assert bottom < float(root.get("height")) == float(root.get("viewBox").split()[3])


def boxes(spans):
    """Title -> (x, width, y) of each box of a picture of 1000 pixels."""
    root = ElementTree.fromstring(draw.figure([("", spans)]))
    return {
        rect.find(f"{SVG}title").text: tuple(float(rect.get(k)) for k in ("x", "width", "y"))
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }


def test_picture_shows_gathers_reductions_and_held_weights():
    schedule, spans = sharded()
    box_by_title = boxes(spans)
    scale = (1000 - 72 - 24) / draw.seconds(spans)
    rows = [box_by_title[f"{stage}F0: {at:g} to {at + 1:g}"][2] for stage, at in ((0, 1), (1, 2))]
    for coord, rank in enumerate(spans):
        assert draw.start(spans) == 0
        for action, start, end in rank:
            if action.op in (Op.GATHER, Op.REDUCE):
                x, width, y = box_by_title[f"{action}: {start:g} to {end:g}"]
                assert x == pytest.approx(72 + scale * start, abs=0.01)
                assert width == pytest.approx(scale * (end - start), abs=0.01)
                assert rows[coord] + 30 < y < rows[coord] + 30 + 3 * 7
    lines = [title for title in box_by_title if "are held" in title]
    assert len(lines) == sum(a.op is Op.GATHER for p in schedule.programs for a in p) == 8
    # Each of a rank's stages in a lane of its own, so that no two boxes of one lie in the other.
    assert len({y for title, (*_, y) in box_by_title.items() if "REDUCE" in title}) == 6


def test_picture_without_gathers_keeps_its_height():
    _, with_lanes = sharded()
    plain = simulate(make_schedule("breadth_first", 2, 4, 3), unit_cost)
    heights = [
        float(ElementTree.fromstring(draw.figure([("", spans)])).get("height"))
        for spans in (plain, with_lanes)
    ]
    assert heights[1] == heights[0] + 2 * 3 * 7


@pytest.mark.parametrize("weights", [None, "per_pass"])
def test_measured_run_is_simulated_with_its_own_means(weights) -> None:
    schedule = make_schedule("breadth_first", 2, 4, 3)
    schedule = add_sharding(schedule, weights, True) if weights else schedule
    costs = {Op.F: 0.25, Op.B: 1.5, Op.GATHER: 0.5, Op.REDUCE: 0.125}
    spans = simulate(schedule, lambda action: costs.get(action.op, 0.0))
    late = tuple(tuple(s._replace(start=s.start + 9, end=s.end + 9) for s in r) for r in spans)
    again, read = draw.spans_from_json(json.loads(json.dumps(draw.spans_to_json(schedule, late))))
    assert again == schedule and read == spans
    assert simulate(again, draw.mean_costs(read)) == spans
    assert draw.seconds(read) == max(span.end for rank in spans for span in rank)


@pytest.mark.parametrize("broken", [{}, {"spans": [[["0F0", 0]]]}, {"spans": [[["0B0", 0, 1]]]}])
def test_invalid_measured_run_is_refused(broken: dict) -> None:
    whole = draw.spans_to_json(make_schedule("gpipe", 1, 1), planned("gpipe", 1, 1))
    draw.spans_from_json(whole)
    with pytest.raises(ScheduleError):
        draw.spans_from_json(whole | broken if broken else broken)


def test_chrome_trace_has_the_spans() -> None:
    spans = planned("gpipe", 2, 1)
    trace = json.loads(json.dumps(draw.chrome_trace(spans)))
    events = trace["traceEvents"]
    computes = {e["name"]: (e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    second = 1e6
    assert computes == {
        "0F0": (0, 0, second),
        "1F0": (1, second, second),
        "1B0": (1, 2 * second, 2 * second),
        "0B0": (0, 4 * second, 2 * second),
    }
    begun, ended = ([e["id"] for e in events if e["ph"] == phase] for phase in "be")
    assert begun == ended and len(set(begun)) == 4


def test_lane_of_a_rank_has_only_computes():
    _, spans = sharded()
    events = draw.chrome_trace(spans)["traceEvents"]
    for rank in (0, 1):
        own = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == rank)
        assert all(a + da <= b for (a, da), (b, _) in pairwise(own))
    assert sum(e["ph"] == "b" and "GATHER" in e["name"] for e in events) == 8


def test_large_schedule_is_drawn_with_a_tenth_of_its_microbatches(monkeypatch, capsys, tmp_path):
    svg = tmp_path / "long.svg"
    sizes = ("--schedule", "one_f_one_b", "--pp", "4", "--microbatches", "1125")
    assert run_script(monkeypatch, *sizes, "--svg", str(svg)) == 0
    text = capsys.readouterr().out
    title = "one_f_one_b: 4 ranks, 1125 microbatches (125 of them drawn)"
    assert title in text and title in svg.read_text()
    assert "bubble          0.3% of" in text and "bubble 0.3%" in svg.read_text()
    titles = [e.text for e in ElementTree.fromstring(svg.read_text()).iter(f"{SVG}title")]
    assert len(titles) == 4 * 125 * 2


@pytest.mark.parametrize("name", names())
def test_number_of_drawn_microbatches_is_valid_for_every_schedule(name):
    for pp, per_rank, count in product((1, 2, 5, 64), (1, 2, 3), (1, 2, 7, 130, 999, 5000)):
        few = draw.microbatches_drawn(pp, count, per_rank)
        assert 0 < few <= count and (count - few) % pp == 0
        assert few == count or few > 2 * pp
        if not why_not(name, pp, count, per_rank):
            assert not why_not(name, pp, few, per_rank)


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(SCRIPT, run_name="__main__")
    return exit_.value.code


def test_json_has_the_schedule_as_it_runs(monkeypatch, capsys) -> None:
    arguments = ("--schedule", "interleaved", "--pp", "2", "--microbatches", "2")
    assert run_script(monkeypatch, *arguments, "--stages-per-rank", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    schedule = make_schedule("interleaved", 2, 2, 2)
    programs = tuple(tuple(map(Action.parse, program)) for program in report.pop("programs"))
    assert programs == schedule.programs
    assert report == {
        "name": "interleaved",
        "num_microbatches": 2,
        "pp_coord_of_stage": [0, 1, 0, 1],
        "bubble": pytest.approx(1 / 5),
        "peak_in_flight": [4, 3],
    }


def test_json_has_the_gathers_of_zero_3(monkeypatch, capsys) -> None:
    sizes = ("--schedule", "gpipe", "--pp", "2", "--microbatches", "2", "--weights", "per_step")
    assert run_script(monkeypatch, *sizes, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["programs"][0][0] == "0GATHER0"
    _, spans = sharded("gpipe", (2, 2, 1), "per_step")
    assert report["bubble"] == pytest.approx(bubble(spans)) == pytest.approx(1 / 3)


def test_picture_and_trace_are_written_and_programs_printed(monkeypatch, capsys, tmp_path) -> None:
    svg = tmp_path / "a.svg"
    trace = tmp_path / "a.json"
    sizes = ("--pp", "2", "--microbatches", "2", "--communication")
    assert run_script(monkeypatch, *sizes, "--svg", str(svg), "--trace", str(trace)) == 0
    printed = capsys.readouterr()
    out = printed.out
    assert "rank 1  ····1F0 1F1 1B0──── 1B1──── ········" in out
    assert "33.3%" in out and "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1" in out
    assert f"written to {svg}" in printed.err and f"written to {trace}" in printed.err
    assert svg.read_text().startswith("<svg") and json.loads(trace.read_text())["traceEvents"]


def test_measured_run_is_drawn_below_its_simulation(monkeypatch, capsys, tmp_path) -> None:
    schedule = make_schedule("gpipe", 2, 2)
    file = tmp_path / "spans.json"
    svg = tmp_path / "a.svg"
    file.write_text(json.dumps(draw.spans_to_json(schedule, planned("gpipe", 2, 2))))
    assert run_script(monkeypatch, "--measured", str(file), "--svg", str(svg)) == 0
    out = capsys.readouterr().out
    for title in ("gpipe, simulated: 9000 ms", "gpipe, measured: 9000 ms"):
        assert title in out and title in svg.read_text()
    assert out.count("rank 0  0F0 0F1 ············0B0──── 0B1────") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "gpip"], "did you mean 'gpipe'"),
        (["--microbatches", "0"], "--microbatches = 0: is too small; use 1 or more"),
        (["--microbatches", "1e9"], "microbatches = 1e9: is too large"),
        (["--pp", "two"], "--pp = two: must be a whole number; use 1 or more"),
        (["--pp", "1000", "--microbatches", "1000"], "more than 200,000 forwards in all"),
        (
            ["--svg", "/no/such/folder/a.svg"],
            "the folder '/no/such/folder' does not exist; create it",
        ),
        (["--trace", "/"], '--trace = "/": is a folder; name a file in it'),
        (["more"], "more: unknown argument"),
        (["--measured", "/no/such/spans.json"], "use a run's profile/spans.json"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(
    monkeypatch, capsys, arguments, message
) -> None:
    assert run_script(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert "Traceback" not in captured.err


def test_draw_runs_without_torch() -> None:
    code = "import runpy, sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
    code += f"sys.argv = ['draw.py']; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bubble          27.3%" in done.stdout


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_command_of_the_page_prints_the_text_of_the_page(
    command, shown, tmp_path, monkeypatch, capsys
) -> None:
    arguments = shlex.split(command)
    place = arguments.index("--svg") + 1
    expected = (ROOT / arguments[place]).read_text()
    assert f"]({Path(arguments[place]).relative_to('docs')})" in PAGE
    arguments[place] = str(tmp_path / "picture.svg")
    monkeypatch.chdir(ROOT)
    assert run_script(monkeypatch, *arguments) == 0
    lines = [line.removeprefix("    ").rstrip() for line in shown.rstrip().splitlines()]
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == printed[: len(lines)]
    assert (tmp_path / "picture.svg").read_text() == expected


def test_page_shows_every_schedule_planned_and_measured():
    """A schedule that was added without a measured run needs no place on the page."""
    measured = {file.stem for file in (ROOT / "docs" / "schedules").glob("*.json")}
    assert {"gpipe", "interleaved", "one_f_one_b", "v_shape"} <= measured <= set(names())
    for name in measured:
        assert f"## `{name}`" in PAGE
        assert any(f"--schedule {name} " in command for command, _ in COMMANDS), name
        assert any(f"--measured docs/schedules/{name}.json" in c for c, _ in COMMANDS), name
