"""Delivery of a run's metrics to experiment trackers; no fault of theirs ends the run.

The trackers are accelerate's, and "csv" is ours. A run asks by parallel3d.run.trackers, or by
DeepSpeed's blocks `tensorboard`, `csv_monitor`, `wandb` and `comet`, which DeepSpeed never sees, so
nothing is opened twice. The process that constructs `Trackers` is the one that reports.
"""

import csv
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parallel3d.base.atomic import replace_text
from parallel3d.config import RunConfig

Values = Mapping[str, float]
PROJECT = "parallel3d"  # where a tracker wants one, and nobody named it
_LIST = "parallel3d.run.trackers"
# DeepSpeed's block of each tracker that has one.
_BLOCKS = {"tensorboard": "tensorboard", "csv": "csv_monitor", "wandb": "wandb", "comet": "comet"}
_LOCAL = ("tensorboard", "csv")
_PACKAGES = {"comet": "comet_ml"}  # accelerate calls the tracker so, too
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
    return found | {
        name: block for name, block in _BLOCKS.items() if getattr(config, block).enabled
    }


class Trackers:
    """The trackers that `config` asks for, of the run in `directory`.

    One that fails is named once, with what to do, and dropped. What it holds of steps after `step`,
    from which the run goes on, is forgotten where possible.
    """

    def __init__(
        self, config: RunConfig, directory: Path, *, step: int, say: Callable[[str], None]
    ) -> None:
        self._say, self._wanted = say, wanted(config)
        self._running: dict[str, Any] = {}
        for name in self._wanted:
            with self._dropped_on_error(name, "cannot be started and is left out"):
                self._running[name] = tracker = make(name, config, directory, step)
                tracker.start()
                if name not in _LOCAL:
                    tracker.store_init_configuration(_flat(config.to_public_dict()))

    def log(self, values: Values, step: int) -> None:
        """Pass the values of a step to each tracker; raises nothing."""
        for name, tracker in list(self._running.items()):
            with self._dropped_on_error(name, f"failed at step {step} and is left out"):
                tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Close each tracker; raises nothing."""
        for name, tracker in list(self._running.items()):
            del self._running[name]
            with self._dropped_on_error(name, "could not be closed"):
                tracker.finish()

    @contextmanager
    def _dropped_on_error(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            with suppress(Exception, SystemExit):  # it has failed already
                self._running.pop(name).finish()
            first = next(iter(str(error).strip().splitlines()), "")
            reason = f"{type(error).__name__}: {first}"[:200]
            remedy = _REMEDIES.get(name, "see its log")
            if isinstance(error, ImportError):
                remedy = f"pip install {_PACKAGES.get(name, name)}"
            self._say(
                f"WARNING: {self._wanted[name]}: {name} {what} ({reason}); {remedy}, or take it out"
            )


def make(name: str, config: RunConfig, directory: Path, step: int) -> Any:
    """The tracker called `name`, not yet started; `step` is where the run resumes."""
    if name == "csv":
        block = config.csv_monitor
        folder = Path(block.output_path, block.job_name) if block.enabled else directory / "csv"
        return CsvTracker(folder, step)
    from accelerate import tracking

    # The trackers and their logger ask accelerate's PartialState which rank this is, and setting
    # that up would choose a device and a backend a second time; the caller has decided already.
    tracking.logger = logging.getLogger("accelerate.tracking")
    cls = tracking.LOGGER_TYPE_TO_CLASS.get(_PACKAGES.get(name, name))
    if cls is None:
        raise ImportError(f"accelerate has no tracker {name}; update it")
    tracker = cls(**_arguments(name, config, directory, step))
    tracker.main_process_only = False
    return _Comet(tracker, config) if name == "comet" and config.comet.enabled else tracker


def _arguments(name: str, config: RunConfig, directory: Path, step: int) -> dict[str, Any]:
    """The arguments of accelerate's class; its `run_name` is most trackers' project."""
    run, environ = directory.name, os.environ
    arguments: dict[str, dict[str, Any]] = {
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
    board, wandb, comet = config.tensorboard, config.wandb, config.comet
    keys = ("workspace", "api_key", "experiment_key", "online", "mode")
    of_comet = {key: getattr(comet, key) for key in keys}
    blocks: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": board.job_name, "logging_dir": board.output_path},
        "wandb": {"run_name": wandb.project, "group": wandb.group, "entity": wandb.team},
        "comet": {"run_name": comet.project}
        | {key: value for key, value in of_comet.items() if value not in (None, "")},
    }
    has_block = name in blocks and getattr(config, name).enabled
    return arguments[name] | (blocks[name] if has_block else {})


class CsvTracker:
    """One csv file for each metric, in DeepSpeed's form: a head, then `step,value`.

    Rows of steps after `step`, which will be done again, are dropped at the start.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._folder, self._step = folder, step

    def start(self) -> None:
        """Make the folder, and drop the rows of steps that will be done again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.csv"):
            text = path.read_bytes().decode(errors="replace")
            # A disk that filled took the last line in part.
            lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            kept = "".join(lines[:1] + [row for row in lines[1:] if self._is_before(row)])
            if kept != text:
                replace_text(path, kept)

    def log(self, values: Values, step: int) -> None:
        """Add a row to the csv file of each value."""
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])

    def finish(self) -> None:
        """Do nothing: no file is open."""

    def _is_before(self, row: str) -> bool:
        first = row.partition(",")[0]
        return not first.isdecimal() or int(first) <= self._step


class _Comet:
    """Comet's tracker, which gets each metric once in so many samples, as DeepSpeed sends it."""

    def __init__(self, tracker: Any, config: RunConfig) -> None:
        self._tracker, self._block = tracker, config.comet
        self._samples_per_step = config.global_batch_size
        self._last: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def start(self) -> None:
        self._tracker.start()
        if self._block.experiment_name is not None:
            self._tracker.writer.set_name(self._block.experiment_name)

    def log(self, values: dict[str, float], step: int) -> None:
        samples, every = step * self._samples_per_step, self._block.samples_log_interval
        due = {k: v for k, v in values.items() if samples - self._last.get(k, -every) >= every}
        self._last |= dict.fromkeys(due, samples)
        if due:
            self._tracker.log(due, step=step)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config as trackers want it: one value a dotted path."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value) if isinstance(value, list | tuple) else value
    return flat
