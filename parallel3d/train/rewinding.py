"""Going back to the newest checkpoint of a run, because a step cannot be used."""

from collections.abc import Mapping
from typing import Any

from parallel3d.base.errors import TrainingError
from parallel3d.base.journal import record
from parallel3d.base.say import Say
from parallel3d.checkpoint.find import find_newest
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.save import Saver
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.assembly import Assembly
from parallel3d.train.check_bits import WrongBits
from parallel3d.train.observer import Rewind
from parallel3d.train.start import Start


class Rewinder:
    """Loads the newest checkpoint of a run in place of a step that cannot be used."""

    def __init__(
        self,
        start: Start,
        mesh: Mesh,
        parts: Assembly,
        *,
        saver: Saver | None,
        say: Say,
    ) -> None:
        self._start = start
        self._mesh = mesh
        self._parts = parts
        self._saver = saver
        self._say = say
        self._wrong_at = -1
        """The last step whose bits were wrong."""

    def load_newest(self, number: int, error: Rewind, vouched: int) -> Mapping[str, Any]:
        """Load the newest checkpoint, and return its state.json; later ones are set aside.

        Collective. Raises TrainingError on all ranks if there is none, or if `on_wrong` or the same
        wrong bits again end the run.

        - `number`: the steps that were done before the one that cannot be used.
        - `error`: why. Of wrong bits, checkpoints that no check vouches for are set aside first.
        - `vouched`: the newest step whose state every check has confirmed.
        """
        pulse.doing(f"rewinding from step {number + 1}")
        train = self._start.config.train
        self._mesh.set_timeouts(1800.0)  # for ranks that wait for one that reads a checkpoint
        self.finish_saves()
        places = self._start.places
        for place in places[1:]:
            place.forget_after(-1)
        reason = ""
        if isinstance(error, WrongBits):
            reason = self._distrust(number, error, vouched)
        checkpoint = find_newest(places)[0] or self._start.on_disk
        if checkpoint is None:
            # No checkpoint is before the first step.
            remedy = "Lower checkpoint.every, or set" if number else "Set"
            raise TrainingError(
                f"{reason}Step {number + 1} has no checkpoint before it to rewind to; all ranks "
                f"stop. {remedy} train.on_nonfinite, train.on_spike and train.check_bits.on_wrong "
                "to other values"
            )
        for place in places:
            place.forget_after(checkpoint.step)
        load(checkpoint, engine=self._parts.engine, mesh=self._mesh, layers=self._parts.layers)
        self._mesh.set_timeouts(train.timeout_seconds)
        if reason:
            self._wrong_at = number
            self._say(f"{reason}Rewound to step {checkpoint.step}")
            self.record("rewind", step=number + 1, to=checkpoint.step, reason="wrong bits")
        return checkpoint.state

    def _distrust(self, number: int, error: WrongBits, vouched: int) -> str:
        """Set aside what no check vouches for, and return the reason as sentences.

        Raises TrainingError if the run stops instead.
        """
        reason = f"after step {number + 1} {error}"
        self.record("wrong_bits", step=number + 1, reason=reason)
        names = [name for place in self._start.places for name in place.forget_after(vouched)]
        if names:
            reason += f". Set aside: {', '.join(names)}"
        on_wrong = self._start.config.train.check_bits.on_wrong
        if on_wrong == "stop" or number <= self._wrong_at:
            raise TrainingError(f"{reason}. All ranks stop")
        return f"{reason}. "

    def finish_saves(self) -> None:
        """Wait for the save in progress, which may be of an earlier step."""
        if self._saver:
            self._saver.finish()

    def record(self, event: str, **values: object) -> None:
        """Write an event to the run's journal, on rank 0."""
        if self._mesh.rank == 0:
            record(event, **values)
