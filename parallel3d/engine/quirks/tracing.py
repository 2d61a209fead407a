"""Keep one ZeRO-3 trace per stage and direction, so that DeepSpeed 0.19.8 prefetches weights.

DeepSpeed's hooks gather a module's weights when it is called, and prefetch those of later modules
by a trace of the previous pass. It has one trace from forward to forward. A pipeline's passes come
in a different order each time, which invalidates the trace, and nearly every module waits for its
weights. Within a pass of one stage the order is always the same, so each gets its own trace.
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
_STATE = (
    f"{_PRIVATE}trace_mode",
    f"{_PRIVATE}submodule_order",
    f"{_PRIVATE}param_order",
    f"{_PRIVATE}step_id_module_fetched_for",
    _RELEASED,
)


class Traces:
    """The state of DeepSpeed's coordinator for each stage and direction."""

    def __init__(self, engine: Any) -> None:
        self._coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self._saved: dict[tuple[int, Direction], dict[str, object]] = {}
        self._current: tuple[int, Direction] | None = None

    def begin(self, stage: int, direction: Direction) -> None:
        """Switch to a stage's own trace before its forward or backward."""
        pass_ = stage, direction
        if pass_ != self._current:
            state = vars(self._coordinator)
            if self._current is not None:
                self._saved[self._current] = {name: state[name] for name in _STATE}
            state.update(self._saved.get(pass_) or self._new_trace())
            self._current = pass_
        if direction == "backward":  # before a forward DeepSpeed's own hook does it
            self._coordinator.reset_step()

    def _new_trace(self) -> dict[str, object]:
        """Return the state for a pass that has not run yet.

        DeepSpeed caches the parameters to release by the place in a trace, so each trace needs its
        own cache.
        """
        instrumented: Any = getattr(PartitionedParameterCoordinator, _RELEASED)
        released = getclosurevars(instrumented).nonlocals["func"].__wrapped__
        release = lru_cache(maxsize=None)(partial(released, self._coordinator))
        return dict(
            zip(_STATE, (ZeRoTraceMode.INVALID, [], [], defaultdict(deque), release), strict=True)
        )
