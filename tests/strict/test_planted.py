"""Faults planted in the executor and the engine, as a change of them might: each is named."""

import re
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest

from parallel3d.engine.quirks import core
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedule import Action, Op
from tests.cases import Case, Trainer
from tests.schedule.test_queues import reordered
from tests.strict import StrictError
from tests.strict.running import run_strictly

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

CASE = Case(mesh=(2, 2, 1), schedule="one_f_one_b", zero_stage=3, batch=8, steps=1)


def no_wait_for_what_arrives():
    def drop(executor, compute):
        op = Op.RECV_F if compute.op is Op.F else Op.RECV_B
        executor.flow.arriving.pop(compute._replace(op=op), None)

    return patch.object(Executor, "_wait", drop)


def a_tensor_scaled_while_it_is_sent():
    send = Executor.send

    def reuse(executor, tensor, action):
        send(executor, tensor, action)
        executor.flow.sending[action][1].mul_(1.01)

    return patch.object(Executor, "send", reuse)


def receives_in_another_order():
    run = Executor.run

    def swap(executor, batch, step=0):
        first, second = (Action(Op.RECV_F, 1, microbatch) for microbatch in (0, 1))
        bad = reordered(executor.schedule, first, second)
        executor._program = bad.programs[executor.mesh.pipeline.coord]
        return run(executor, batch, step)

    return patch.object(Executor, "run", swap)


def gradients_sent_the_other_way():
    """Through the queue of what flows forward, on the ranks of the first stage alone."""
    pipe = Mesh._pipe

    def forward(mesh, step):
        return pipe(mesh, 1 if mesh.pipeline.coord == 0 else step)

    return patch.object(Mesh, "_pipe", forward)


def a_world_collective_in_a_stage():
    """What DeepSpeed does in a forward pass, where nobody keeps it from that."""
    return patch.object(core, "skip_trace_check", lambda: None)


def buffers_freed_while_they_are_sent():
    """The executor holds each tensor until its send is over."""
    send = Executor.send

    def drop(executor, tensor, action):
        send(executor, tensor, action)
        executor.flow.sending[action] = executor.flow.sending[action][0], None

    return patch.object(Executor, "send", drop)


# The fault, the changes of the case, and the message that names it.
FAULTS = [
    (no_wait_for_what_arrives, r"receive of \d+ float32, tag \d+ on pp .*nobody waited for"),
    (a_tensor_scaled_while_it_is_sent, r"send of \d+ float32, .*the buffer changed before"),
    (
        receives_in_another_order,
        r"send of (\d+) float32, tag 2 on pp .* it met rank \d with receive of \1 float32, tag 6"
        r"|receive of (\d+) float32, tag 6 on pp .* it met rank \d with send of \2 float32, tag 2",
    ),
    (gradients_sent_the_other_way, r"met rank \d with (send|receive)|was not over within"),
    (
        a_world_collective_in_a_stage,
        r"was not over within 2 s; .*in broadcast \d+ .* on default_pg \(ranks 0, 1, 2, 3\).*"
        r"in receive of \d+ float32, .* on pp \(ranks 0, 2\)",
    ),
]


def train_on_rank(rank, case, number):
    plant = nullcontext if number is None else FAULTS[number][0]
    try:
        with plant():
            trainer = Trainer(case)
            trainer.mesh.set_timeouts(2)
            trainer.run()
            trainer.run()
            trainer.close()
            trainer.mesh.close()
    except (StrictError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def losses_on_rank(rank, plant):
    with plant():
        trainer = Trainer(CASE)
        losses = trainer.run()
        trainer.close()
    trainer.mesh.close()
    return losses


def test_tensor_freed_while_being_sent_makes_the_loss_nan():
    for plant, is_nan in ((nullcontext, False), (buffers_freed_while_they_are_sent, True)):
        ranks = run_strictly(losses_on_rank, 4, plant, text="send=0.05", timeout=60)
        assert any(str(losses).count("nan") for losses in ranks) == is_nan


def test_no_fault_is_reported_without_one():
    assert run_strictly(train_on_rank, 4, CASE, None, timeout=60) == ["nothing"] * 4


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda n: FAULTS[n][0].__name__)
def test_fault_of_the_executor_is_named(number):
    _, pattern = FAULTS[number]
    case = replace(CASE, microbatches=4)
    messages = set(run_strictly(train_on_rank, 4, case, number, text="send=0.05", timeout=60))
    assert len(messages) == 1 and re.search(pattern, messages.copy().pop()), messages
