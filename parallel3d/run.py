"""What surrounds the step loop: the corpus on every rank, the run's folder, the closing summary."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from parallel3d import hardware
from parallel3d.assembly import Assembly
from parallel3d.config import RunConfig
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import prepare
from parallel3d.data.progress import shown_progress
from parallel3d.data.sources import silent
from parallel3d.errors import ConfigError, Parallel3DError
from parallel3d.mesh import Mesh
from parallel3d.metrics import (
    MetricsWriter,
    Progress,
    Summary,
    measure_peak_flops,
    print_summary,
    require_tensorboard,
)
from parallel3d.profile import Profiler
from parallel3d.trainer import Result


def _on_one(mesh: Mesh, here: bool, work: Callable[[], str]) -> list[str]:
    """What `work` gave on the ranks where it was done `here`, "" elsewhere, in order of ranks.

    Collective. What the user caused on one rank is raised on all.
    """
    text = error = ""
    if here:
        try:
            text = work()
        except Parallel3DError as caught:
            error = str(caught)
    if errors := [e for e in mesh.gather_texts(error) if e]:
        raise Parallel3DError(errors[0])
    return mesh.gather_texts(text)


def open_corpus(config: RunConfig, mesh: Mesh, console: Console) -> Corpus:
    """The corpus on every rank; the first rank of each node prepares it, if nobody has yet.

    Raises Parallel3DError on all ranks if it cannot be used on one.
    """

    def work() -> str:
        with nullcontext(silent) if console.quiet else shown_progress() as progress:
            corpus = prepare(config.data, progress)
        check_length(corpus, config.data.sequence_length, config.global_batch_size)
        return str(corpus.directory)

    directories = _on_one(mesh, mesh.local_rank == 0, work)
    corpus = Corpus.open(directories[mesh.rank - mesh.local_rank])
    train, held_out = len(corpus.train), len(corpus.held_out)
    console.print(
        f"corpus  {corpus.num_documents:,} documents, {train:,} tokens + {held_out:,} held out, "
        f"vocabulary {corpus.vocab_size:,}, unigram entropy {corpus.unigram_entropy:.4f}"
    )
    return corpus


def print_placement(
    console: Console,
    config: RunConfig,
    parts: Assembly,
) -> None:
    """Say how large the model is and which layers each stage runs."""
    layers, schedule, stages = parts.layers, parts.schedule, parts.stages
    total = sum(layer.num_params for layer in layers)
    zero = config.zero_optimization
    offloads = {
        "optimizer": zero.offload_optimizer.device,
        "parameters": zero.offload_param.device,
    }
    marks = [
        f"ZeRO-{zero.stage}",
        *(f"{what} on {where}" for what, where in offloads.items() if where != "none"),
        "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32",
        *(["sequence parallel"] if config.mesh.sequence_parallel else []),
        *(["documents isolated"] if config.data.isolate_documents else []),
    ]
    console.print(
        f"model   {config.model.family}, {_count(total)} parameters; {schedule.name}, "
        f"{schedule.num_microbatches} microbatches of {config.micro_batch_size} x "
        f"{config.data.sequence_length} tokens"
    )
    console.print(f"engine  {', '.join(marks)}")
    several = schedule.num_stages > schedule.pp_size
    for stage, placed in enumerate(stages.layers_of_stage):
        names = [layers[i].name for i in placed]
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        share = sum(layers[i].num_params for i in placed) / total
        place = f", on pp {schedule.pp_coord_of_stage[stage]}" if several else ""
        console.print(f"stage {stage:<3}{shown} ({100 * share:.0f} % of the parameters){place}")


class Output:
    """The run's folder, its metrics and its progress; rank 0 alone writes.

    Raises Parallel3DError on all ranks if the folder cannot be made.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, console: Console) -> None:
        made = _on_one(mesh, mesh.rank == 0, lambda: str(_make_directory(config, mesh)))
        self.directory = Path(made[0])
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        if mesh.rank == 0:
            resolved = json.dumps(config.to_dict(), indent=1)
            (self.directory / "config.json").write_text(resolved + "\n")
            self.writer = MetricsWriter(self.directory, config.run.tensorboard)
            self.progress = Progress(config.num_steps, config.steps_per_print, console)

    def close(self) -> None:
        """Close what rank 0 has open."""
        for part in (self.writer, self.progress):
            if part:
                part.close()


