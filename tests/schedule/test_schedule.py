"""The rules of schedules, on small ones written by hand."""

from itertools import pairwise

import pytest

from parallel3d.base.errors import ScheduleError
from parallel3d.schedule.schedule import (
    Action,
    Op,
    Schedule,
    add_communication,
    needs,
    peak_in_flight,
    simulate,
    unit_cost,
    validate,
)
from parallel3d.schedule.schedules import load, make_schedule
from tests.schedule.blocking import runs_when_blocking, schedule_of

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("problem", "programs"),
    [
        ("1B0 comes before 1F0, which it needs", "0F0 0B0 / >>1B0<< 1F0"),
        ("1F0 is on rank 0; its stage is on 1", "0F0 >>1F0<< 0B0 / 1B0"),
        ("0F0 appears 2 times", ">>0F0<< >>0F0<< 0B0 / 1F0 1B0"),
        ("0F1 has no purpose: nothing uses its result", "0F0 >>0F1<< 0B0 / 1F0 1B0"),
        ("2F0 has no purpose: nothing uses its result", "0F0 0B0 / 1F0 1B0 >>2F0<<"),
        ("missing: 1B0", "0F0 0B0 / 1F0"),
        ("missing: 0I0", "0F0 0W0 / 1F0 1B0"),
        ("0B0 has no purpose: nothing uses its result", "0F0 >>0B0<< 0I0 0W0 / 1F0 1B0"),
        ("0W0 comes before 0I0, which it needs", "0F0 >>0W0<< 0I0 / 1F0 1B0"),
        ("missing: 0RECV_B0, 1RECV_F0, 1SEND_B0", "0F0 0SEND_F0 0B0 / 1F0 1B0"),
        (
            "1SEND_F0 has no purpose: nothing uses its result",
            "0F0 0SEND_F0 / 1RECV_F0 1F0 >>1SEND_F0<<",
        ),
        (
            "0SEND_F0 comes before 0F0, which it needs",
            ">>0SEND_F0<< 0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0",
        ),
        (
            "deadlock: no rank can continue from 0RECV_B0, 1RECV_F0",
            "0F0 >>0RECV_B0<< 0SEND_F0 0B0 / >>1RECV_F0<< 1F0 1B0 1SEND_B0",
        ),
    ],
)
def test_refusal_prints_the_programs_with_the_action_marked(problem: str, programs: str) -> None:
    lines = programs.split(" / ")
    bare = programs.replace(">>", "").replace("<<", "").replace(" / ", "\n")
    with pytest.raises(ScheduleError) as refusal:
        validate(schedule_of(bare, (0, 1)))
    shown = [f"  rank {rank} | {line}" for rank, line in enumerate(lines)]
    assert str(refusal.value).splitlines() == [f"schedule 'by hand': {problem}", *shown]


def test_circular_wait_is_a_deadlock() -> None:
    # A ring: each channel's two sides agree, yet each rank's first transfer waits for another's.
    ring = schedule_of(
        """
        0F0 0SEND_F0 3RECV_F0 3F0 0F1 0SEND_F1 3RECV_F1 3F1
        1RECV_F1 1F1 1RECV_F0 1F0 1SEND_F0 1SEND_F1
        2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1
        """,
        (0, 1, 2, 0),
        2,
    )
    with pytest.raises(ScheduleError, match="deadlock: no rank can continue from"):
        validate(ring)
    circle = schedule_of(
        """
        0F0 0SEND_F0 3RECV_F0 3F0 0F1 0SEND_F1 3RECV_F1 3F1
        1RECV_F0 1F0 1RECV_F1 1F1 1SEND_F0 1SEND_F1
        2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1
        """,
        (0, 1, 2, 0),
        2,
    )
    with pytest.raises(
        ScheduleError, match="deadlock: no rank can continue from 3RECV_F0, 1RECV_F1"
    ):
        validate(circle)
    assert not runs_when_blocking(circle)


