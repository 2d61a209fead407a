"""A run's folder: a new one, or the one that is resumed; its metrics, and where it goes on from."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from rich.console import Console

from parallel3d.atomic import replace_text
from parallel3d.checkpoint import prune, resume
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus
from parallel3d.errors import ConfigError
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly
from parallel3d.train.attempts import Attempts, folder_of_this_launch, step_reached
from parallel3d.train.metrics import MetricsWriter, Progress, require_tensorboard


def find_folder(config: RunConfig, mesh: Mesh) -> Path | None:
    """The folder of the run that this one goes on with; None for a new run.

    A launcher that restarts all ranks gets the folder of their last attempt. Collective; raises
    ConfigError on all ranks if a run of this name exists and is not to be resumed, and what
    `Attempts.check` raises, so that a hopeless run does not build its model first.
    """

    def look() -> str | None:
        if config.run.tensorboard:
            require_tensorboard()
        directory = Path(config.run.directory)
        if config.run.name == "auto":
            if not mesh.restart_count:
                return None
            folder = folder_of_this_launch(directory, _name(config))
        else:
            folder = directory / config.run.name
        if folder is None or not folder.exists():
            return None
        if config.checkpoint.resume == "none" and not mesh.restart_count:
            raise ConfigError(
                f'parallel3d.run.name = "{config.run.name}": {folder} exists, and '
                'checkpoint.resume = "none" starts afresh; use another name, or resume "auto"'
            )
        attempts(folder, config).check(step_reached(folder), mesh.restart_count > 0)
        return str(folder)

    found = on_first(mesh, look)
    return Path(found) if found else None


def find_checkpoint(
    config: RunConfig, mesh: Mesh, folder: Path | None, say: Callable[[str], None]
) -> resume.Found | None:
    """The checkpoint to start from; says which, and what was rejected and why.

    Collective. Raises CheckpointError on all ranks if the one that was asked for cannot be used.
    """
    wanted = config.checkpoint.resume
    own = folder / "checkpoints" if folder else None
    found: resume.Found | None = None
    rejected: list[str] = []
    if own and (mesh.restart_count or wanted == "auto"):
        # After a restart the run's own newest checkpoint is further than what was asked for.
        found, rejected = resume.find(own, "auto", mesh)
    if found is None and wanted not in ("auto", "none"):
        if own is None and isinstance(wanted, int):
            raise ConfigError(
                f"parallel3d.checkpoint.resume = {wanted}: a step is one of an existing run; set "
                "parallel3d.run.name to it, or give the checkpoint's path"
            )
        found, rejected = resume.find(own or Path(), wanted, mesh)
    for reason in rejected:
        say(f"resume  {reason}")
    if found:
        say(f"resume  from {found.folder}: step {found.step} of {config.num_steps}")
    elif folder:
        said = "no checkpoint that can be used" if rejected else "no checkpoint"
        say(f"resume  NOTHING TO RESUME: {folder} has {said}; starting afresh from step 0")
    return found


def restore(
    found: resume.Found | None,
    config: RunConfig,
    mesh: Mesh,
    parts: Assembly,
    corpus: Corpus,
    say: Callable[[str], None],
) -> Position:
    """Bring the engine to a checkpoint, if there is one; where training goes on."""
    if found is None:
        return Position()
    position = RunState(config, corpus).position_in(found.state, found.folder, say)
    load(
        found.folder,
        found.files,
        found.state,
        engine=parts.engine,
        mesh=mesh,
        layers=parts.layers,
    )
    return position


def attempts(folder: Path, asked: RunConfig) -> Attempts:
    """The attempts at the run in a folder, with the settings that the user asked for."""
    return Attempts(folder, asked.to_dict())


class Output:
    """The run's folder, its metrics and its progress; rank 0 alone writes.

    `folder` is that of an earlier attempt, None for a new run; `start` is where this one begins;
    `asked` is the config as it was before the corpus completed it.
    Raises Parallel3DError on all ranks if the folder cannot be made, and TrainingError if the run
    has ended at the same step again and again.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        console: Console,
        folder: Path | None = None,
        start: Position | None = None,
        asked: RunConfig | None = None,
    ) -> None:
        step = start.step if start else 0
        self.directory = Path(on_first(mesh, lambda: str(folder or _make_directory(config))))
        self.checkpoints = self.directory / "checkpoints"
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self._attempts = attempts(self.directory, asked or config)
        names = resume.set_aside(self.checkpoints, step, mesh)
        if names:
            console.print(f"resume  not part of the run any more: {', '.join(names)}")
        restart = mesh.restart_count > 0
        on_first(mesh, lambda: self._begin(config, step, restart))
        if mesh.rank == 0:
            self.writer = MetricsWriter(self.directory, config.run.tensorboard)
            self.progress = Progress(config.num_steps, config.steps_per_print, console)

    def _begin(self, config: RunConfig, step: int, restart: bool) -> None:
        self._attempts.begin(step_reached(self.directory), restart)
        prune.remove_leftovers(self.checkpoints)
        forget_after(self.directory / "metrics.jsonl", step)
        resolved = json.dumps(config.to_dict(), indent=1)
        replace_text(self.directory / "config.json", f"{resolved}\n")

    def end(self, stopped: bool) -> None:
        """Note that the run ended well: done, or `stopped` with everything saved."""
        if self.writer:
            self._attempts.end(stopped)

    def close(self) -> None:
        """Close what rank 0 has open."""
        for part in (self.writer, self.progress):
            if part:
                part.close()


def forget_after(metrics: Path, step: int) -> None:
    """Drop the lines of steps that will be done again, so that each step has one line."""
    kept = [line for number, line in _whole_lines(metrics) if number <= step]
    if metrics.exists():
        replace_text(metrics, "".join(kept))


def _whole_lines(metrics: Path) -> Sequence[tuple[int, str]]:
    """Each line and its step; a kill may have cut the last one off, or only its end."""
    result = []
    if metrics.exists():
        for line in metrics.read_text(errors="replace").split("\n"):
            with suppress(ValueError, KeyError, TypeError):
                result.append((int(json.loads(line)["step"]), f"{line}\n"))
    return result


def _name(config: RunConfig) -> str:
    sizes = "x".join(str(getattr(config.mesh, axis)) for axis in ("pp", "dp", "tp"))
    model = config.model
    return f"{model.family}-h{model.hidden_size}-l{model.num_hidden_layers}-{sizes}"


def _make_directory(config: RunConfig) -> Path:
    name = config.run.name if config.run.name != "auto" else _name(config)
    for number in count(1):
        directory = Path(config.run.directory) / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            if config.run.name != "auto":
                raise ConfigError(f"{directory} was made by another run; start again") from None
        except OSError as error:
            raise ConfigError(
                f'parallel3d.run.directory = "{config.run.directory}": cannot be written '
                f"({error.strerror}); name a folder that can"
            ) from None
    raise AssertionError("count() does not end")
