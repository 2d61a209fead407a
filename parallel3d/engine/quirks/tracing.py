"""A trace of DeepSpeed 0.19.8's ZeRO-3 for each stage and direction, so that it fetches ahead.

DeepSpeed's hooks gather a module's weights when it is called, and those of the modules behind it by
a trace of the last pass. It keeps one trace from forward to forward; a pipeline's passes come in
another order each time, so the trace breaks, and nearly every module waits for its weights. Each
pass of a stage is the same in itself: here each has a trace of its own.
"""

from collections import defaultdict, deque
from functools import lru_cache, partial
from inspect import getclosurevars
from typing import Any, Literal

from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    ZeRoTraceMode,
)

Direction = Literal["forward", "backward"]
_PRIVATE = "_PartitionedParameterCoordinator__"
_RELEASED = f"{_PRIVATE}params_to_release"
_KEPT = (
    *(f"{_PRIVATE}{name}" for name in ("trace_mode", "submodule_order", "param_order")),
    f"{_PRIVATE}step_id_module_fetched_for",
    _RELEASED,
)


class Traces:
    """A trace of DeepSpeed's coordinator for each stage and direction."""

    def __init__(self, engine: Any) -> None:
        self._coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self._kept: dict[tuple[int, Direction], dict[str, Any]] = {}
        self._current: tuple[int, Direction] | None = None

    def begin(self, stage: int, direction: Direction) -> None:
        """Put a stage's own trace in place before its forward, or its backward."""
        pass_ = stage, direction
        if pass_ != self._current:
            held = vars(self._coordinator)
            if self._current is not None:
                self._kept[self._current] = {name: held[name] for name in _KEPT}
            held.update(self._kept.get(pass_) or self._afresh())
            self._current = pass_
        if direction == "backward":  # before a forward DeepSpeed's own hook does so
            self._coordinator.reset_step()

    def _afresh(self) -> dict[str, Any]:
        """Of a pass that none has gone before. What it releases is cached by the place in a trace,
        so each has a cache of its own."""
        instrumented: Any = getattr(PartitionedParameterCoordinator, _RELEASED)
        released = getclosurevars(instrumented).nonlocals["func"].__wrapped__
        release = lru_cache(maxsize=None)(partial(released, self._coordinator))
        return dict(
            zip(_KEPT, (ZeRoTraceMode.INVALID, [], [], defaultdict(deque), release), strict=True)
        )
