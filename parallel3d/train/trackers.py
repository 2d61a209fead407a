"""Delivery of a run's metrics to experiment trackers, whose errors never end the run.

The trackers are accelerate's, and our own "csv". A run selects them by parallel3d.run.trackers, or
by DeepSpeed's blocks `tensorboard`, `csv_monitor`, `wandb` and `comet`. DeepSpeed itself does not
get these blocks, so nothing is opened twice. The process that constructs `Trackers` reports.
"""

import csv
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parallel3d.base.atomic import replace_text
from parallel3d.base.reader import JsonObject, flat
from parallel3d.base.say import Say
from parallel3d.config import CompleteConfig

START_SECONDS = 30.0
"""Time limit of a tracker's start, and of its end."""
LOG_SECONDS = 10.0
"""Time limit of passing on a step's values."""

Values = Mapping[str, float]
PROJECT = "parallel3d"  # default for trackers that need a project
# The trackers that have a block in DeepSpeed's config.
_BLOCKS = {"tensorboard": "tensorboard", "csv": "csv_monitor", "wandb": "wandb", "comet": "comet"}
_PACKAGES = {"comet": "comet_ml"}  # also accelerate's name of the tracker
_REMEDIES = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline and upload later with `wandb sync`",
    "comet": "set COMET_API_KEY, or comet.online to false and upload later with `comet upload`",
    "mlflow": "check MLFLOW_TRACKING_URI; sqlite:///mlflow.db needs no server",
    "swanlab": "set SWANLAB_MODE=offline",
}


def requested_trackers(config: CompleteConfig) -> dict[str, str]:
    """Return the trackers that a config selects, each with the path of the setting."""
    run = config.parallel3d.run
    settings: dict[str, str] = dict.fromkeys(run.trackers, "parallel3d.run.trackers")
    if run.tensorboard:
        settings.setdefault("tensorboard", "parallel3d.run.tensorboard")
    return settings | {
        name: block for name, block in _BLOCKS.items() if getattr(config, block).enabled
    }


