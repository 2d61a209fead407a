"""A long timeline is drawn as the short one that it is, with a gap for what repeats itself."""

import xml.etree.ElementTree as ET

import pytest

from parallel3d.schedule import draw
from parallel3d.schedule.fold import fold
from parallel3d.schedule.schedule import simulate, unit_cost
from parallel3d.schedule.schedules import make_schedule

pytestmark = pytest.mark.pure

KINDS = [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("v_shape", 2)]


def computes(name: str, microbatches: int, per_rank: int):
    spans = simulate(make_schedule(name, 4, microbatches, per_rank), unit_cost)
    rows = [sorted((s for s in r if s.action.is_compute), key=lambda s: s.start) for r in spans]
    return tuple(map(tuple, rows)), max(s.end for r in rows for s in r)


@pytest.mark.parametrize(("name", "per_rank"), KINDS)
def test_what_is_left_is_the_timeline_of_fewer_microbatches(name: str, per_rank: int) -> None:
    whole = fold(*computes(name, 60, per_rank), most=100)
    assert len(whole.folds) == (2 if name == "gpipe" else 1)
    count = whole.folds[0].num_microbatches
    assert count % 4 == 0 and 60 - count <= 20
    short, length = computes(name, 60 - count, per_rank)
    assert whole.length == length + sum(cut.gap for cut in whole.folds)
    for found, expected in zip(whole.spans, short, strict=True):
        # Without the gaps; a compute that is cut in two is whole again.
        times = []
        for action, start, end in found:
            gaps = [cut.gap for cut in whole.folds if whole.at(cut.begin) < end]
            move = sum(gaps)
            times.append((action.op, action.stage, start - move, end - move))
        busy = sum(end - start for *_, start, end in times)
        assert busy == sum(span.end - span.start for span in expected)
        assert {t for t in times} >= {
            (s.action.op, s.action.stage, s.start, s.end)
            for s in expected
            if not any(s.start < c.begin < s.end for c in whole.folds[:1])
        } - {t for t in cut_in_two(expected, whole)}


def cut_in_two(expected, whole):
    """Computes across a cut, where they are without the gaps."""
    gone = 0.0
    for cut in whole.folds:
        begin = cut.begin - gone
        for s in expected:
            if s.start < begin < s.end:
                yield s.action.op, s.action.stage, s.start, s.end
        gone += cut.end - cut.begin


def test_a_short_timeline_is_drawn_as_it_is() -> None:
    spans, length = computes("one_f_one_b", 8, 1)
    assert fold(spans, length).spans == spans and fold(spans, length).at(3.5) == 3.5


def test_nine_thousand_actions_are_a_text_and_a_picture_of_hundreds() -> None:
    spans = simulate(make_schedule("one_f_one_b", 4, 1125), unit_cost)
    assert sum(span.action.is_compute for rank in spans for span in rank) == 9000
    text = draw.text_grid(spans)
    assert len(text.splitlines()) < 60 and text.count("… ×1,108 …") == 4
    assert "0F0" in text and "3B0" in text and "0B1124" in text and "0F500" not in text
    ruler = [int(t) for line in text.splitlines() if line[:4] == "time" for t in line[4:].split()]
    assert ruler == sorted(ruler) and ruler[0] == 0 and 3370 < ruler[-1] <= 3384
    picture = draw.figure([("long", spans)])
    assert len(picture) < 60_000
    texts = [e.text for e in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "… ×1,108 …" in texts and "0" in texts and "bubble 0.3%" in texts
    assert any(text and text.isdigit() and int(text) > 3300 for text in texts)
