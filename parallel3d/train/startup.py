"""The start of a run: its corpus, the checkpoint that it resumes from, its folder."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base import atomic
from parallel3d.checkpoint import prune, resume
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus
from parallel3d.mesh import compute
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.plan.open_weights import leaves_weights_open, with_weights
from parallel3d.pretrained.load import find_weights, load_weights
from parallel3d.pretrained.tokenizer import remark
from parallel3d.train.assembly import Assembly
from parallel3d.train.attempts import Attempts
from parallel3d.train.claim import Claim, written_to
from parallel3d.train.history import METRICS, forget_after, step_reached
from parallel3d.train.known_hardware import described
from parallel3d.train.machines import refuse_unshared
from parallel3d.train.metrics import MetricsWriter
from parallel3d.train.profiler import Profiler
from parallel3d.train.progress import Progress
from parallel3d.train.trackers import Trackers, wanted

Say = Callable[[str], None]

SAVING_TIMEOUT = 1800.0  # seconds that a rank waits for another's disk


@dataclass(frozen=True)
class RunPlace:
    """The folder of a run, the digest by which its config finds it, and whether it exists."""

    folder: Path
    digest: str
    exists: bool


@dataclass(frozen=True)
class Start:
    """The start of a run, which every rank knows before its model is built."""

    config: RunConfig
    """The final config: the corpus's vocabulary, and the number of steps from `position` on."""
    settings: Mapping[str, Any]
    """The config as the user gave it; an attempt with other settings is a fresh chance."""
    place: RunPlace
    found: resume.FoundCheckpoint | None
    """The checkpoint to load; None where training starts afresh."""
    position: Position
    """The position in the run and in its data."""
    tokenizer: Path | None
    """The folder of what the ids mean; None of ids alone."""
    training_tokens: int
    """The corpus's tokens for training, each counted once."""
    pretrained: Path | None = None
    """The folder of the model whose weights training starts from, without a checkpoint."""


def find_folder(config: RunConfig, mesh: Mesh, claim: Claim | None) -> RunPlace:
    """The folder in which the run is written, whether it exists or not.

    `claim` is rank 0's. Collective; raises on all ranks what `Attempts.check` raises, so that a
    hopeless run builds neither corpus nor model, and ConfigError where a node sees another folder.
    """

    def look() -> tuple[str, str, bool]:
        assert claim, "rank 0 claims the folder before it meets the others"
        exists = claim.folder.exists()
        if exists:
            attempts = Attempts(claim.folder, config.to_dict(), claim.config)
            attempts.check(step_reached(claim.folder), mesh.restart_count > 0)
        return str(claim.folder), claim.config, exists

    folder, digest, exists = on_first(mesh, look)
    refuse_unshared(Path(folder), config.run.directory, mesh)
    return RunPlace(Path(folder), digest, exists)


def begin(config: RunConfig, mesh: Mesh, console: Console) -> None:
    """Set how this process computes; print each rank's place and device, and what was filled in."""
    compute.use(tf32=config.train.tf32, deterministic=config.train.deterministic)
    console.print(mesh.picture(), *compute.describe(mesh.device), *config.notes, sep="\n")


def find_start(
    config: RunConfig, mesh: Mesh, *, place: RunPlace, corpus: Corpus, say: Say
) -> Start:
    """The start of a run of this config, given its folder and its corpus.

    Collective. Says which checkpoint it is, what was rejected and why, and what has changed since.
    Raises ConfigError or CheckpointError on all ranks if config, corpus and checkpoint do not go
    together, or the checkpoint that was asked for cannot be used.
    """
    tokenizer = corpus.tokenizer_directory
    complete = config.with_corpus(corpus.vocab_size, len(corpus.train))
    if leaves_weights_open(complete):
        known = described(complete, mesh.device)

        def look() -> tuple[str, str]:  # at rank 0's device: ranks on unlike ones need one program
            from parallel3d.plan.report.choose import weights_for  # the first rank alone needs it

            return weights_for(complete, known)

        chosen = on_first(mesh, look)
        complete = with_weights(complete, *chosen)
    for note in complete.notes[len(config.notes) :]:
        say(note)
    found = _find_checkpoint(complete, mesh, place.folder if place.exists else None, say)
    position = Position()
    if found:
        position = RunState(complete, corpus).position_in(found.state, found.folder, say)
    pretrained = None if found else _find_pretrained(complete, mesh, tokenizer, say)
    return Start(
        config=complete.resumed(position.step, position.next_sample),
        settings=config.to_dict(),
        place=place,
        found=found,
        position=position,
        tokenizer=tokenizer if any(tokenizer.iterdir()) else None,
        training_tokens=len(corpus.train),
        pretrained=pretrained,
    )


