"""The numbers of each layer in the last steps, which are written when a step is bad."""

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.base import layer_ranges
from parallel3d.base.atomic import replace_text
from parallel3d.base.say import Say
from parallel3d.base.step_lines import finite
from parallel3d.checkpoint.state import Position
from parallel3d.engine.layer_norms import LayerNorms
from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.collectives import all_reduce
from parallel3d.train.assembly import Assembly
from parallel3d.train.ending import StopRequest
from parallel3d.train.observer import Observer, Step

CLOSE = 3  # steps of a spike that goes on
AFTER = 10  # steps after an event at which its file is written again, with these steps


class LayerHistory(Observer):
    """Keeps gradient norm, update and largest output of each layer for the last `length` steps.

    `write` brings them to the host, into layers/step-N.json in the run's folder, which only the
    rank that reports has. A request to save writes them, too. The last layer's output is the loss,
    so its largest one is left out.
    """

    collectives = "all_reduce of the layers' numbers, when they are written"

    def __init__(
        self,
        length: int,
        mesh: Mesh,
        parts: Assembly,
        *,
        folder: Path | None,
        stop: StopRequest,
        say: Say,
    ) -> None:
        self._mesh = mesh
        self._folder = folder
        self._stop = stop
        self._say = say
        self._names = [layer.name for layer in parts.layers]
        self._norms = LayerNorms(parts.engine, self._names)
        self._steps: deque[tuple[int, int]] = deque(maxlen=length)  # and the first sample of each
        self._rows = torch.zeros(length, 4, len(self._names), device=mesh.device)
        self._events: dict[int, str] = {}
        self._newest = -CLOSE
        stages = parts.stages
        self._layer_of: dict[nn.Module, int] = {}
        for stage, layers in stages.module.layers.items():
            self._layer_of |= zip(layers, stages.layers_of_stage[stage], strict=True)
        self._largest: dict[int, list[Tensor]] = {}  # ends of the ranges of its outputs
        stages.module.on_output = self._note

    def _note(self, layer: nn.Module, output: Tensor) -> None:
        """Note the ends of the range of a layer's output in training; NaN if there is one."""
        number = self._layer_of[layer]
        if torch.is_grad_enabled() and number < len(self._names) - 1:
            self._largest[number] += torch.aminmax(output.detach())  # abs() would need memory

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Measure the step inside."""
        self._largest = defaultdict(list)
        self._row = self._rows[step.number % len(self._rows)].zero_()
        with self._norms.updates() as squares:
            yield
        self._row[1:3] = squares
        for number, values in self._largest.items():
            self._row[3, number] = torch.stack(values).abs().amax()
        self._steps.append((step.number, step.start.next_sample))

    def computed(self, step: Step) -> None:
        """Measure the gradients, also of a step that will be skipped."""
        self._row[0] = self._norms.gradient_squares()

    def after(self, step: Step) -> None:
        """Write on request, and the steps after an event beside those before it."""
        done = step.end.step
        due = [event for event in self._events if event + AFTER == done]
        if len(self._rows) <= AFTER:
            due = []  # the event's own step is no longer kept
        if self._stop.saving:
            self.write(done, "a request to save")
        for event in due:
            self._write(event, self._events.pop(event))

    def rewound(self, position: Position, state: Mapping[str, Any]) -> None:
        """Forget the steps that will be repeated."""
        self._norms.forget()
        self._events.clear()
        self._newest = -CLOSE
        while self._steps and self._steps[-1][0] >= position.step:
            self._steps.pop()

    def write(self, step: int, reason: str, *, once: bool = False) -> None:
        """Write the last steps because of an event at `step`, counted from 1. Collective.

        - `once`: not if there was an event in the CLOSE steps before it.
        """
        is_close = step - self._newest <= CLOSE
        self._newest = step
        if once and is_close:
            return
        self._events[step] = reason
        self._write(step, reason)

    def _write(self, event: int, reason: str) -> None:
        own = self._rows[[number % len(self._rows) for number, _ in self._steps]]  # [steps, 4, l.]
        sums = all_reduce(own[:, :3].contiguous(), self._mesh.world.group)
        largest = own[:, 3].nan_to_num(nan=torch.inf).contiguous()
        largest = all_reduce(largest, self._mesh.world.group, dist.ReduceOp.MAX)
        if self._folder is None:
            return
        gradients, updates, weights = sums.double().sqrt().cpu().unbind(1)
        ratios = updates / weights.clamp(min=torch.finfo(torch.float32).tiny)
        record = {
            "step": event,
            "reason": reason,
            "layers": self._names,
            "steps": [number + 1 for number, _ in self._steps],
            "first_samples": [sample for _, sample in self._steps],
            "gradient_norm": gradients.tolist(),
            "update_over_weight": ratios.tolist(),
            "largest_output": largest.tolist(),
        }
        record = finite(record)
        path = self._folder / layer_ranges.FOLDER / f"step-{event}.json"
        with suppress(OSError):  # a full disk; the run does not depend on it
            path.parent.mkdir(exist_ok=True)
            replace_text(path, f"{json.dumps(record)}\n", shared=True)
        if event == record["steps"][-1]:
            self._say(f"step {event}: {reason}; {layer_ranges.in_words(record)} ({path})")
