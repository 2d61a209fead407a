"""When a run saves: every so many steps, on request, at its end, and when it gives up."""

from collections.abc import Callable
from typing import Any

from parallel3d.base.errors import TrainingError
from parallel3d.base.say import Say
from parallel3d.checkpoint.on_disk import MOST_FAILURES
from parallel3d.checkpoint.save import Saver
from parallel3d.checkpoint.state import RunState
from parallel3d.config import CompleteConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.assembly import Assembly
from parallel3d.train.ending import StopRequest
from parallel3d.train.metrics import Result
from parallel3d.train.observer import Observer, Step, is_due
from parallel3d.train.start import Start


def saver_of(start: Start, mesh: Mesh, parts: Assembly, say: Say) -> Saver:
    """Return the saver that writes a run's checkpoints to its places. Collective."""
    return Saver(
        parts.engine,
        mesh,
        parts.layers,
        start.places,
        asynchronous=start.config.checkpoint.asynchronous,
        say=say,
    )


class Saving(Observer):
    """Saves after a step if a save is due; at the end of a run waits until it is on disk."""

    collectives = "those of a save, after the steps that are saved"

    def __init__(
        self,
        config: CompleteConfig,
        saver: Saver,
        state: RunState,
        stop: StopRequest,
        more_state: Callable[[], dict[str, Any]],
    ) -> None:
        """Create the observer; `more_state` returns further keys of state.json."""
        self._config = config
        self._saver = saver
        self._state = state
        self._stop = stop
        self._more_state = more_state
        self._stall: float | None = None

    @property
    def is_broken(self) -> bool:
        """True if this rank's saves failed too often."""
        return self._saver.broken

    def take_stall(self) -> float | None:
        """Return the seconds that the last save held up training; None if that was taken before."""
        stall = self._stall
        self._stall = None
        return stall

    def after(self, step: Step) -> None:
        """Save the state after a step if it is due."""
        if any(row.is_broken for row in step.rows):
            raise TrainingError(
                f"{MOST_FAILURES} checkpoints in a row could not be saved; all ranks stop. Mend "
                f"the cause ({self._saver.places[0].problem}), and start again"
            )
        self._saver.poll()
        settings = self._config.checkpoint
        done = step.end.step
        ends = step.stops or done == self._config.num_steps
        asked = ends or self._stop.saving
        on_disk = asked or done in settings.at or is_due(settings.every, done)
        disk, *others = self._saver.places
        places = [place for place in others if not asked and is_due(place.every, done)]
        if on_disk:
            places.append(disk)
        if places:
            pulse.doing(f"saving step {done}")
            state = self._state.at(step.end) | self._more_state()
            self._stall = sum(self._saver.save(state, place, wait=ends) for place in places)
        if on_disk:
            self._stop.saved()
        if ends:
            self._saver.require_saved()
            self._stop.finished()

    def at_end(self, result: Result) -> None:
        """Forget the requests that stopped an earlier launch at its last step."""
        if not result.trained:
            self._stop.finished()
