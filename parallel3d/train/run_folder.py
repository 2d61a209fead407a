"""The folder of a run: its config, metrics, tokenizer and checkpoints; only rank 0 writes."""

import json
import shutil
from pathlib import Path

from rich.console import Console

from parallel3d.base.atomic import replace_text
from parallel3d.base.journal import not_ended, open_journal, record
from parallel3d.base.step_lines import METRICS
from parallel3d.checkpoint import disk, find
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.engine import Engine
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.attempts import Attempts
from parallel3d.train.claim import written_to
from parallel3d.train.digests import DIGESTS
from parallel3d.train.known_hardware import known_hardware
from parallel3d.train.memory import begin_memory
from parallel3d.train.metrics import MetricsWriter, forget_after, step_reached
from parallel3d.train.progress import Progress
from parallel3d.train.result import Result
from parallel3d.train.start import Start
from parallel3d.train.trackers import Trackers

_SAVING_TIMEOUT = 1800.0  # seconds that a rank waits for another rank's disk


class Output:
    """The run's folder, its metrics and its progress display; only rank 0 writes.

    Raises on all ranks: Parallel3DError if the folder cannot be created, and the errors of
    `Attempts.begin`.
    """

    def __init__(self, start: Start, mesh: Mesh, console: Console) -> None:
        config, step = start.config, start.position.step
        self._console, self._start, self._mesh = console, start, mesh
        self.directory = start.folder
        self.checkpoints = self.directory / "checkpoints"
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self._attempts = Attempts(self.directory, start.settings, start.digest)
        open_journal(self.directory)
        tokenizer = start.corpus.tokenizer_directory
        if names := find.set_aside(self.checkpoints, step, mesh):
            console.print(f"resume  set aside, no longer part of the run: {', '.join(names)}")
        on_first(mesh, lambda: self._begin(start, restart=mesh.restart_count > 0))
        begin_memory(start.memory, mesh, self.directory, step if start.tier == "memory" else -1)
        on_first(mesh, lambda: self._copy_tokenizer(tokenizer))
        if mesh.rank == 0:
            self.progress = Progress(config.num_steps, config.steps_per_print, console, step)
            trackers = Trackers(config, self.directory, step=step, say=self.progress.say)
            self.writer = MetricsWriter(self.directory, trackers, self.progress.say)

    def _begin(self, start: Start, restart: bool) -> None:
        config, step = start.config, start.position.step
        with written_to(self.directory):
            self.directory.mkdir(exist_ok=True)
            reached = step_reached(self.directory)
            # An elastic launch is stopped when hosts come, to start again.
            self._attempts.begin(reached, restart and not self._mesh.has_agents)
            disk.remove_leftovers(self.checkpoints)
            for name in (METRICS, DIGESTS):
                forget_after(self.directory / name, step)
            resolved = json.dumps(config.to_public_dict(), indent=1)
            replace_text(self.directory / "config.json", f"{resolved}\n")
            # Fits of scaling laws for repeated data need this number.
            counted = json.dumps({"training_tokens": len(start.corpus.train)})
            replace_text(self.directory / "corpus.json", f"{counted}\n")
            known = known_hardware(config, self._mesh.device)
            record(
                "launch", step=step, restart=restart, mesh=str(config.mesh.sizes),
                chosen=next((n for n in config.notes if n.startswith("parallel3d.mesh: ")), None),
                unended=not_ended(self.directory), lost_steps=max(reached - step, 0),
                rejected=start.rejected, tier=start.tier,
                device=self._mesh.device.type, hardware=known.name if known else None,
            )  # fmt: skip

    def _copy_tokenizer(self, tokenizer: Path) -> None:
        """Copy the tokenizer into the run's folder, because a cache may be emptied."""
        own = self.directory / TOKENIZER
        if own.exists() or not any(tokenizer.iterdir()):
            return
        with written_to(self.directory):
            partial = own.with_name(f"{TOKENIZER}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(tokenizer, partial, copy_function=shutil.copyfile)
            partial.chmod(self.directory.stat().st_mode)
            partial.rename(own)

    def finish(self, result: Result, engine: Engine) -> None:
        """Write the weights of a finished run, and record its clean end; collective."""
        config = self._start.config
        if config.run.save_weights and not result.stopped:
            from parallel3d.huggingface.from_ranks import save_weights  # it loads transformers

            self._mesh.set_timeouts(_SAVING_TIMEOUT)
            pulse.doing("writing the weights")
            save_weights(
                engine, self._mesh, self.directory, config=config, corpus=self._start.corpus
            )
        if self._start.memory:
            self._start.memory.keep("", -1)
        if self.writer:
            try:
                self._attempts.end(result.stopped)
                record(
                    "end", step=result.steps, stopped=result.stopped,
                    peak_memory_bytes=result.peak_memory_bytes,
                )  # fmt: skip
            except OSError as error:
                self._console.print(f"{self.directory} cannot be written ({error.strerror})")

    def close(self) -> None:
        """Close the files and the progress display of rank 0."""
        for part in (self.writer, self.progress):
            if part:
                part.close()
