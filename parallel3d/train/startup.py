"""What surrounds the step loop: the corpus on every rank, the run's folder, the closing summary."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from parallel3d import hardware
from parallel3d.config import RunConfig
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import prepare
from parallel3d.data.progress import shown_progress
from parallel3d.data.sources import silent
from parallel3d.engine import EngineSettings
from parallel3d.mesh.agree import agree, gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly
from parallel3d.train.metrics import Summary, measure_peak_flops, print_summary
from parallel3d.train.profiler import Profiler
from parallel3d.train.trainer import Result


def open_corpus(config: RunConfig, mesh: Mesh, console: Console) -> Corpus:
    """The corpus on every rank; the first rank of each node prepares it, if nobody has yet.

    Raises Parallel3DError on all ranks if it cannot be used on one.
    """

    def prepared() -> str | None:
        if mesh.local_rank > 0:
            return None
        with nullcontext(silent) if console.quiet else shown_progress() as progress:
            corpus = prepare(config.data, progress)
        check_length(corpus, config.data.sequence_length, config.global_batch_size)
        return str(corpus.directory)

    directories = gather_json(mesh, agree(mesh, prepared), aside=True)
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
        config.precision,
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


def make_profiler(
    config: RunConfig, mesh: Mesh, parts: Assembly, directory: Path
) -> Profiler | None:
    """What records the steps of train.profile, if it names any."""
    if config.train.profile is None:
        return None
    tensorboard = config.run.tensorboard
    return Profiler(
        config.train.profile, mesh, parts.executor, run=directory, tensorboard=tensorboard
    )


def peak(config: RunConfig, mesh: Mesh) -> tuple[str, float | None]:
    """What MFU is measured against: its name, and the FLOP/s of one device.

    The published peak of a device that configs/hardware describes, else the fastest matmul that
    the ranks reach when all of them compute at once.
    """
    dtype = config.precision
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
    torch_dtype = EngineSettings.from_config(config).dtype
    mesh.barrier()
    measured = mesh.gather_floats([measure_peak_flops(mesh.device, torch_dtype)])
    return "a measured matmul", sum(row[0] for row in measured) / len(measured)


def summarise(
    config: RunConfig, result: Result, corpus: Corpus, peak_name: str, directory: Path
) -> Summary:
    """The closing summary of a run."""
    files = {
        "run": directory,
        "checkpoints": directory / "checkpoints",
        "metrics": directory / "metrics.jsonl",
        "config": directory / "config.json",
        "tokenizer": corpus.tokenizer_directory,
    }
    if config.run.save_weights and not result.stopped:
        files["weights"] = directory / "weights"
    return Summary(
        loss=result.loss,
        held_out_loss=math.nan if result.held_out_loss is None else result.held_out_loss,
        unigram_entropy=corpus.unigram_entropy,
        tokens_per_second=result.tokens_per_second,
        tflops_per_device=result.tflops_per_device,
        mfu=result.mfu,
        peak_name=peak_name,
        peak_memory_bytes=result.peak_memory_bytes,
        files=files,
    )


def print_result(console: Console, result: Result, summary: Summary, name: str) -> None:
    """The closing table of the run `name`."""
    if result.stopped:
        console.print(
            f"stopped on request after step {result.steps}, all saved; to go on: "
            f"--parallel3d.run.name {name}"
        )
    print_summary(summary, console)


def to_json(result: Result, summary: Summary) -> dict[str, Any]:
    """The closing summary as one JSON object."""
    return {
        "steps": result.steps,
        "stopped": result.stopped,
        "loss": _finite(summary.loss),
        "held_out_loss": _finite(summary.held_out_loss),
        "unigram_entropy": summary.unigram_entropy,
        "tokens_per_second": summary.tokens_per_second,
        "tflops_per_device": summary.tflops_per_device,
        "mfu": summary.mfu,
        "peak_memory_bytes": list(summary.peak_memory_bytes),
        "files": {name: str(path) for name, path in summary.files.items()},
    }


def _finite(number: float) -> float | None:
    """The number; None, as JSON has no NaN, where there is none."""
    return number if math.isfinite(number) else None


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
