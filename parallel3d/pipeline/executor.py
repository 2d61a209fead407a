"""Execute a pipeline program: the schedule's own list, action by action (floor 4)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.engine import Engine
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.transfer import Transfer
from parallel3d.pipeline.clock import DeviceClock
from parallel3d.schedule.schedule import Action, Op, Schedule, Span
from parallel3d.tensor.collectives import all_reduce
from parallel3d.tensor.loss import watch_hits
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import SideLosses
from parallel3d.tensor.weight_gradients import WeightGradients, defer_weight_gradients

_Key = tuple[int, int]  # stage, microbatch


class Microbatch(NamedTuple):
    """The inputs of one microbatch.

    - `tokens` (int64, [batch, seq]): for the first stage.
    - `labels` (int64, [batch, seq]): for the last stage.
    - `segments`: for all stages, if documents are isolated or samples are dealt to cp ranks; then
      the other tensors have this rank's tokens, [batch, seq / cp].
    - `weights` (fp32, [batch, seq]): how much each label counts. Either all microbatches of all
      ranks have them, or none; they are required if a label is -100.
    - `number`: its place among the microbatches of the step, which have the same samples on every
      mesh.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    segments: Segments | None = None
    weights: Tensor | None = None
    number: int = 0


def free_data(output: Tensor) -> None:
    """Drop an output's data, of which the backward needs only shape and graph.

    Other references (a message, the next stage, autograd) keep the data alive.
    """
    output.data = output.new_empty(1).expand(output.shape)