class Trackers:
    """The trackers that `config` selects, for the run in `directory`.

    A tracker that fails is reported once with a remedy, and dropped. If a run resumes from `step`,
    later steps are removed from trackers that allow it.
    """

    def __init__(self, config: CompleteConfig, directory: Path, *, step: int, say: Say) -> None:
        self._say = say
        self._settings = requested_trackers(config)
        self._running: dict[str, Any] = {}
        for name in self._settings:
            with self._dropped_on_error(name, "cannot be started and is left out", START_SECONDS):
                self._running[name] = tracker = make(name, config, directory, step)
                tracker.start()
                if self._settings[name] == "comet" and config.comet.experiment_name is not None:
                    tracker.writer.set_name(config.comet.experiment_name)
                if name not in ("tensorboard", "csv"):  # they take no settings
                    settings = flat(config.to_public_dict())
                    for key, value in settings.items():
                        if isinstance(value, list | tuple):
                            settings[key] = str(value)
                    tracker.store_init_configuration(settings)

    def log(self, values: Values, step: int) -> None:
        """Pass the values of a step to each tracker; raise nothing."""
        for name, tracker in list(self._running.items()):
            with self._dropped_on_error(
                name, f"failed at step {step} and is left out", LOG_SECONDS
            ):
                tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Close each tracker; raise nothing."""
        for name, tracker in list(self._running.items()):
            del self._running[name]
            with self._dropped_on_error(name, "could not be closed", START_SECONDS):
                tracker.finish()

    @contextmanager
    def _dropped_on_error(self, name: str, what: str, seconds: float) -> Iterator[None]:
        try:
            with _time_limit(seconds):
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a tracker in Rust raises its own base class
            with suppress(BaseException), _time_limit(LOG_SECONDS):
                # The first error is the one to report.
                self._running.pop(name).finish()
            first = next(iter(str(error).strip().splitlines()), "")
            reason = f"{type(error).__name__}: {first}"[:200]
            remedy = _REMEDIES.get(name, "check its log")
            if isinstance(error, ImportError):
                remedy = f"pip install {_PACKAGES.get(name, name)}"
                if error.name == "accelerate":
                    remedy = "pip install --upgrade accelerate"
            self._say(
                f"WARNING: {self._settings[name]}: {name} {what} ({reason}); {remedy}, or remove it"
            )


class NoAnswer(BaseException):
    """Raised in a tracker's call that takes too long; no Exception, which libraries try again."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise NoAnswer in the block after `seconds`, in the main thread only.

    An alarm, and no thread of its own, because some trackers belong to the thread that started
    them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise NoAnswer(f"nothing for {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    # Again every second, for calls that swallow it.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def make(name: str, config: CompleteConfig, directory: Path, step: int) -> Any:
    """Return the tracker called `name`, not yet started; `step` is where the run resumes."""
    if name == "csv":
        block = config.csv_monitor
        folder = Path(block.output_path, block.job_name) if block.enabled else directory / "csv"
        return CsvTracker(folder, step)
    from accelerate import tracking

    # The trackers and their logger ask accelerate's PartialState for this process's rank. Creating
    # it would choose a device and a backend a second time, and the caller knows the rank already.
    tracking.logger = logging.getLogger("accelerate.tracking")
    cls = tracking.LOGGER_TYPE_TO_CLASS.get(_PACKAGES.get(name, name))
    if cls is None:
        raise ImportError(f"accelerate has no tracker {name}", name="accelerate")
    tracker = cls(**_arguments(name, config, directory, step))
    tracker.main_process_only = False
    return tracker


def _arguments(name: str, config: CompleteConfig, directory: Path, step: int) -> JsonObject:
    """Return the arguments of accelerate's class; `run_name` is the project of most trackers."""
    run = directory.name
    environ = os.environ
    arguments: dict[str, JsonObject] = {
        "tensorboard": {"run_name": name, "logging_dir": str(directory), "purge_step": step + 1},
        "wandb": {
            "run_name": environ.get("WANDB_PROJECT", PROJECT),
            "name": environ.get("WANDB_NAME", run),
            "dir": environ.get("WANDB_DIR", str(directory)),
        },
        "comet": {"run_name": environ.get("COMET_PROJECT_NAME", PROJECT)},
        "mlflow": {"experiment_name": PROJECT, "run_name": run},
        "aim": {"run_name": run},
        "clearml": {"run_name": PROJECT, "task_name": run},
        "dvclive": {"run_name": run, "dir": str(directory / "dvclive")},
        "swanlab": {"run_name": PROJECT, "experiment_name": run, "logdir": str(directory / name)},
        "trackio": {"run_name": PROJECT, "name": run},
    }
    board = config.tensorboard
    wandb = config.wandb
    comet = config.comet
    keys = ("workspace", "api_key", "experiment_key", "online", "mode")
    of_comet = {key: getattr(comet, key) for key in keys}
    blocks: dict[str, JsonObject] = {
        "tensorboard": {"run_name": board.job_name, "logging_dir": board.output_path},
        "wandb": {"run_name": wandb.project, "group": wandb.group, "entity": wandb.team},
        "comet": {"run_name": comet.project}
        | {key: value for key, value in of_comet.items() if value not in (None, "")},
    }
    has_block = name in blocks and getattr(config, name).enabled
    return arguments[name] | (blocks[name] if has_block else {})


class CsvTracker:
    """Writes one csv file per metric in DeepSpeed's format: a header, then `step,value`."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._folder = folder
        self._step = step

    def start(self) -> None:
        """Create the folder, and remove rows of steps after `step`, which will be repeated."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.csv"):
            # Without what follows the last newline: a disk that filled up may hold a part of a row.
            lines = path.read_bytes().decode(errors="replace").split("\n")[:-1]
            rows = [row for row in lines[1:] if int(row.partition(",")[0]) <= self._step]
            replace_text(path, "".join(f"{line}\n" for line in [*lines[:1], *rows]))

    def log(self, values: Values, step: int) -> None:
        """Append a row to the csv file of each value."""
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])

    def finish(self) -> None:
        """Do nothing: no file is open."""
