"""A second opinion on whether a schedule runs, for the tests; it knows nothing of `needs`."""

from parallel3d.schedule.schedule import Action, Op, Schedule
from parallel3d.schedule.sharding import Program


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
    home = schedule.pp_coord_of_stage
    last = len(schedule.pp_coord_of_stage) - 1
    trains = any(action.op in "BIW" for program in schedule.programs for action in program)
    memory: list[set[tuple[str, int, int]]] = [set() for _ in schedule.programs]
    memory[home[0]] = {("x", 0, i) for i in range(schedule.num_microbatches)}
    heads = [0] * len(schedule.programs)

    def compute(op: str, s: int, i: int) -> tuple[set, set]:
        x = ("x", s, i)
        saved = ("saved", s, i)
        dy = ("dy", s, i)
        dw = ("dw", s, i)
        if op == "F":
            gives = {saved} if trains else set()
            if s < last:
                gives.add(("x", s + 1, i))
            elif trains:
                gives.add(dy)
            return {x}, gives
        earlier = {("dy", s - 1, i)} if s else set()
        if op == "B":
            return {saved, dy}, earlier
        return ({dy}, earlier | {dw}) if op == "I" else ({saved, dw}, set())

    def message(action: Action) -> tuple[str, tuple[str, int, int], int, int]:
        op, s, i = action
        kind = op[-1]
        end = op[:4]
        other = 1 if end == "SEND" else 0
        token = ("x", s + other, i) if kind == "F" else ("dy", s - other, i)
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


def most_gathered(program: Program) -> tuple[int, ...]:
    """The stages whose weights a rank holds, or is gathering, when it holds most of them.

    Empty where weights are gathered for each microbatch.
    """
    held: list[int] = []
    most: tuple[int, ...] = ()
    for action in program:
        if action.op is Op.GATHER:
            held.append(action.stage)
            most = max(most, tuple(held), key=len)
        elif action.op is Op.RELEASE:
            held.remove(action.stage)
    return most
