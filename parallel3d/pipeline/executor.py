"""Runs one pipeline program: the schedule's own list, action by action (floor 4)."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d.engine import Engine
from parallel3d.errors import ScheduleError
from parallel3d.mesh import Mesh, Transfer
from parallel3d.pipeline.schedule import Action, Op, Schedule, Span
from parallel3d.tensor.dropout import RandomKey

Microbatch = tuple[Tensor, Tensor]  # token ids and labels, each [batch, seq]
_Key = tuple[int, int]  # stage, microbatch


class Executor:
    """Runs `schedule`'s program of this rank for one batch after another.

    `hidden_shape` is the shape of what passes between stages: [batch, seq, hidden]. Raises
    ScheduleError at once if the program holds an action that cannot be run.
    """

    def __init__(
        self,
        schedule: Schedule,
        mesh: Mesh,
        engine: Engine,
        key: RandomKey,
        hidden_shape: tuple[int, ...],
    ) -> None:
        self.schedule, self.mesh, self.engine = schedule, mesh, engine
        self._key, self._hidden_shape = key, hidden_shape
        self._program = schedule.programs[mesh.coord("pp")]
        self._last_stage = schedule.num_stages - 1
        self._run: dict[Op, Callable[[int, int], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward,
            Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward,
        }
        for action in self._program:
            if action.op not in self._run:
                raise ScheduleError(f"{schedule.name}: the executor cannot run {action}")
        self._trains = any(action.op is Op.B for action in self._program)
        self.spans: list[Span] = []

    def run(self, batch: list[Microbatch], step: int = 0) -> float:
        """Run the program over one batch: `num_microbatches` pairs of tokens and labels.

        With backward actions in the program the gradients are left summed, reduced and ready for
        `engine.step`. Gives the mean loss on a rank that holds the last stage, 0.0 elsewhere.
        """
        assert len(batch) == self.schedule.num_microbatches
        self._batch, self._key.step = batch, step
        self._inputs: dict[_Key, Tensor] = {}
        self._outputs: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        self._arriving: dict[tuple[Op, int, int], Transfer] = {}
        self._sending: list[tuple[Transfer, Tensor]] = []
        self._losses: list[Tensor] = []
        marks = []
        if self._trains:
            with self.engine.accumulation():
                for action in self._program:
                    marks.append(self._timed(action))
                self._finish_sends()
        else:
            for action in self._program:
                marks.append(self._timed(action))
            self._finish_sends()
        loss = float(torch.stack(self._losses).sum()) if self._losses else 0.0
        self.spans = _spans(marks)
        return loss

    def _timed(self, action: Action) -> tuple[Action, Any, Any]:
        start = self._mark()
        self._run[action.op](action.stage, action.microbatch)
        return action, start, self._mark()

    def _mark(self) -> Any:
        """Now, on the device's own clock: work is queued there long before it runs."""
        if self.mesh.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.mesh.device, enable_timing=True)
        event.record()
        return event

    def _forward(self, stage: int, microbatch: int) -> None:
        tokens, labels = self._batch[microbatch]
        if stage == 0:
            x = tokens
        else:
            self._wait(Op.RECV_F, stage, microbatch)
            x = self._inputs[stage, microbatch].requires_grad_(self._trains)
            if not self._trains:  # nobody will come for its gradient
                del self._inputs[stage, microbatch]
        inputs = (x, labels) if stage == self._last_stage else (x,)
        self._key.microbatch = microbatch
        run = self.engine.forward if self._trains else self.engine.evaluate
        output = run(stage, *inputs)
        if stage == self._last_stage:
            # The only place where the number of microbatches scales anything.
            output = output / self.schedule.num_microbatches
            self._losses.append(output.detach())
        elif self._on_this_rank(stage + 1):
            self._inputs[stage + 1, microbatch] = output.detach()
        if self._trains or stage < self._last_stage:
            self._outputs[stage, microbatch] = output

    def _backward(self, stage: int, microbatch: int) -> None:
        self._key.microbatch = microbatch  # activation checkpointing draws the same masks again
        output = self._outputs.pop((stage, microbatch))
        if stage == self._last_stage:
            self.engine.backward(output)
        else:
            self._wait(Op.RECV_B, stage, microbatch)
            self.engine.backward(output, self._gradients.pop((stage, microbatch)))
        if stage > 0:
            grad = self._inputs.pop((stage, microbatch)).grad
            assert grad is not None
            owner = (stage - 1 if self._on_this_rank(stage - 1) else stage, microbatch)
            self._gradients[owner] = grad

    def _send_forward(self, stage: int, microbatch: int) -> None:
        output = self._outputs[stage, microbatch].detach()
        if not self._trains:
            del self._outputs[stage, microbatch]
        self._send(output, stage + 1, 2 * microbatch)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        self._send(self._gradients.pop((stage, microbatch)), stage - 1, 2 * microbatch + 1)

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        self._inputs[stage, microbatch] = self._receive(
            Op.RECV_F, stage, microbatch, stage - 1, 2 * microbatch
        )

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        self._gradients[stage, microbatch] = self._receive(
            Op.RECV_B, stage, microbatch, stage + 1, 2 * microbatch + 1
        )

    def _send(self, tensor: Tensor, to_stage: int, tag: int) -> None:
        tensor = tensor.contiguous()
        work = self.mesh.isend(tensor, self.schedule.pp_coord_of_stage[to_stage], tag)
        # The buffer must outlive the send; what has left is let go of.
        self._sending = [(w, t) for w, t in self._sending if not w.is_completed()]
        self._sending.append((work, tensor))

    def _receive(self, op: Op, stage: int, microbatch: int, from_stage: int, tag: int) -> Tensor:
        buffer = torch.empty(
            self._hidden_shape, dtype=self.engine.settings.dtype, device=self.mesh.device
        )
        source = self.schedule.pp_coord_of_stage[from_stage]
        self._arriving[op, stage, microbatch] = self.mesh.irecv(buffer, source, tag)
        return buffer

    def _wait(self, op: Op, stage: int, microbatch: int) -> None:
        work = self._arriving.pop((op, stage, microbatch), None)
        if work is not None:  # None: it was made on this rank
            work.wait()

    def _on_this_rank(self, stage: int) -> bool:
        return self.schedule.pp_coord_of_stage[stage] == self.mesh.coord("pp")

    def _finish_sends(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


def _spans(marks: list[tuple[Action, Any, Any]]) -> list[Span]:
    """Seconds since the program's first action."""
    if not marks:
        return []
    origin = marks[0][1]
    if isinstance(origin, float):
        return [Span(action, start - origin, end - origin) for action, start, end in marks]
    marks[-1][2].synchronize()
    return [
        Span(action, origin.elapsed_time(start) / 1e3, origin.elapsed_time(end) / 1e3)
        for action, start, end in marks
    ]
