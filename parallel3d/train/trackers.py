"""Delivery of a run's metrics to experiment trackers; no fault of theirs ends the run.

The trackers are accelerate's, and "csv" is ours. What a run asks for are the names in
parallel3d.run.trackers and DeepSpeed's blocks `tensorboard`, `csv_monitor`, `wandb` and `comet`,
which also say where to: DeepSpeed never sees these blocks, so nothing is opened twice. Nothing here
knows ranks: the process that constructs `Trackers` is the one that reports.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel3d.config import RunConfig
from parallel3d.train.tracker_kinds import Values, make

_log = logging.getLogger(__name__)

_AGAIN = 30.0  # seconds until a tracker whose disk was full is tried again
_KEPT = 10_000  # steps that are kept for it
_LIST = "parallel3d.run.trackers"
# DeepSpeed's block of each tracker that has one.
_BLOCKS = {"tensorboard": "tensorboard", "csv": "csv_monitor", "wandb": "wandb", "comet": "comet"}
_LOCAL = ("tensorboard", "csv")
_PACKAGES = {"tensorboard": "tensorboard", "comet": "comet_ml"}
_REMEDIES = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline and send the run later: `wandb sync`",
    "comet": 'set COMET_API_KEY, or comet.online to false and send it later: "comet upload"',
    "mlflow": "see MLFLOW_TRACKING_URI; a folder there, file:mlruns, needs no server",
    "swanlab": "set SWANLAB_MODE=offline",
}


def wanted(config: RunConfig) -> dict[str, str]:
    """The trackers that a run asks for, each with the setting that asks."""
    ours = config.run
    found: dict[str, str] = dict.fromkeys(ours.trackers, _LIST)
    if ours.tensorboard:
        found.setdefault("tensorboard", "parallel3d.run.tensorboard")
    for name, block in _BLOCKS.items():
        if getattr(config, block).enabled:
            found[name] = block
    return found


class Trackers:
    """The trackers that `config` asks for, of the run in `directory`.

    A tracker that cannot be started or fails later is named once, with what to do, and dropped; one
    of this machine's that finds its disk full is tried again, and loses nothing meanwhile. What it
    holds of steps after `step`, from which the run goes on, is forgotten where that is possible.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        *,
        step: int = 0,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        self._config, self._directory, self._say = config, directory, say
        self._wanted = wanted(config)
        self._running: dict[str, Any] = {}
        self._kept: dict[str, list[tuple[Values, int]]] = {}  # of those whose disk is full
        self._tried_at = 0.0
        for name in self._wanted:
            try:
                self._running[name] = self._started(name, step)
            except (Exception, SystemExit) as error:
                self._drop(name, "cannot be started", error)

    @property
    def names(self) -> list[str]:
        """Names of the trackers that are running."""
        return list(self._running)

    def log(self, values: Values, step: int) -> None:
        """Pass the values of a step to each tracker; raises nothing."""
        again = bool(self._kept) and time.monotonic() - self._tried_at > _AGAIN
        for name in list(self._kept) if again else ():
            self._catch_up(name)
        for kept in self._kept.values():
            kept.append((values, step))
            del kept[:-_KEPT]
        for name, tracker in list(self._running.items()):
            try:
                tracker.log(dict(values), step=step)
            except OSError as error:
                if name not in _LOCAL:
                    self._drop(name, f"failed at step {step}", error)
                    continue
                self._close(name)
                self._kept[name], self._tried_at = [(values, step)], time.monotonic()
                self._warn(name, f"cannot write; its values are kept, tried every {_AGAIN:.0f} s",
                           error, "make room")  # fmt: skip
            except (Exception, SystemExit) as error:
                self._drop(name, f"failed at step {step}", error)

    def finish(self) -> None:
        """Close each tracker; raises nothing."""
        for name in list(self._kept):
            self._catch_up(name)
        for name, tracker in list(self._running.items()):
            try:
                tracker.finish()
            except (Exception, SystemExit) as error:
                self._warn(name, "could not be closed", error, _REMEDIES.get(name, "see its log"))
        self._running.clear()

    def _started(self, name: str, step: int) -> Any:
        tracker = make(name, self._config, self._directory, step)
        try:
            tracker.start()
            if name not in _LOCAL:
                tracker.store_init_configuration(_flat(self._config.to_dict()))
        except (Exception, SystemExit):
            with suppress(Exception, SystemExit):
                tracker.finish()  # of what has begun
            raise
        return tracker

    def _catch_up(self, name: str) -> None:
        """Start a local tracker again with what was kept for it, if its disk has room by now."""
        self._tried_at = time.monotonic()
        kept = self._kept[name]
        try:
            # What it wrote before stays; of the first step that is kept it may have a part.
            tracker = self._started(name, kept[0][1] - 1)
            for values, step in kept:
                tracker.log(dict(values), step=step)
        except (Exception, SystemExit):
            return
        self._running[name] = tracker
        del self._kept[name]
        self._say(f"{name} writes again, {len(kept)} steps late")

    def _close(self, name: str) -> None:
        with suppress(Exception, SystemExit):  # it has failed already, which was said
            self._running.pop(name).finish()

    def _drop(self, name: str, what: str, error: BaseException) -> None:
        if name in self._running:
            self._close(name)
        remedy = _REMEDIES.get(name, "see its log")
        if isinstance(error, ImportError):
            package = _PACKAGES.get(name, name)
            remedy = f"pip install {package}"
        self._warn(name, f"{what} and is left out; training goes on", error, remedy)

    def _warn(self, name: str, what: str, error: BaseException, remedy: str) -> None:
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {first}"[:200]
        setting = self._wanted[name]
        self._say(f"WARNING: {setting}: {name} {what} ({reason}); {remedy}, or take it out")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config as trackers want it: one value a dotted path."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}.")
        else:
            flat[path] = str(value) if isinstance(value, list | tuple) else value
    return flat
