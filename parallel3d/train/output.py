"""The output of a run: its folder, which only rank 0 writes, and what is printed of it."""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import DataError
from parallel3d.base.journal import not_ended, record
from parallel3d.base.step_lines import METRICS, finite
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import CompleteConfig
from parallel3d.config.deepspeed import describe_offload
from parallel3d.data.evaluation_samples import held_out_samples
from parallel3d.data.tokenizer import copy_unwritten
from parallel3d.engine import Engine
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.spec import count_params
from parallel3d.plan.report.plan_table import parameters
from parallel3d.tensor.attention import log_kernel
from parallel3d.train import known_hardware
from parallel3d.train.assembly import Assembly
from parallel3d.train.claim import Attempts, written_to
from parallel3d.train.digests import DIGESTS
from parallel3d.train.ending import command_to_go_on
from parallel3d.train.evaluation import HELD_OUT
from parallel3d.train.metrics import MetricsWriter, Result, forget_after, step_reached
from parallel3d.train.progress import Progress, in_words, percent
from parallel3d.train.start import Start
from parallel3d.train.trackers import Trackers


@dataclass(frozen=True)
class Summary:
    """The closing results of a run."""

    result: Result
    unigram_loss: float | None
    """Loss on the held-out samples, in nats per token, of a model that knows only how often each
    token occurs in training. None if nothing is held out."""
    peak_name: str
    """The peak that MFU is relative to, such as "H100-SXM5-80GB's bf16 peak"."""
    files: Mapping[str, Path]
    """The path of each file, by its name in the summary."""
    seconds: float = 0.0
    """Seconds since this process was started."""

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of the closing results as text."""
        result = self.result
        mean = finite(self.result.mean_loss)
        memory = ", ".join(f"{size / 2**20:,.0f}" for size in result.peak_memory_bytes)
        mfu = f"{percent(result.mfu)} of {self.peak_name}"
        if result.mfu is None:
            mfu = f"unknown, for steps were faster than {self.peak_name} at the start of the run"
        steps = f"{result.steps:,}"
        spread = ""
        if result.trained < result.steps:
            steps += f", {result.trained:,} of them in this launch"
        if result.mean_loss_of > 1:
            spread = f" ± {result.loss_deviation:.4f} over the last {result.mean_loss_of} steps"
        rows: dict[str, str | None] = {"steps": steps}
        if result.trained:
            rows |= {
                "total time": in_words(self.seconds),
                "training loss": None if mean is None else f"{mean:.4f}{spread}",
            }
        for name, loss in result.validation.items():
            title = "held-out loss" if name == HELD_OUT else f"loss of {name}"
            rows[title] = loss.in_words()
        held_out = result.held_out_loss
        if held_out is not None and self.unigram_loss is not None:
            below = "is below" if held_out < self.unigram_loss else "is NOT below"
            rows["unigram loss"] = (
                f"{self.unigram_loss:.4f} (the same tokens by their frequencies in training; the "
                f"model {below} it)"
            )
        if result.trained:
            rows |= {
                "tokens/s": f"{result.tokens_per_second:,.0f}",
                "model TFLOP/s per device": f"{result.tflops_per_device:.4g}",
                "MFU": mfu,
                "peak memory of each rank, MiB": memory,
            }
        rows |= {name: str(path) for name, path in self.files.items()}
        return [(name, text) for name, text in rows.items() if text is not None]

    def to_json(self) -> dict[str, object]:
        """Return the closing summary as one JSON object."""
        return asdict(self.result) | {
            "held_out_loss": self.result.held_out_loss,
            "validation": {
                name: {**loss.to_json(), "perplexity": loss.perplexity}
                for name, loss in self.result.validation.items()
            },
            "seconds": self.seconds,
            "unigram_loss": self.unigram_loss,
            "files": {name: str(path) for name, path in self.files.items()},
        }


def console_of(mesh: Mesh) -> Console:
    """Return a console on standard error, which is quiet on all ranks but rank 0."""
    return Console(stderr=True, quiet=mesh.rank != 0, highlight=False, markup=False, soft_wrap=True)


def print_placement(console: Console, config: CompleteConfig, parts: Assembly) -> None:
    """Print the size of the model and the layers of each stage."""
    layers = parts.layers
    schedule = parts.schedule
    stages = parts.stages
    total = count_params(layers)
    zero = config.zero_optimization
    own = config.parallel3d
    mesh = config.mesh
    settings = parts.engine.settings
    offload = describe_offload(zero.offload_optimizer.device, zero.offload_param.device)
    marks = [f"ZeRO-{zero.stage}"]
    if mesh.num_copies > 1:
        marks.append(f"{mesh.num_copies} copies of {mesh.dp_shards} shards")
    if offload != "none":
        marks.append(offload)
    marks.append(settings.precision)
    if mesh.sequence_parallel:
        marks.append("sequence parallel")
    if mesh.ep > 1:
        marks.append(f"experts divided over {mesh.ep} ranks")
    if own.data.isolate_documents:
        marks.append("documents isolated")
    if own.train.tf32 and settings.precision == "fp32":
        marks.append("TF32")
    if own.train.deterministic:
        marks.append("deterministic")
    console.print(
        f"model   {own.model.family}, {parameters(layers)}; {schedule.name}, "
        f"{schedule.num_microbatches} microbatches of {parts.shape.batch} x "
        f"{parts.shape.seq} tokens"
    )
    console.print(f"engine  {', '.join(marks)}")
    several = schedule.num_stages > schedule.pp_size
    for stage, placed in enumerate(stages.layers_of_stage):
        names = [layers[i].name for i in placed]
        shown = names[0]
        if len(names) > 1:
            shown = f"{names[0]} .. {names[-1]}"
        share = sum(layers[i].num_params for i in placed) / total
        place = f", on pp {schedule.pp_coord_of_stage[stage]}" if several else ""
        console.print(f"stage {stage:<3}{shown} ({100 * share:.0f} % of the parameters){place}")
    if torch.accelerator.is_available():
        log_kernel(
            stages.module,
            console.print,
            batch=parts.shape.batch,
            seq=parts.shape.seq,
            dtype=settings.dtype,
            device=parts.executor.mesh.device,
            isolated=own.data.isolate_documents,
        )


def summarise(start: Start, result: Result, peak_name: str, is_said: bool) -> Summary:
    """Return the closing summary of a run; `is_said` is True on the rank that prints it."""
    config = start.config
    corpus = start.corpus
    directory = start.folder
    files = {
        "run": directory,
        "checkpoints": directory / "checkpoints",
        "metrics": directory / METRICS,
        "config": directory / "config.json",
        "tokenizer": directory / TOKENIZER,
    }
    if config.run.save_weights and not result.stopped:
        files["weights"] = directory / "weights"
    seconds = time.time() - psutil.Process().create_time()
    length = config.data.sequence_length
    most = config.train.evaluate_samples
    unigrams = None
    if is_said and HELD_OUT in result.validation:
        with suppress(DataError, OSError):  # the run has ended well; only this row is missing
            unigrams = held_out_samples(corpus, length, most).unigram_loss(corpus)
    return Summary(result, unigrams, peak_name, files, seconds)


def print_summary(summary: Summary, console: Console, go_on: str) -> None:
    """Print the closing lines, aligned; paths are never cut, so that they can be copied.

    `go_on` is the command that resumes a stopped run.
    """
    result = summary.result
    run = summary.files["run"]
    if result.stopped:
        console.print(f"stopped on request after step {result.steps}, everything saved; to resume:")
        console.print(f"        {go_on}")
    elif not result.trained:
        console.print(
            f"{run} is finished: all its {result.steps} steps were done before. To train longer, "
            "raise parallel3d.train.steps, max_tokens or epochs, whichever the config sets; for "
            "another run set another parallel3d.run.name"
        )
    rows = summary.rows()
    if result.trained and not result.stopped:
        rows.append(("inspect it", f"parallel3d checkpoint inspect {run}"))
    width = max(len(name) for name, _ in rows)
    console.print()
    for name, value in rows:
        console.print(f"{name:<{width}}  {value}", highlight=False, markup=False, soft_wrap=True)


class Output:
    """The run's folder, its metrics and its progress display; only rank 0 writes.

    Raises on all ranks: Parallel3DError if the folder cannot be created, and the errors of
    `Attempts.begin`.
    """

    def __init__(self, start: Start, mesh: Mesh, console: Console) -> None:
        config = start.config
        step = start.position.step
        self._console = console
        self._start = start
        self._mesh = mesh
        self.directory = start.folder
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self._attempts = Attempts(self.directory, start.settings, start.digest)
        on_disk, *others = start.places
        if names := on_disk.forget_after(step):
            console.print(f"resume  set aside, no longer part of the run: {', '.join(names)}")
        on_first(mesh, self._begin)
        loaded_from = start.checkpoint.place if start.checkpoint else None
        for place in others:
            place.forget_after(step if place is loaded_from else -1)
        on_first(mesh, self._copy_tokenizer)
        if mesh.rank == 0:
            on_disk.begin()
            self.progress = Progress(config.num_steps, config.steps_per_print, console, step)
            trackers = Trackers(config, self.directory, step=step, say=self.progress.say)
            self.writer = MetricsWriter(self.directory, trackers, self.progress.say)
        # What MFU is relative to.
        self.peak_name, self.peak_flops = known_hardware.peak(config, mesh)

    def _begin(self) -> None:
        start = self._start
        config = start.config
        step = start.position.step
        with written_to(self.directory):
            self.directory.mkdir(exist_ok=True)
            reached = step_reached(self.directory)
            self._attempts.begin(reached)
            disk.remove_leftovers(self.directory / "checkpoints")
            for name in (METRICS, DIGESTS):
                forget_after(self.directory / name, step)
            resolved = json.dumps(config.to_public_dict(), indent=1)
            replace_text(self.directory / "config.json", f"{resolved}\n")
            counted = {"training_tokens": len(start.corpus.train)}  # for fits of repeated data
            replace_text(self.directory / "corpus.json", f"{json.dumps(counted)}\n")
            known = known_hardware.known_hardware(config, self._mesh.device)
            record(
                "launch",
                step=step,
                restart=self._mesh.restart_count > 0,
                mesh=str(config.mesh.sizes),
                chosen=next((n for n in config.notes if n.startswith("parallel3d.mesh: ")), None),
                unended=not_ended(self.directory),
                lost_steps=max(reached - step, 0),
                rejected=start.rejected,
                tier=start.checkpoint.tier if start.checkpoint else None,
                device=self._mesh.device.type,
                hardware=known.name if known else None,
            )

    def _copy_tokenizer(self) -> None:
        """Copy the tokenizer into the run's folder, because a cache may be emptied."""
        tokenizer = self._start.corpus.tokenizer_directory
        own = self.directory / TOKENIZER
        if not any(tokenizer.iterdir()):
            return
        if own.exists() and tokenizer_digest(own) == tokenizer_digest(tokenizer):
            return
        with written_to(self.directory):
            partial = own.with_name(f"{TOKENIZER}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(tokenizer, partial, copy_function=shutil.copyfile)
            if (name := self._start.config.data.tokenizer) not in ("train", "none"):
                copy_unwritten(name, partial)
            partial.chmod(self.directory.stat().st_mode)
            partial.rename(own)

    def finish(self, result: Result, engine: Engine) -> None:
        """Write the weights of a finished run, and record its clean end; collective."""
        config = self._start.config
        if config.run.save_weights and not result.stopped:
            from parallel3d.huggingface.from_ranks import save_weights  # it loads transformers

            self._mesh.set_timeouts(1800.0)  # for ranks that wait for another one's disk
            pulse.doing("writing the weights")
            save_weights(
                engine, self._mesh, self.directory, config=config, corpus=self._start.corpus
            )
        for place in self._start.places:
            place.end()
        if self.writer:
            try:
                self._attempts.end(result.stopped)
                record(
                    "end",
                    step=result.steps,
                    stopped=result.stopped,
                    peak_memory_bytes=result.peak_memory_bytes,
                )
            except OSError as error:
                self._console.print(f"{self.directory} cannot be written ({error.strerror})")

    def close(self) -> None:
        """Close the files and the progress display of rank 0."""
        for part in (self.writer, self.progress):
            if part:
                part.close()

    def print_summary(self, result: Result, as_json: bool) -> None:
        """Print the closing summary on rank 0, also as JSON to standard output if asked to."""
        is_said = self._mesh.rank == 0
        config = self._start.config
        summary = summarise(self._start, result, self.peak_name, is_said)
        print_summary(summary, self._console, command_to_go_on(config, self.directory))
        if as_json and is_said:
            terminal.print_json(summary.to_json())