def _find_pretrained(config: RunConfig, mesh: Mesh, tokenizer: Path, say: Say) -> Path | None:
    """The folder of model.from_pretrained, if there is one; says so, and of its tokenizer."""
    origin = getattr(config.model, "from_pretrained", None)
    if origin is None:
        return None
    folder = find_weights(config.model, mesh)
    at = f" at {origin.revision}" if origin.revision else ""
    say(f"weights of {origin.folder}{at}")
    if said := on_first(mesh, lambda: remark(folder, tokenizer, origin.folder)):
        say(said)
    return folder


def _find_checkpoint(
    config: RunConfig, mesh: Mesh, folder: Path | None, say: Say
) -> resume.FoundCheckpoint | None:
    """The checkpoint to start from; says which, and what was rejected and why.

    Collective. Raises CheckpointError on all ranks if the one that was asked for cannot be used.
    """
    wanted = config.checkpoint.resume
    own = folder / "checkpoints" if folder else None
    found: resume.FoundCheckpoint | None = None
    rejected: list[str] = []
    if own and (mesh.restart_count or wanted == "auto"):
        # After a restart the run's own newest checkpoint is further than what was asked for.
        found, rejected = resume.find(own, "auto", mesh)
    if found is None and wanted not in ("auto", "none"):
        found, rejected = resume.find(own or Path(), wanted, mesh)
    for reason in rejected:
        say(f"resume  {reason}")
    if found:
        say(f"resume  from {found.folder}: step {found.step} of {config.num_steps}")
    elif folder:
        said = "no checkpoint that can be used" if rejected else "no checkpoint"
        say(f"resume  NOTHING TO RESUME: {folder} has {said}; starting afresh from step 0")
    return found


def restore(start: Start, mesh: Mesh, parts: Assembly) -> None:
    """Load a start's checkpoint, or published weights, if any, into the engine; collective."""
    if start.pretrained:
        load_weights(
            start.pretrained,
            start.config.model,
            engine=parts.engine,
            mesh=mesh,
            layers=parts.layers,
        )
    if found := start.found:
        load(
            found.folder,
            found.files,
            found.state,
            engine=parts.engine,
            mesh=mesh,
            layers=parts.layers,
        )


def make_profiler(
    config: RunConfig, mesh: Mesh, *, parts: Assembly, directory: Path
) -> Profiler | None:
    """The profiler of the steps of train.profile, or None."""
    if config.train.profile is None:
        return None
    tensorboard = "tensorboard" in wanted(config)
    return Profiler(
        config.train.profile, mesh, parts.executor, run=directory, tensorboard=tensorboard
    )


class Output:
    """The run's folder, its metrics and its progress; rank 0 alone writes.

    Raises Parallel3DError on all ranks if the folder cannot be made, and TrainingError if the run
    has ended at the same step again and again.
    """

    def __init__(self, start: Start, mesh: Mesh, console: Console) -> None:
        config, step = start.config, start.position.step
        self._console = console
        self.directory = start.place.folder
        self.checkpoints = self.directory / "checkpoints"
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self._attempts = Attempts(self.directory, start.settings, start.place.digest)
        if names := resume.set_aside(self.checkpoints, step, mesh):
            console.print(f"resume  not part of the run any more: {', '.join(names)}")
        on_first(mesh, lambda: self._begin(start, restart=mesh.restart_count > 0))
        on_first(mesh, lambda: self._copy_tokenizer(start.tokenizer))
        if mesh.rank == 0:
            self.progress = Progress(config.num_steps, config.steps_per_print, console, step)
            trackers = Trackers(config, self.directory, step=step, say=self.progress.say)
            self.writer = MetricsWriter(self.directory, trackers, self.progress.say)

    def _begin(self, start: Start, restart: bool) -> None:
        config, step = start.config, start.position.step
        with written_to(self.directory):
            self.directory.mkdir(exist_ok=True)
            self._attempts.begin(step_reached(self.directory), restart)
            prune.remove_leftovers(self.checkpoints)
            forget_after(self.directory / METRICS, step)
            resolved = json.dumps(config.to_dict(), indent=1)
            atomic.replace_text(self.directory / "config.json", f"{resolved}\n")
            # Scaling laws of repeated data are fitted by it.
            counted = json.dumps({"training_tokens": start.training_tokens})
            atomic.replace_text(self.directory / "corpus.json", f"{counted}\n")

    def _copy_tokenizer(self, tokenizer: Path | None) -> None:
        """The run's own copy of its tokenizer: a cache may be emptied."""
        own = self.directory / TOKENIZER
        if tokenizer is None or own.exists():
            return
        with written_to(self.directory):
            partial = own.with_name(f"{TOKENIZER}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(tokenizer, partial, copy_function=shutil.copyfile)
            partial.chmod(self.directory.stat().st_mode)
            partial.rename(own)

    def end(self, stopped: bool) -> None:
        """Record that the run ended well: done, or `stopped` with everything saved."""
        if self.writer:
            try:
                self._attempts.end(stopped)
            except OSError as error:
                self._console.print(f"{self.directory} cannot be written ({error.strerror})")

    def close(self) -> None:
        """Close the files that rank 0 has open."""
        for part in (self.writer, self.progress):
            if part:
                part.close()
