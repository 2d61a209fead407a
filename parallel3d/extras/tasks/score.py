"""Score a checkpoint, or a run as it trains, on tasks."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base.errors import ConfigError
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.config import ResolvedConfig
from parallel3d.data.tokenizer import load_tokenizer, num_tokens
from parallel3d.extras.tasks.scorer import Interrupted, Scorer
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.assembly import Assembly
from parallel3d.train.ending import StopRequest
from parallel3d.train.evaluate_checkpoint import open_evaluator
from parallel3d.train.observer import Observer, Step, is_due
from parallel3d.train.progress import Progress
from parallel3d.train.start import Start, begin

ERROR = "_stderr"
"""The end of the name of a metric's standard error."""
Scores = Mapping[str, Mapping[str, float]]
"""Task -> metric -> value, also of its standard error."""


class Tasks:
    """Tasks that rank 0 has loaded; collective.

    Raises ConfigError on all ranks if they cannot be loaded.
    """

    def __init__(self, names: Sequence[str], mesh: Mesh) -> None:
        self._mesh = mesh
        self._loaded: dict[str, Any] | None = None
        pulse.doing("loading tasks")
        agree(mesh, lambda: self._load(names))

    def _load(self, names: Sequence[str]) -> None:
        if self._mesh.rank == 0:
            if find_spec("lm_eval") is None:
                raise ConfigError("lm_eval is not installed; run: pip install 'parallel3d[tasks]'")
            from parallel3d.extras.tasks.library import load_tasks

            self._loaded = load_tasks(names)

    def score(self, scorer: Scorer, tokenizer: Path) -> Scores | None:
        """Return the scores on all ranks, or None after a request to stop; collective.

        - `tokenizer`: its folder.
        """
        if self._mesh.rank != 0:
            with suppress(Interrupted):
                scorer.follow()
        scores: Scores | None = on_first(self._mesh, lambda: self._lead(scorer, tokenizer))
        return scores

    def observer(
        self, start: Start, parts: Assembly, *, stop: StopRequest, progress: Progress | None
    ) -> "ScheduledTasks":
        """Return the observer that scores a run; `progress` shows the scores, on rank 0."""
        scorer = Scorer(
            start.config,
            self._mesh,
            evaluator=parts.evaluator,
            schedule=parts.schedule,
            stop=stop,
        )
        return ScheduledTasks(start, self, scorer, progress)

    def _lead(self, scorer: Scorer, tokenizer: Path) -> Scores | None:
        from parallel3d.extras.tasks.library import score

        assert self._loaded is not None, "rank 0 has loaded them"
        return score(self._loaded, scorer, load_tokenizer(tokenizer))


def score_checkpoint(
    config: ResolvedConfig,
    mesh: Mesh,
    checkpoint: Path,
    names: Sequence[str],
    stop: StopRequest,
    console: Console,
) -> Scores | None:
    """Return the scores of a checkpoint's weights on tasks; collective.

    Returns None after a request to stop. The tasks are loaded before the weights, and the tokenizer
    is the checkpoint's. Raises ConfigError and CheckpointError.
    """
    begin(config, mesh, console)
    tasks = Tasks(names, mesh)
    tokenizer = Path(on_first(mesh, lambda: str(_tokenizer_of(checkpoint, config))))
    # Of any number of tokens: the length of the run does not matter.
    complete = config.with_corpus(num_tokens(load_tokenizer(tokenizer)), 2**62)
    with open_evaluator(complete, mesh, checkpoint, console) as (evaluator, schedule):
        stop.hold(None)
        scorer = Scorer(complete, mesh, evaluator=evaluator, schedule=schedule, stop=stop)
        return tasks.score(scorer, tokenizer)


def _tokenizer_of(checkpoint: Path, config: ResolvedConfig) -> Path:
    """Return the folder of a checkpoint's tokenizer, or of the one that made its token ids."""
    for folder in (checkpoint / TOKENIZER, Path(config.data.tokenizer)):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"--tasks: {checkpoint} has no tokenizer for the texts of tasks; name its folder with"
        " --data.tokenizer"
    )


class ScheduledTasks(Observer):
    """Scores a run on tasks after the steps of `train.evaluate_tasks`, and after the last one."""

    collectives = "those of an evaluation, and broadcasts of texts, after the steps that are scored"

    def __init__(
        self, start: Start, tasks: Tasks, scorer: Scorer, progress: Progress | None
    ) -> None:
        self.every = start.config.train.evaluate_tasks.every
        self._num_steps = start.config.num_steps
        self._tokenizer = start.corpus.tokenizer_directory
        self._tasks = tasks
        self._scorer = scorer
        self._progress = progress

    def after(self, step: Step) -> None:
        """Set the step's `scores`, or `stops` if a request to stop interrupts it."""
        done = step.number + 1
        if step.stops or not (done == self._num_steps or is_due(self.every, done)):
            return
        scores = self._tasks.score(self._scorer, self._tokenizer)
        if scores is None:
            step.stops = True
            return
        step.scores = scores
        if self._progress:
            for line in in_words(scores):
                self._progress.say(f"step {done}  {line}")


def in_words(scores: Scores) -> list[str]:
    """Return a line for each task, with its metrics and their standard errors."""
    lines = []
    for name, metrics in scores.items():
        numbers = []
        for metric, value in metrics.items():
            if metric.endswith(ERROR):
                continue
            error = metrics.get(f"{metric}{ERROR}")
            numbers.append(f"{metric} {value:.5g}" + ("" if error is None else f" ± {error:.3g}"))
        lines.append(f"{name}  {', '.join(numbers)}")
    return lines
