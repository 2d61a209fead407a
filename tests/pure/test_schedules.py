"""Every schedule file found, on every size for which it says that it is valid."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest

from parallel3d.errors import ConfigError, ScheduleError
from parallel3d.pipeline.schedule import (
    Action,
    Op,
    Schedule,
    add_communication,
    bubble,
    needs,
    peak_in_flight,
    simulate,
    unit_cost,
    validate,
)
from parallel3d.pipeline.schedules import load, make_schedule, names

RANKS, MICROBATCHES, STAGES_PER_RANK = range(1, 9), range(1, 17), range(1, 4)


@cache
def cases(name: str) -> tuple[tuple[tuple[int, int, int], Schedule], ...]:
    """All sizes for which the file says it is valid, with the schedule; making it validates it."""
    sizes = product(RANKS, MICROBATCHES, STAGES_PER_RANK)
    return tuple((s, make_schedule(name, *s)) for s in sizes if not load(name).invalid(*s))


def schedule_of(text: str, placement: tuple[int, ...], num_microbatches: int = 1) -> Schedule:
    """A hand-written schedule, one line per rank."""
    lines = [line.split() for line in text.strip().splitlines()]
    programs = tuple(tuple(map(Action.parse, line)) for line in lines)
    return Schedule("by hand", num_microbatches, placement, programs)


def runs_when_blocking(schedule: Schedule) -> bool:
    """Whether blocking ranks come to the end: a second opinion that knows nothing of `needs`.

    Tensors are tokens in the memory of a rank. Each is used up once, sends and receives meet, and
    in the end no rank may hold anything.
    """
    home, last = schedule.pp_coord_of_stage, len(schedule.pp_coord_of_stage) - 1
    trains = any(action.op in "BIW" for program in schedule.programs for action in program)
    memory: list[set[tuple[str, int, int]]] = [set() for _ in schedule.programs]
    memory[home[0]] = {("x", 0, i) for i in range(schedule.num_microbatches)}
    heads = [0] * len(schedule.programs)

    def compute(op: str, s: int, i: int) -> tuple[set, set]:
        x, saved, dy, dw = ("x", s, i), ("saved", s, i), ("dy", s, i), ("dw", s, i)
        if op == "F":
            gives = {("x", s + 1, i)} if s < last else {dy} if trains else set()
            return {x}, gives | ({saved} if trains else set())
        earlier = {("dy", s - 1, i)} if s else set()
        if op == "B":
            return {saved, dy}, earlier
        return ({dy}, earlier | {dw}) if op == "I" else ({saved, dw}, set())

    def message(action: Action) -> tuple[str, tuple[str, int, int], int, int]:
        op, s, i = action
        kind, end = op[-1], op[:4]
        token = ("x", s + (end == "SEND"), i) if kind == "F" else ("dy", s - (end == "SEND"), i)
        far = s + {"SENDF": 1, "RECVF": -1, "SENDB": -1, "RECVB": 1}[end + kind]
        return end, token, home[s], home[far] if 0 <= far <= last else -1

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while heads[rank] < len(program):
                action = program[heads[rank]]
                if len(action.op) == 1:
                    takes, gives = compute(*action)
                    if not takes <= memory[rank] or gives & memory[rank]:
                        return False
                    memory[rank] = (memory[rank] - takes) | gives
                else:
                    end, token, mine, peer = message(action)
                    if mine != rank or peer < 0 or (end == "SEND" and token not in memory[rank]):
                        return False
                    theirs = schedule.programs[peer][heads[peer] : heads[peer] + 1]
                    other = "SEND" if end == "RECV" else "RECV"
                    if not theirs or len(theirs[0].op) == 1:
                        break
                    if message(theirs[0]) != (other, token, peer, rank):
                        break
                    source, target = (rank, peer) if end == "SEND" else (peer, rank)
                    if token not in memory[source]:
                        return False
                    memory[source].discard(token)
                    memory[target].add(token)
                    heads[peer] += 1
                heads[rank] += 1
                moved = True
    return (
        all(map(len, schedule.programs))
        and not any(memory)
        and heads == [len(program) for program in schedule.programs]
    )


def channels(schedule: Schedule) -> dict[tuple[int, int], dict[int, list[str]]]:
    """What each side of each pair of ranks does on their channel, in order, seen as messages."""
    home = schedule.pp_coord_of_stage
    step = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}
    out: dict = defaultdict(lambda: defaultdict(list))
    for rank, program in enumerate(schedule.programs):
        for op, stage, microbatch in program:
            if op in step:
                ends = (stage, stage + step[op])
                source, target = ends if op in (Op.SEND_F, Op.SEND_B) else ends[::-1]
                pair = tuple(sorted((home[source], home[target])))
                out[pair][rank].append(f"{op[-1]}{microbatch}: {source} to {target}")
    return out


def test_the_schedules_of_this_folder() -> None:
    assert {"gpipe", "one_f_one_b", "interleaved", "forward_only"} <= set(names())
    for name in names():
        assert cases(name), name
    for name in ("gpipe", "one_f_one_b"):
        assert {(p, m) for (p, m, _), _ in cases(name)} == set(product(RANKS, MICROBATCHES))


@pytest.mark.parametrize("name", names())
def test_every_compute_once_and_both_sides_of_a_channel_in_the_same_order(name: str) -> None:
    for (p, m, v), schedule in cases(name):
        assert schedule.name == name
        assert (schedule.pp_size, schedule.num_stages) == (p, p * v)
        assert Counter(schedule.pp_coord_of_stage) == dict.fromkeys(range(p), v)
        for pair, sides in channels(schedule).items():
            assert len(sides) == 2 and sides[pair[0]] == sides[pair[1]], (p, m, v)


@pytest.mark.parametrize("name", names())
def test_blocking_ranks_come_to_the_end(name: str) -> None:
    for sizes, schedule in cases(name):
        assert runs_when_blocking(schedule), sizes


@pytest.mark.parametrize("backward", [2.0, 0.75])
@pytest.mark.parametrize("name", names())
def test_the_simulated_bubble_is_the_closed_form(name: str, backward: float) -> None:
    costs = {Op.F: 1.0, Op.B: backward, Op.I: backward / 2, Op.W: backward / 2}
    for sizes, schedule in cases(name):
        if backward != 2.0 and not schedule.has_backward:
            continue  # the same again
        spans = simulate(schedule, lambda action: costs.get(action.op, 0.0))
        assert abs(bubble(spans) - load(name).bubble(*sizes)) < 1e-9, sizes


def test_the_closed_forms_are_those_of_the_papers() -> None:
    for p, m, v in product(RANKS, MICROBATCHES, STAGES_PER_RANK):
        assert load("gpipe").bubble(p, m, 1) == (p - 1) / (m + p - 1)
        assert load("one_f_one_b").bubble(p, m, 1) == (p - 1) / (m + p - 1)
        if m >= p:
            assert load("interleaved").bubble(p, m, v) == (p - 1) / (v * m + p - 1)


@pytest.mark.parametrize("name", names())
def test_the_peak_in_flight_is_the_closed_form(name: str) -> None:
    for sizes, schedule in cases(name):
        assert peak_in_flight(schedule) == load(name).peak_in_flight(*sizes), sizes


def corrupt(schedule: Schedule, kind: str, draw: random.Random) -> Schedule:
    """The schedule with one thing wrong, or at least different."""
    programs = [list(program) for program in schedule.programs]
    mine = draw.choice([program for program in programs if len(program) > 1])
    i, j = draw.sample(range(len(mine)), 2)
    if kind == "swap sends":
        sends = [k for k, action in enumerate(mine) if action.is_send]
        if len(sends) > 1:
            i, j = draw.sample(sends, 2)
    if kind.startswith("swap"):
        mine[i], mine[j] = mine[j], mine[i]
    elif kind == "swap neighbours":
        j = max(i - 1, 0)
        mine[i], mine[j] = mine[j], mine[i]
    elif kind == "duplicate":
        mine.insert(j, mine[i])
    else:
        action = mine.pop(i)
        if kind == "wrong rank":
            other = draw.choice([program for program in programs if program is not mine])
            other.insert(draw.randint(0, len(other)), action)
        elif kind == "move":
            mine.insert(j, action)
    return replace(schedule, programs=tuple(map(tuple, programs)))


KINDS = ("swap", "swap sends", "swap neighbours", "duplicate", "drop", "wrong rank", "move")


@pytest.mark.parametrize("name", names())
def test_a_corrupted_schedule_is_refused_unless_it_still_runs(name: str) -> None:
    draw = random.Random(name)
    small = [s for (p, m, _), s in cases(name) if 2 <= p <= 4 and m <= 5]
    verdicts = Counter()
    for kind in KINDS * 60:
        schedule = corrupt(draw.choice(small), kind, draw)
        try:
            validate(schedule)
            accepted = True
        except ScheduleError:
            accepted = False
        assert accepted == runs_when_blocking(schedule), f"{kind}\n{schedule.show()}"
        verdicts[accepted] += 1
    assert verdicts[True] and verdicts[False] > verdicts[True]


@pytest.mark.parametrize(
    ("problem", "programs"),
    [
        ("1B0 comes before 1F0, which it needs", "0F0 0B0 / >>1B0<< 1F0"),
        ("1F0 is on rank 0; its stage is on 1", "0F0 >>1F0<< 0B0 / 1B0"),
        ("0F0 stands 2 times", ">>0F0<< >>0F0<< 0B0 / 1F0 1B0"),
        ("0F1: there is no such stage or microbatch", "0F0 >>0F1<< 0B0 / 1F0 1B0"),
        ("2F0: there is no such stage or microbatch", "0F0 0B0 / 1F0 1B0 >>2F0<<"),
        ("missing: 1B0", "0F0 0B0 / 1F0"),
        ("missing: 0I0", "0F0 0W0 / 1F0 1B0"),
        ("0B0 has no purpose: nothing uses what it gives", "0F0 >>0B0<< 0I0 0W0 / 1F0 1B0"),
        ("0W0 comes before 0I0, which it needs", "0F0 >>0W0<< 0I0 / 1F0 1B0"),
        ("missing: 0RECV_B0, 1RECV_F0, 1SEND_B0", "0F0 0SEND_F0 0B0 / 1F0 1B0"),
        (
            "1SEND_F0 has no purpose: nothing uses what it gives",
            "0F0 0SEND_F0 / 1RECV_F0 1F0 >>1SEND_F0<<",
        ),
        (
            "0SEND_F0 comes before 0F0, which it needs",
            ">>0SEND_F0<< 0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0",
        ),
        (
            "one channel, two orders: rank 0 is at 0RECV_B0 while rank 1 is at 1RECV_F0",
            "0F0 >>0RECV_B0<< 0SEND_F0 0B0 / >>1RECV_F0<< 1F0 1B0 1SEND_B0",
        ),
    ],
)
def test_a_refusal_prints_the_programs_with_the_action_marked(problem: str, programs: str) -> None:
    lines = programs.split(" / ")
    bare = programs.replace(">>", "").replace("<<", "").replace(" / ", "\n")
    with pytest.raises(ScheduleError) as refusal:
        validate(schedule_of(bare, (0, 1)))
    shown = [f"  rank {rank} | {line}" for rank, line in enumerate(lines)]
    assert str(refusal.value).splitlines() == [f"schedule 'by hand': {problem}", *shown]


def test_ranks_that_wait_in_a_circle_are_a_deadlock() -> None:
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
    with pytest.raises(ScheduleError, match="one channel, two orders"):
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
    with pytest.raises(ScheduleError, match="deadlock: no rank can go on from 3RECV_F0, 1RECV_F1"):
        validate(circle)
    assert not runs_when_blocking(circle)


def test_a_v_placement_with_split_backwards() -> None:
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


def test_what_an_action_needs() -> None:
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


def test_spans_follow_the_program_and_a_rank_computes_one_thing_at_a_time() -> None:
    schedule = make_schedule("interleaved", 3, 7, 2)
    spans = simulate(schedule, unit_cost)
    assert tuple(tuple(span.action for span in rank) for rank in spans) == schedule.programs
    for rank in spans:
        computes = [span for span in rank if span.action.is_compute]
        for before, after in pairwise(computes):
            assert before.end <= after.start


def test_notation() -> None:
    assert str(Action(Op.F, 2, 0)) == "2F0"
    assert str(Action(Op.SEND_F, 2, 10)) == "2SEND_F10"
    for op in Op:
        assert Action.parse(str(Action(op, 12, 34))) == Action(op, 12, 34)
    for bad in ("", "F0", "2F", "2X0", "2F0 ", "-1F0"):
        with pytest.raises(ScheduleError, match="is no action"):
            Action.parse(bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", 2, 2), "no schedule 'gpip'; did you mean 'gpipe'? there are forward_only, gpipe"),
        (("gpipe", 0, 2), "schedule 'gpipe': pp=0; it must be 1 or more"),
        (("gpipe", 2, 0), "schedule 'gpipe': num_microbatches=0; it must be 1 or more"),
        (("gpipe", 2, 2, 2), "stages_per_rank=2; use 1, or the schedule 'interleaved'"),
        (("one_f_one_b", 2, 2, 2), "stages_per_rank=2; use 1, or the schedule 'interleaved'"),
        (("interleaved", 2, 2), "stages_per_rank=1; use 2 or more, or the schedule 'one_f_one_b'"),
    ],
)
def test_what_cannot_be_made(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_schedule(*arguments)
    assert message in str(refusal.value)