def make_profiler(
    config: RunConfig, mesh: Mesh, parts: Assembly, directory: Path
) -> Profiler | None:
    """What records the steps of train.profile, if it names any."""
    if config.train.profile is None:
        return None
    tensorboard = config.run.tensorboard
    return Profiler(config.train.profile, mesh, parts.executor, directory, tensorboard)


def check_output(config: RunConfig, mesh: Mesh) -> None:
    """See, before anything is built, whether the run can be written; raises on all ranks."""

    def work() -> str:
        if config.run.tensorboard:
            require_tensorboard()
        directory = Path(config.run.directory) / config.run.name
        if config.run.name != "auto" and directory.exists():
            raise ConfigError(
                f'parallel3d.run.name = "{config.run.name}": {directory} exists, and runs are not '
                'resumed yet; use another name, or "auto", or remove the folder'
            )
        return ""

    _on_one(mesh, mesh.rank == 0, work)


def _make_directory(config: RunConfig, mesh: Mesh) -> Path:
    name = config.run.name
    if name == "auto":
        sizes = "x".join(str(mesh.size(axis)) for axis in ("pp", "dp", "tp"))
        model = config.model
        name = f"{model.family}-h{model.hidden_size}-l{model.num_hidden_layers}-{sizes}"
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


def peak(config: RunConfig, mesh: Mesh) -> tuple[str, float | None]:
    """What MFU is measured against: its name, and the FLOP/s of one device.

    The published peak of a device that configs/hardware describes, else the fastest matmul that
    the ranks reach when all of them compute at once.
    """
    dtype = "bf16" if config.bf16.enabled else "fp32"
    if config.run.hardware != "auto":
        described = hardware.load(config.run.hardware)
    elif mesh.device.type == "cpu":
        described = None
    else:
        name = torch.get_device_module(mesh.device).get_device_name(mesh.device)
        described = hardware.recognise(name)
    published = described.peak(dtype) if described else None
    if described and published:
        return f"{described.name}'s {dtype} peak", published
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    mesh.barrier()
    measured = mesh.gather_floats([measure_peak_flops(mesh.device, torch_dtype)])
    return "a measured matmul", sum(row[0] for row in measured) / len(measured)


def summarise(
    config: RunConfig, result: Result, corpus: Corpus, peak_name: str, directory: Path
) -> Summary:
    """The closing summary of a run."""
    files = {
        "run": directory,
        "metrics": directory / "metrics.jsonl",
        "config": directory / "config.json",
        "tokenizer": corpus.tokenizer_directory,
    }
    if config.run.save_weights:
        files["weights"] = directory / "weights"
    return Summary(
        loss=result.loss,
        held_out_loss=result.held_out_loss or float("nan"),
        unigram_entropy=corpus.unigram_entropy,
        tokens_per_second=result.tokens_per_second,
        tflops_per_device=result.tflops_per_device,
        mfu=result.mfu,
        peak_name=peak_name,
        peak_memory_bytes=result.peak_memory_bytes,
        files=files,
    )


def print_result(console: Console, result: Result, summary: Summary) -> None:
    """The closing table."""
    if result.stopped:
        console.print(f"stopped on request after step {result.steps}")
    print_summary(summary, console)


def to_json(result: Result, summary: Summary) -> dict[str, Any]:
    """The closing summary as one JSON object."""
    return {
        "steps": result.steps,
        "stopped": result.stopped,
        "loss": summary.loss,
        "held_out_loss": summary.held_out_loss,
        "unigram_entropy": summary.unigram_entropy,
        "tokens_per_second": summary.tokens_per_second,
        "tflops_per_device": summary.tflops_per_device,
        "mfu": summary.mfu,
        "peak_memory_bytes": list(summary.peak_memory_bytes),
        "files": {name: str(path) for name, path in summary.files.items()},
    }


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
