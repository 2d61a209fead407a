"""DeepSpeed's monitoring blocks: trackers, timers, FLOPs and communication.

DeepSpeed does not see these blocks: train/trackers.py and train/profiler.py implement them with
parallel3d's own figures.
"""

from typing import Literal

from pydantic import Field

from parallel3d.base.section import (
    FolderText,
    Items,
    NaturalCount,
    PathText,
    PositiveCount,
    Strings,
)
from parallel3d.config.switch import Switched

# DeepSpeed's null means the same as a missing block.
SWITCHED = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger")
Tracker = Literal[
    "tensorboard",
    "csv",
    "wandb",
    "comet",
    "mlflow",
    "aim",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
]
Trackers = Items[Tracker]


class TensorBoardConfig(Switched):
    """TensorBoard's files, where DeepSpeed puts them: <output_path>/<job_name>."""

    output_path: FolderText = ""
    """Output folder, relative to the working directory."""
    job_name: PathText = "DeepSpeedJobName"
    """Subfolder of output_path."""


class CsvMonitorConfig(TensorBoardConfig):
    """One CSV file per metric, where DeepSpeed puts them: <output_path>/<job_name>/<name>.csv.

    Metrics have their names from metrics.jsonl; a row is `step,value`.
    """


class WandbConfig(Switched):
    """Weights & Biases; WANDB_MODE=offline keeps the run on disk."""

    group: str | None = None
    """Group of the run."""
    team: str | None = None
    """Team (entity) that owns the run."""
    project: str = "deepspeed"
    """Project of the run."""


class CometConfig(Switched):
    """Comet; null leaves a setting to Comet's own configuration and environment."""

    samples_log_interval: NaturalCount = 100
    """Samples between two values of a metric."""
    project: str | None = None
    """Project of the experiment."""
    workspace: str | None = None
    """Workspace of the experiment."""
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    """API key; never written to the run's config.json. Prefer COMET_API_KEY."""
    experiment_name: str | None = None
    """Name of the experiment; null uses the run's name."""
    experiment_key: str | None = None
    """Key of an existing experiment to continue."""
    online: bool | None = None
    """If false, keep the experiment on disk."""
    mode: Literal["get", "create", "get_or_create"] | None = None
    """Continue an experiment ("get") or start a new one ("create")."""


class FlopsProfilerConfig(Switched):
    """A line with the FLOPs of one step: parallel3d's own count, as used for MFU."""

    profile_step: PositiveCount = 1
    """Step after which the line is printed, counted from 1."""


class CommsLoggerConfig(Switched):
    """A table of one step's communication: calls and bytes, by group and operation."""

    prof_all: bool = True
    """Count all operations; false counts those in prof_ops."""
    prof_ops: Strings = ()
    """Operations to count, such as "all_reduce"."""
