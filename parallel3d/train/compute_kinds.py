"""The time of a step's passes by kind of operation, from a torch profile of one step."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, supported_activities

from parallel3d.base.journal import COMPUTE_KINDS

_PASS = re.compile(r"\d+[FBIW]\d+")  # the name of a forward or backward: 2F0
# Parts of the names of torch's operators; all others are bound by memory.
_NAMES = {"attention": ("attention",), "matmul": ("mm",)}


class ComputeKinds:
    """Measures one step: seconds of its forwards and backwards by the names of COMPUTE_KINDS.

    `seconds` has the operators' own times on the device; "host" is what is left of the passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self.seconds = dict.fromkeys(COMPUTE_KINDS, 0.0)

    def of_passes(self, seconds: float) -> None:
        """Take the seconds of the passes in that step, which set the host's."""
        self.seconds["host"] = max(0.0, seconds - sum(self.seconds.values()))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step in the block."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # do not log each start and stop
        with profile(activities=supported_activities(), acc_events=True) as profiled:
            yield
        events = profiled.events() or ()
        main_threads = {event.thread for event in events if _is_pass(event)}
        for event in events:
            if not event.name.startswith("aten::"):
                continue
            own = event.self_cpu_time_total
            is_in_pass = _is_in_pass(event)
            if not self._on_cpu:  # autograd runs backwards on a thread of its own
                own = event.self_device_time_total
                is_in_pass = is_in_pass or event.thread not in main_threads
            if is_in_pass:
                self.seconds[_kind(event.name)] += own / 1e6


def _kind(name: str) -> str:
    for kind, parts in _NAMES.items():
        if any(part in name for part in parts):
            return kind
    return "memory"


def _is_in_pass(event: FunctionEvent) -> bool:
    outer = event.cpu_parent
    while outer is not None:
        if _is_pass(outer):
            return True
        outer = outer.cpu_parent
    return False


def _is_pass(event: FunctionEvent) -> bool:
    return _PASS.fullmatch(event.name) is not None
