"""What ZeRO gathers, holds and reduces is in the pictures, where the simulation has it."""

import json
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel3d.schedule import draw
from parallel3d.schedule.action import Op
from parallel3d.schedule.schedule import add_sharding, bubble, simulate, unit_cost
from parallel3d.schedule.schedules import make_schedule

pytestmark = pytest.mark.pure

SVG = "{http://www.w3.org/2000/svg}"


def sharded(name="breadth_first", sizes=(2, 4, 3), weights="per_pass", cost=unit_cost):
    schedule = add_sharding(make_schedule(name, *sizes), weights, True)
    return schedule, simulate(schedule, cost)


def boxes(spans):
    """Title -> (x, width, y) of each box of a picture of 1000 pixels."""
    root = ElementTree.fromstring(draw.figure([("", spans)]))
    return {
        rect.find(f"{SVG}title").text: tuple(float(rect.get(k)) for k in ("x", "width", "y"))
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }


def test_the_text_has_a_line_of_marks_below_each_rank() -> None:
    _, spans = sharded("gpipe", (2, 2, 1), "per_step")
    assert draw.text_grid(spans).splitlines() == [
        "time    0       2       4       6       8       10",
        "rank 0  ····0F0 0F1 ············0B0──── 0B1──── ····",
        "        G0──                                    X0 R0",
        "rank 1  ········1F0 1F1 1B0──── 1B1──── ············",
        "        G1──                            X1 R1",
        "",
        "G: gathers a stage's weights, X: lets go of them, R: reduces its gradients",
    ]


def test_a_picture_has_a_box_for_each_gather_and_reduction_and_a_line_while_weights_are_held():
    schedule, spans = sharded()
    found = boxes(spans)
    scale = (1000 - 72 - 24) / draw.seconds(spans)
    rows = [found[f"{stage}F0: {at:g} to {at + 1:g}"][2] for stage, at in ((0, 1), (1, 2))]
    for coord, rank in enumerate(spans):
        assert draw.start(spans) == 0
        for action, start, end in rank:
            if action.op in (Op.GATHER, Op.REDUCE):
                x, width, y = found[f"{action}: {start:g} to {end:g}"]
                assert x == pytest.approx(72 + scale * start, abs=0.01)
                assert width == pytest.approx(scale * (end - start), abs=0.01)
                assert rows[coord] + 30 < y < rows[coord] + 30 + 3 * 7
    lines = [title for title in found if "are held" in title]
    assert len(lines) == sum(a.op is Op.GATHER for p in schedule.programs for a in p) == 8
    # Each of a rank's stages in a lane of its own, so that no two boxes of one lie in the other.
    assert len({y for title, (*_, y) in found.items() if "REDUCE" in title}) == 6


def test_a_picture_without_them_is_as_high_as_it_was():
    _, with_lanes = sharded()
    plain = simulate(make_schedule("breadth_first", 2, 4, 3), unit_cost)
    heights = [
        float(ElementTree.fromstring(draw.figure([("", spans)])).get("height"))
        for spans in (plain, with_lanes)
    ]
    assert heights[1] == heights[0] + 2 * 3 * 7


def test_a_measured_run_with_them_is_read_back_and_simulated_with_its_means():
    cost = {Op.F: 0.25, Op.B: 1.5, Op.GATHER: 0.5, Op.REDUCE: 0.125}
    schedule, spans = sharded(cost=lambda action: cost.get(action.op, 0.0))
    again, read = draw.spans_from_json(json.loads(json.dumps(draw.spans_to_json(schedule, spans))))
    assert again == schedule and read == spans
    assert simulate(again, draw.mean_costs(read)) == spans
    assert draw.seconds(read) == max(span.end for rank in spans for span in rank)


def test_the_trace_keeps_computes_alone_in_the_lane_of_a_rank():
    _, spans = sharded()
    events = draw.chrome_trace(spans)["traceEvents"]
    for rank in (0, 1):
        own = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == rank)
        assert all(a + da <= b for (a, da), (b, _) in pairwise(own))
    assert sum(e["ph"] == "b" and "GATHER" in e["name"] for e in events) == 8


def test_the_command_draws_them(monkeypatch, capsys):
    script = str(Path(__file__).parents[2] / "launch" / "draw.py")
    sizes = ["--schedule", "gpipe", "--pp", "2", "--microbatches", "2", "--weights", "per_step"]
    monkeypatch.setattr(sys, "argv", [script, *sizes, "--json"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(script, run_name="__main__")
    said = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 0 and said["programs"][0][0] == "0GATHER0"
    _, spans = sharded("gpipe", (2, 2, 1), "per_step")
    assert said["bubble"] == pytest.approx(bubble(spans)) == pytest.approx(1 / 3)