def test_v_placement_with_split_backwards() -> None:
    computes = schedule_of(
        """
        0F0 0F1 3F0 3I0 3F1 3I1 3W0 3W1 0I0 0W0 0I1 0W1
        1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 2W1 1W0 1W1
        """,
        (0, 1, 1, 0),
        2,
    )
    validate(computes)
    schedule = add_communication(computes)
    validate(schedule)
    assert runs_when_blocking(schedule)
    moved = {str(action) for action in schedule.actions if action.is_send}
    crossing = ("0SEND_F", "2SEND_F", "3SEND_B", "1SEND_B")  # stages 1 and 2 share a rank
    assert moved == {f"{end}{i}" for end in crossing for i in range(2)}
    assert peak_in_flight(schedule) == (4, 4)


def test_needs_of_actions() -> None:
    def of(text: str, schedule: Schedule) -> list[str]:
        return [str(need) for need in needs(Action.parse(text), schedule)]

    computes = load("gpipe").schedule(3, 1, 1)
    assert of("0F0", computes) == []
    assert of("1F0", computes) == ["0F0"]
    assert of("1B0", computes) == ["1F0", "2B0"]
    assert of("2B0", computes) == ["2F0"]
    schedule = add_communication(computes)
    assert of("1F0", schedule) == ["1RECV_F0"]
    assert of("1RECV_F0", schedule) == ["0SEND_F0"]
    assert of("0SEND_F0", schedule) == ["0F0"]
    assert of("1B0", schedule) == ["1F0", "1RECV_B0"]
    assert of("1SEND_B0", schedule) == ["1B0"]
    assert of("1REDUCE0", schedule) == ["1B0"]
    assert of("1GATHER0", schedule) == []


def test_transfers_take_time_and_share_the_channel() -> None:
    costs = {Op.F: 1.0, Op.B: 2.0, Op.SEND_F: 3.0, Op.SEND_B: 0.5}
    one = simulate(make_schedule("gpipe", 2, 1), lambda action: costs.get(action.op, 0.0))
    times = {str(span.action): (span.start, span.end) for rank in one for span in rank}
    assert times == {
        "0F0": (0, 1),
        "0SEND_F0": (1, 4),
        "1RECV_F0": (0, 4),  # posted at once, there at 4
        "1F0": (4, 5),
        "1B0": (5, 7),
        "1SEND_B0": (7, 7.5),
        "0RECV_B0": (1, 7.5),
        "0B0": (7.5, 9.5),
    }
    two = simulate(make_schedule("gpipe", 2, 2), lambda action: costs.get(action.op, 0.0))
    second = next(span for span in two[0] if str(span.action) == "0SEND_F1")
    assert (second.start, second.end) == (4, 7)  # made by 2, sent after the first


@pytest.mark.parametrize("transfer", [0.1, 0.5, 1.0])
def test_receives_are_posted_early_enough_to_hide_transfers(transfer: float) -> None:
    costs = {Op.F: 1.0, Op.B: 2.0, Op.SEND_F: transfer, Op.SEND_B: transfer}
    spans = simulate(make_schedule("gpipe", 4, 8), lambda action: costs.get(action.op, 0.0))
    end = max(span.end for rank in spans for span in rank)
    assert end == pytest.approx(3 * (8 + 4 - 1) + 2 * (4 - 1) * transfer)  # only fill and drain pay


def test_spans_follow_the_program_without_overlap_on_a_rank() -> None:
    schedule = make_schedule("interleaved", 3, 7, 2)
    spans = simulate(schedule, unit_cost)
    assert tuple(tuple(span.action for span in rank) for rank in spans) == schedule.programs
    for rank in spans:
        computes = [span for span in rank if span.action.is_compute]
        for before, after in pairwise(computes):
            assert before.end <= after.start


def test_actions_are_written_in_short_notation() -> None:
    assert str(Action(Op.F, 2, 0)) == "2F0"
    assert str(Action(Op.SEND_F, 2, 10)) == "2SEND_F10"
    for op in Op:
        assert Action.parse(str(Action(op, 12, 34))) == Action(op, 12, 34)
    for bad in ("", "F0", "2F", "2X0", "2F0 ", "-1F0"):
        with pytest.raises(ScheduleError, match="is not an action"):
            Action.parse(bad)
