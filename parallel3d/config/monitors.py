"""DeepSpeed's blocks that report on a run: trackers, times, FLOPs, communication.

None of them reaches DeepSpeed: train/trackers.py and train/watch.py do it with our own figures.
"""

from typing import Annotated, Literal

from pydantic import Field, Strict

from parallel3d.base.section import PathText, Section, Strings

# Blocks that say nothing unless they are switched on.
SWITCHED = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger")
Tracker = Literal[
    "tensorboard", "csv", "wandb", "comet", "mlflow", "aim", "clearml", "dvclive", "swanlab",
    "trackio",
]  # fmt: skip
Trackers = Annotated[tuple[Tracker, ...], Strict(False)]


class Switched(Section):
    """A block that says nothing unless it is switched on."""

    enabled: bool = False
    """Whether the block is on; one that is off may hold anything."""


class TensorBoardConfig(Switched):
    """TensorBoard's files, as DeepSpeed places them: in <output_path>/<job_name>."""

    output_path: PathText = ""
    """Folder, relative to the working directory."""
    job_name: PathText = "DeepSpeedJobName"
    """Folder in it."""


class CsvMonitorConfig(TensorBoardConfig):
    """One csv file for each metric, as DeepSpeed writes them: <output_path>/<job_name>/<name>.csv.

    The names are those of metrics.jsonl, and a row is `step,value`.
    """


class WandbConfig(Switched):
    """Weights & Biases; WANDB_MODE=offline keeps the run on disk."""

    group: str | None = None
    """The group of runs that this one belongs to."""
    team: str | None = None
    """The team (entity) that the run is sent to."""
    project: str = "deepspeed"
    """The project."""


class CometConfig(Switched):
    """Comet; null leaves a setting to Comet's own file and environment."""

    samples_log_interval: int = Field(default=100, ge=0)
    """Samples after which a metric is sent again."""
    project: str | None = None
    """The project."""
    workspace: str | None = None
    """The workspace."""
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    """Its key; better in COMET_API_KEY, and never written to the run's config.json."""
    experiment_name: str | None = None
    """The experiment's name; null means the run's."""
    experiment_key: str | None = None
    """An experiment to go on with."""
    online: bool | None = None
    """false keeps the experiment on disk."""
    mode: Literal["get", "create", "get_or_create"] | None = None
    """Whether to go on with an experiment, or to make one."""


class FlopsProfilerConfig(Switched):
    """A table of FLOPs after a step: parallel3d's own count, which MFU uses, not DeepSpeed's."""

    profile_step: int = Field(default=1, gt=0)
    """The step after which it is printed, counted from 1."""
    detailed: bool = True
    """A row for each kind of layer; false: the totals."""
    output_file: PathText | None = None
    """File to write the table to; null prints it."""
    module_depth: int = -1
    """Not used: the rows are the pipeline's layers."""
    top_modules: int = 1
    """Not used: every kind of layer has a row."""
    recompute_fwd_factor: float = 0.0
    """Not used: what is computed again is not counted, as in MFU."""


class CommsLoggerConfig(Switched):
    """A table of one step's communication: calls and bytes, by group and operation."""

    prof_all: bool = True
    """Count every operation; false: those in prof_ops."""
    prof_ops: Strings = ()
    """Operations to count, such as "all_reduce"."""
    verbose: bool = False
    """Not used: it is one table."""
    debug: bool = False
    """Not used."""