@dataclass
class Flow:
    """The tensors of one run of a program."""

    inputs: dict[_Key, Tensor] = field(default_factory=dict)
    outputs: dict[_Key, Tensor] = field(default_factory=dict)
    gradients: dict[_Key, Tensor] = field(default_factory=dict)
    """Gradients of the outputs, until their backward."""
    side_losses: dict[_Key, Tensor] = field(default_factory=dict)
    """The sum of a stage's side losses, divided, until its backward; the last stage has none."""
    side_values: dict[str, list[Tensor]] = field(default_factory=dict)
    """For each forward the sum of each side loss over the layers of its stage."""
    deferred: dict[_Key, WeightGradients] = field(default_factory=dict)
    arriving: dict[Action, Transfer] = field(default_factory=dict)
    sending: dict[Action, tuple[Transfer, Tensor]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    """The loss of each microbatch, divided so that their sum is the mean loss."""
    token_losses: dict[int, Tensor] = field(default_factory=dict)
    """In an evaluation: each token's loss, [batch, seq], for each microbatch."""
    token_hits: dict[int, Tensor] = field(default_factory=dict)
    """In an evaluation: whether each label is the likeliest token, [batch, seq]."""


def _ignore(action: Action, message: Tensor) -> None:
    """Take a message that nobody has asked for."""


class ProgramRunner(ABC):
    """Runs this rank's program of `schedule`: its loop, its messages, and the waiting for them.

    - `hidden_shape`: the shape of the messages between stages, [batch, seq / cp, hidden], or
      [batch, seq / cp / tp, hidden] under sequence parallelism.
    - `make_schedule`: returns the schedule for another number of microbatches. It is called once
      for each number that `run` gets, and `run` raises what it raises, on all ranks. Without it
      every batch must have `schedule.num_microbatches`.
    - `methods`: runs an operation, for a stage and a microbatch.
    - `on_message`: called with each message, before this rank sends it or once it is received.
    - `timed`: if set, `run` waits for the device and sets `spans`, each action's seconds since
      `started`. The gradients are reduced at `ended`. Both are Unix times.
    """

    def __init__(
        self,
        schedule: Schedule,
        mesh: Mesh,
        engine: Engine,
        *,
        key: RandomKey,
        hidden_shape: tuple[int, ...],
        make_schedule: Callable[[int], Schedule] | None = None,
    ) -> None:
        self.mesh = mesh
        self.engine = engine
        self._key = key
        self.hidden_shape = hidden_shape
        self._make_schedule = make_schedule
        self._schedules = {schedule.num_microbatches: schedule}
        self.last_stage = schedule.num_stages - 1
        self.methods = self._operations()
        self._use(schedule)
        self._no_loss = torch.zeros((), device=mesh.device)
        self.batch: list[Microbatch] = []
        self.flow = Flow()
        self.on_message: Callable[[Action, Tensor], None] = _ignore
        self.timed = False
        self._clock: DeviceClock | None = None
        self.spans: list[Span] = []
        self.started = 0.0
        self.ended = 0.0

    def _operations(self) -> dict[Op, Callable[[int, int], None]]:
        return {
            Op.F: self._forward,
            Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward,
            Op.GATHER: lambda stage, _: self.engine.gather(stage),
            Op.RELEASE: lambda stage, _: self.engine.release(stage),
        }

    @abstractmethod
    def _forward(self, stage: int, microbatch: int) -> None:
        """Run a stage's forward; its output goes to the next stage, or is the loss."""

    @abstractmethod
    def _send_forward(self, stage: int, microbatch: int) -> None:
        """Send a stage's output to the next stage's rank."""

    def _use(self, schedule: Schedule) -> None:
        """Run this schedule from now on."""
        self.schedule = schedule
        self._program = schedule.programs[self.mesh.pipeline.coord]

    def schedule_for(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a batch; raise ScheduleError if it cannot run."""
        schedule = self._schedules.get(num_microbatches)
        if schedule is None:
            assert self._make_schedule, f"needs {self.schedule.num_microbatches} microbatches"
            schedule = self._make_schedule(num_microbatches)
            placement = self.schedule.pp_coord_of_stage
            assert schedule.pp_coord_of_stage == placement, "stages would move to other ranks"
            self._schedules[num_microbatches] = schedule
        return schedule

    def _begin(self, batch: list[Microbatch], step: int) -> None:
        """Take a batch, on whose step the dropout masks depend."""
        if len(batch) != self.schedule.num_microbatches:
            self._use(self.schedule_for(len(batch)))
        self.batch = batch
        self._key.step = step
        self.flow = Flow()

    def _run_program(self, name: str) -> None:
        """Run the program over the batch, and wait until its messages are sent."""
        for action in self._program:
            if action.is_compute:
                self._wait(action)
            pulse.doing(f"{action} of {name}")
            if action.is_compute:
                pulse.computing()
            with self._clock.measuring(action) if self._clock else nullcontext():
                self.methods[action.op](action.stage, action.microbatch)
        with pulse.waiting("waiting until its messages are sent"):
            for work, _ in self.flow.sending.values():
                work.wait()
            self.flow.sending.clear()

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """Measure the spans of what runs inside, if this runner is `timed`."""
        self.spans = []
        self._clock = DeviceClock(self.mesh.device) if self.timed else None
        yield
        if self._clock:
            self.started, self.ended, self.spans = self._clock.spans()

    def _enter(self, microbatch: int) -> Microbatch:
        """Return a microbatch, on which dropout masks depend from now on, also recomputed ones."""
        own = self.batch[microbatch]
        self._key.microbatch = microbatch
        self._key.dealt = None if own.segments is None else own.segments.dealt
        return own

    def _mean_loss(self) -> Tensor:
        """Return the mean loss [] of the batch on the device, or 0 without the last stage."""
        return torch.stack(self.flow.losses).sum() if self.flow.losses else self._no_loss

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        self.flow.inputs[stage, microbatch] = self._receive(Action(Op.RECV_F, stage, microbatch))

    def send(self, tensor: Tensor, send: Action) -> None:
        """Start to send a tensor, which is kept until it has been sent."""
        tensor = tensor.contiguous()
        self.on_message(send, tensor)
        receive = send.other_end
        peer = self.schedule.pp_coord_of_stage[receive.stage]
        work = self.mesh.isend(tensor, peer, self._tag(receive))
        # The buffer must outlive the send; forget the sends that are complete.
        self.flow.sending = {a: s for a, s in self.flow.sending.items() if not s[0].is_completed()}
        self.flow.sending[send] = work, tensor

    def _receive(self, receive: Action) -> Tensor:
        buffer = torch.empty(
            self.hidden_shape, dtype=self.engine.settings.dtype, device=self.mesh.device
        )
        peer = self.schedule.pp_coord_of_stage[receive.other_end.stage]
        self.flow.arriving[receive] = self.mesh.irecv(buffer, peer, self._tag(receive))
        return buffer

    def _tag(self, receive: Action) -> int:
        """Return a tag unique to a transfer in a step; gloo matches by it, NCCL by order."""
        forward = 2 * (receive.microbatch * self.schedule.num_stages + receive.stage)
        return forward if receive.op is Op.RECV_F else forward + 1

    def _wait(self, compute: Action) -> None:
        """Wait for the message and the weights that a compute needs."""
        key = compute.stage, compute.microbatch
        is_forward = compute.op is Op.F
        receive = Action(Op.RECV_F if is_forward else Op.RECV_B, *key)
        transfer = self.flow.arriving.pop(receive, None)
        if transfer is not None:  # None: the tensor was computed on this rank
            with pulse.waiting(f"waiting for {receive}"):
                transfer.wait()
                if not is_forward:
                    # gloo does not report that a send is complete. The gradient's arrival shows it.
                    sent = self.flow.sending.pop(Action(Op.SEND_F, *key), None)
                    if sent is not None:
                        sent[0].wait()
                received = self.flow.inputs if is_forward else self.flow.gradients
                self.on_message(receive, received[key])
        if compute.op is not Op.W:
            self.engine.wait_for_weights(compute.stage)

    def _on_this_rank(self, stage: int) -> bool:
        return self.schedule.pp_coord_of_stage[stage] == self.mesh.pipeline.coord


class Executor(ProgramRunner):
    """Trains: executes this rank's program of `schedule`, one batch after another.

    A program that splits backwards (I and W) needs gradients that are reduced once per step
    (config/mesh_checks.py).

    Example: 1F1B on two ranks, with microbatches 0, 1 and 2. The activations `y` [batch, seq,
    hidden] go to rank 1, and their gradients `dy`, of the same shape, come back to rank 0. Each
    column is a program. A rank waits only before a compute whose message has not arrived.

        rank 0 runs stage 0                        rank 1 runs stage 1, the last
        F0       y0 = stage(tokens)                RECV_F0  provide a buffer for y0
        SEND_F0  send y0, drop its data            RECV_F1  and for y1, ahead of its use
        F1       two forwards fill the pipeline    F0       wait for y0; loss = stage(y0, labels)
        SEND_F1  send y1                           B0       dy0, and the gradients of weights
        RECV_B0  provide a buffer for dy0          SEND_B0  send dy0
        B0       wait for dy0; free what F0 kept   F1       from now on a forward, ...
        F2       and a forward for each backward   RECV_F2
        SEND_F2                                    B1       ... then a backward
        RECV_B1                                    SEND_B1
        B1                                         F2
        RECV_B2                                    B2
        B2       all gradients are complete        SEND_B2
    """

    side_losses: dict[str, Tensor]
    """For each name the sum over this rank's layers, [], as a mean over the microbatches."""
    _divisor: Tensor | int

    def _operations(self) -> dict[Op, Callable[[int, int], None]]:
        return super()._operations() | {
            Op.B: self.backward,
            Op.I: self._input_gradient,
            Op.W: self._weight_gradient,
            Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward,
            Op.REDUCE: lambda stage, _: self.engine.reduce(stage),
        }

    def run(self, batch: list[Microbatch], step: int = 0) -> Tensor:
        """Run the program over one batch; gradients are ready for `engine.step` afterwards.

        Return the mean loss [] on the device, or 0 on ranks without the last stage. Its mean over
        the replicas is the batch's mean loss (divided by the sum of all weights, if there are any).
        Ranks whose layers have side losses set `side_losses`.
        """
        self._begin(batch, step)
        self._divisor = self._losses_divisor(batch)
        name = f"step {step + 1}"
        with self._timing(), self.engine.accumulation():
            self._run_program(name)
            pulse.doing(f"reducing the gradients of {name}")
        self.side_losses = {
            name: torch.stack(values).sum(0) / len(batch)
            for name, values in self.flow.side_values.items()
        }
        return self._mean_loss()

    def _use(self, schedule: Schedule) -> None:
        super()._use(schedule)
        last_backwards = {a.stage: a for a in self._program if a.op in (Op.B, Op.W)}
        self._completing = {a[1:] for a in last_backwards.values() if a.op is Op.B}

    def _forward(self, stage: int, microbatch: int) -> None:
        own = self._enter(microbatch)
        key = stage, microbatch
        x = self.flow.inputs[key].requires_grad_() if stage > 0 else own.tokens
        assert x is not None, "the first stage needs tokens"
        is_last = stage == self.last_stage
        inputs = (own.labels, own.segments, own.weights) if is_last else (None, own.segments)
        produced = self.engine.forward(stage, x, *inputs)
        output, side_losses = produced if isinstance(produced, tuple) else (produced, None)
        if is_last:
            # Only here and for side losses does the number of microbatches scale anything.
            output = output / self._divisor
            self.flow.losses.append(output.detach())
        elif self._on_this_rank(stage + 1):
            # Detached, like a received tensor: each stage's backward ends at its input.
            self.flow.inputs[stage + 1, microbatch] = output.detach()
            free_data(output)
        if side_losses is not None:
            output = self._add_side_losses(output, side_losses, key)
        self.flow.outputs[key] = output

    def _add_side_losses(self, output: Tensor, side_losses: SideLosses, key: _Key) -> Tensor:
        """Add a stage's side losses to the loss, or keep them for the backward of its output.

        Each is a mean over a microbatch, so they are divided by the number of microbatches even if
        labels are weighted.
        """
        for name, value in side_losses.values.items():
            self.flow.side_values.setdefault(name, []).append(value)
        total = side_losses.total / len(self.batch)
        if key[0] == self.last_stage:
            return output + total
        if total.requires_grad:
            self.flow.side_losses[key] = total
        return output

    def _losses_divisor(self, batch: list[Microbatch]) -> Tensor | int:
        """Return the divisor of the microbatches' losses, whose sum is then the mean loss.

        It is their number, or for weighted losses the sum of the batch's weights divided by the
        number of replicas (one all-reduce), so that the mean over replicas is the batch's mean.
        """
        weights = [m.weights for m in batch if m.weights is not None]
        if not weights or not self._on_this_rank(self.last_stage):
            return len(batch)
        assert len(weights) == len(batch), "either all microbatches have weights or none"
        total = torch.stack([w.sum() for w in weights]).sum()
        total = all_reduce(total, self.mesh.replicas.group) / self.mesh.replicas.size
        # If all weights of the batch are 0, loss and gradients are 0.
        return total.clamp(min=torch.finfo(total.dtype).tiny)

    def backward(self, stage: int, microbatch: int) -> None:
        """Run the backward of a stage from the gradient of its output, or from the loss."""
        self._enter(microbatch)
        key = stage, microbatch
        output = self.flow.outputs.pop(key)
        grad_output = None if stage == self.last_stage else self.flow.gradients.pop(key)
        side_loss = self.flow.side_losses.pop(key, None)
        last = key in self._completing
        self.engine.backward(output, grad_output, side_loss=side_loss, stage=stage, last=last)
        if stage > 0:
            grad = self.flow.inputs.pop((stage, microbatch)).grad
            assert grad is not None
            self.flow.gradients[stage - 1, microbatch] = grad

    def _input_gradient(self, stage: int, microbatch: int) -> None:
        with defer_weight_gradients() as products:
            self.backward(stage, microbatch)
        self.flow.deferred[stage, microbatch] = products

    def _weight_gradient(self, stage: int, microbatch: int) -> None:
        self.flow.deferred.pop((stage, microbatch)).make()

    def _send_forward(self, stage: int, microbatch: int) -> None:
        output = self.flow.outputs[stage, microbatch]
        self.send(output.detach(), Action(Op.SEND_F, stage, microbatch))
        free_data(output)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        gradient = self.flow.gradients.pop((stage - 1, microbatch))
        self.send(gradient, Action(Op.SEND_B, stage, microbatch))

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        self.flow.gradients[stage, microbatch] = self._receive(Action(Op.RECV_B, stage, microbatch))


class Evaluator(ProgramRunner):
    """Evaluates: executes a program of forwards, and keeps nothing for a backward."""

    token_losses: Tensor | None = None
    token_hits: Tensor | None = None

    def run(self, batch: list[Microbatch]) -> Tensor:
        """Run the program over one batch.

        Return the mean loss [] on the device, or 0 on ranks without the last stage. Ranks with the
        last stage set `token_losses` [microbatches, batch, seq], and `token_hits` of that shape:
        True where the label is the likeliest token.
        """
        self._begin(batch, 0)
        with self._timing():
            self._run_program("an evaluation")
        if self.flow.token_losses:
            self.token_losses = torch.stack([self.flow.token_losses[m] for m in range(len(batch))])
            self.token_hits = torch.stack([self.flow.token_hits[m] for m in range(len(batch))])
        return self._mean_loss()

    def _forward(self, stage: int, microbatch: int) -> None:
        own = self._enter(microbatch)
        x = self.flow.inputs.pop((stage, microbatch)) if stage > 0 else own.tokens
        assert x is not None, "the first stage needs tokens"
        if stage == self.last_stage:
            assert own.labels is not None, "the last stage needs labels"
            with watch_hits() as hits:
                losses = self.engine.evaluate(stage, x, own.labels, own.segments)  # [batch, seq]
            assert losses.shape == own.labels.shape, "a head returns token losses in evaluation"
            self.flow.token_losses[microbatch] = losses
            self.flow.token_hits[microbatch] = hits[-1]
            self.flow.losses.append(losses.mean() / len(self.batch))
            return
        output = self.engine.evaluate(stage, x, None, own.segments)
        if self._on_this_rank(stage + 1):
            self.flow.inputs[stage + 1, microbatch] = output
        else:
            self.flow.outputs[stage, microbatch] = output

    def _send_forward(self, stage: int, microbatch: int) -> None:
        output = self.flow.outputs.pop((stage, microbatch))
        self.send(output, Action(Op.SEND_F, stage, microbatch))
