"""The kinds of trackers: accelerate's classes as a run calls them, and csv files."""

import csv
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel3d.base.atomic import replace_text
from parallel3d.config import RunConfig

Values = Mapping[str, float]
PROJECT = "parallel3d"  # where a tracker wants one, and nobody named it
_CLASSES = {"comet": "comet_ml"}  # names of accelerate's that are not ours


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
    known = tracking.LOGGER_TYPE_TO_CLASS
    cls = known.get(_CLASSES.get(name, name))
    if cls is None:
        raise ImportError(f"accelerate has no tracker {name}; update it")
    tracker = cls(**_arguments(name, config, directory, step))
    tracker.main_process_only = False
    return _Sparse(tracker, config) if name == "comet" and config.comet.enabled else tracker


def _arguments(name: str, config: RunConfig, directory: Path, step: int) -> dict[str, Any]:
    """What accelerate's class is called with; its `run_name` is most trackers' project."""
    run, environment = directory.name, os.environ
    if name == "tensorboard":
        block = config.tensorboard
        own = {"run_name": "tensorboard", "logging_dir": str(directory)}
        theirs = {"run_name": block.job_name, "logging_dir": block.output_path}
        return (theirs if block.enabled else own) | {"purge_step": step + 1}
    if name == "wandb":
        found: dict[str, Any] = {"run_name": environment.get("WANDB_PROJECT", PROJECT)}
        if config.wandb.enabled:
            wandb = config.wandb
            found = {"run_name": wandb.project, "group": wandb.group, "entity": wandb.team}
        # Its own environment leads.
        found |= {} if "WANDB_NAME" in environment else {"name": run}
        return found | ({} if "WANDB_DIR" in environment else {"dir": str(directory)})
    if name == "comet":
        if not config.comet.enabled:
            return {"run_name": environment.get("COMET_PROJECT_NAME", PROJECT)}
        options = config.comet.model_dump(
            include={"workspace", "experiment_key", "online", "mode"}, exclude_none=True
        )
        key = config.comet.api_key
        options |= {"api_key": key} if key else {}
        return {"run_name": config.comet.project} | options
    own_name: dict[str, dict[str, Any]] = {
        "mlflow": {"experiment_name": PROJECT, "run_name": run},
        "aim": {"run_name": run},
        "clearml": {"run_name": PROJECT, "task_name": run},
        "dvclive": {"run_name": run, "dir": str(directory / "dvclive")},
        "swanlab": {"run_name": PROJECT, "experiment_name": run, "logdir": str(directory / name)},
        "trackio": {"run_name": PROJECT, "name": run},
    }
    return own_name[name]


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
            kept = "".join(lines[:1] + [row for row in lines[1:] if _number(row) <= self._step])
            if kept != text:
                replace_text(path, kept)

    def log(self, values: Values, step: int) -> None:
        """Add a row to the csv file of each value."""
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            is_new = not path.exists() or not path.stat().st_size
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])

    def finish(self) -> None:
        """Do nothing: no file is open."""


class _Sparse:
    """Comet's tracker, which gets each metric once in so many samples, as DeepSpeed sends it."""

    def __init__(self, tracker: Any, config: RunConfig) -> None:
        self._tracker, self._block = tracker, config.comet
        self._samples_per_step = config.global_batch_size
        self._last: dict[str, int] = {}

    def start(self) -> None:
        self._tracker.start()
        if self._block.experiment_name is not None:
            self._tracker.writer.set_name(self._block.experiment_name)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._tracker.store_init_configuration(values)

    def log(self, values: dict[str, float], step: int) -> None:
        samples, every = step * self._samples_per_step, self._block.samples_log_interval
        due = {k: v for k, v in values.items() if samples - self._last.get(k, -every) >= every}
        self._last |= dict.fromkeys(due, samples)
        if due:
            self._tracker.log(due, step=step)

    def finish(self) -> None:
        self._tracker.finish()


def _number(row: str) -> int:
    first = row.partition(",")[0]
    return int(first) if first.isdecimal() else 0
