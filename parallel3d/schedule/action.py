"""The vocabulary of pipeline programs: operations, actions and their spans in time."""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from parallel3d.base.errors import ScheduleError


class Op(StrEnum):
    """An operation of a rank with one microbatch on one stage."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # noqa: E741  # backward, gradient of the input only (torch's letter)
    W = "W"  # backward, gradient of the weights only
    SEND_F = "SEND_F"  # the stage's output, to the next stage
    RECV_F = "RECV_F"  # the stage's input, from the previous stage
    SEND_B = "SEND_B"  # the gradient of the stage's input, to the previous stage
    RECV_B = "RECV_B"  # the gradient of the stage's output, from the next stage
    GATHER = "GATHER"  # the stage's weights, from their shards
    RELEASE = "RELEASE"  # the gathered weights
    REDUCE = "REDUCE"  # the stage's gradients, over the data-parallel ranks


_NOTATION = re.compile(rf"(\d+)({'|'.join(Op)})(\d+)")
_OTHER_END = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}
_SENDS = frozenset({Op.SEND_F, Op.SEND_B})
_RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
_COMPUTES = frozenset({Op.F, Op.B, Op.I, Op.W})
_UNIT_COST = {**dict.fromkeys(_COMPUTES, 1.0), Op.B: 2.0, Op.GATHER: 1.0, Op.REDUCE: 1.0}


class Action(NamedTuple):
    """One entry of a program, printed in torch's notation: `str(Action(Op.F, 2, 0)) == "2F0"`."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as `text`; raise ScheduleError if there is none."""
        if match := _NOTATION.fullmatch(text):
            return cls(Op(match[2]), int(match[1]), int(match[3]))
        raise ScheduleError(
            f"{text!r} is not an action; write stage, op and microbatch, as in 2SEND_F0"
        )

    @property
    def is_compute(self) -> bool:
        """True if the action is F, B, I or W."""
        return self.op in _COMPUTES

    @property
    def is_send(self) -> bool:
        """True if the action is SEND_F or SEND_B."""
        return self.op in _SENDS

    @property
    def is_receive(self) -> bool:
        """True if the action is RECV_F or RECV_B."""
        return self.op in _RECEIVES

    @property
    def other_end(self) -> "Action":
        """The RECV of this SEND, or the SEND of this RECV."""
        op, step = _OTHER_END[self.op]
        return Action(op, self.stage + step, self.microbatch)


class Span(NamedTuple):
    """An action with its start and end in seconds, simulated or measured."""

    action: Action
    start: float
    end: float


Spans = tuple[tuple[Span, ...], ...]  # one tuple per pipeline coordinate
Cost = Callable[[Action], float]  # seconds


def unit_cost(action: Action) -> float:
    """Return 1 for F, I, W, GATHER and REDUCE, 2 for a full backward, 0 for a message."""
    return _UNIT_COST.get(action.op, 0.0)
