"""What a run says of itself: its stages at the start, its results at the end (floor 5)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.config import RunConfig
from parallel3d.config.deepspeed import offload_in_words
from parallel3d.data.corpus import Corpus
from parallel3d.train.assembly import Assembly
from parallel3d.train.metrics import METRICS, finite, percent
from parallel3d.train.trainer import Result


@dataclass(frozen=True)
class Summary:
    """What a run ends with."""

    result: Result
    unigram_entropy: float
    """Nats per token of the best model that ignores context: what the held-out loss must beat."""
    peak_name: str
    """What the MFU is measured against, "H100-SXM5-80GB" or "a measured matmul"."""
    files: Mapping[str, Path]
    """What each file is, and where."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as text."""
        result, entropy = self.result, self.unigram_entropy
        loss, held_out = finite(result.loss), finite(result.held_out_loss)
        below = "below" if held_out is not None and held_out < entropy else "not below"
        memory = ", ".join(f"{size / 2**20:,.0f}" for size in result.peak_memory_bytes)
        of_peak = f" of {self.peak_name}" if result.mfu is not None else ""
        rows = {
            "training loss": None if loss is None else f"{loss:.4f}",
            "held-out loss": None
            if held_out is None
            else f"{held_out:.4f} ({below} the unigram entropy, {entropy:.4f})",
            "tokens/s": f"{result.tokens_per_second:,.0f}",
            "model TFLOP/s per device": f"{result.tflops_per_device:.4g}",
            "MFU": percent(result.mfu) + of_peak,
            "peak memory of each rank, MiB": memory,
            **{name: str(path) for name, path in self.files.items()},
        }
        return [(name, text) for name, text in rows.items() if text is not None]

    def to_json(self) -> dict[str, Any]:
        """The closing summary as one JSON object."""
        losses = {name: finite(getattr(self.result, name)) for name in ("loss", "held_out_loss")}
        return {
            **asdict(self.result),
            **losses,
            "unigram_entropy": self.unigram_entropy,
            "files": {name: str(path) for name, path in self.files.items()},
        }


def print_placement(
    console: Console,
    config: RunConfig,
    parts: Assembly,
) -> None:
    """Say how large the model is and which layers each stage runs."""
    layers, schedule, stages = parts.layers, parts.schedule, parts.stages
    total = sum(layer.num_params for layer in layers)
    zero = config.zero_optimization
    offload = offload_in_words(zero.offload_optimizer.device, zero.offload_param.device)
    marks = [
        f"ZeRO-{zero.stage}",
        *([offload] if offload != "none" else []),
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


def summarise(
    config: RunConfig, result: Result, *, corpus: Corpus, peak_name: str, directory: Path
) -> Summary:
    """The closing summary of a run."""
    files = {
        "run": directory,
        "checkpoints": directory / "checkpoints",
        "metrics": directory / METRICS,
        "config": directory / "config.json",
        "tokenizer": corpus.tokenizer_directory,
    }
    if config.run.save_weights and not result.stopped:
        files["weights"] = directory / "weights"
    return Summary(result, corpus.unigram_entropy, peak_name, files)


def print_summary(summary: Summary, console: Console) -> None:
    """The closing lines, aligned; paths are never cut, so that they can be copied."""
    if summary.result.stopped:
        console.print(
            f"stopped on request after step {summary.result.steps}, all saved; to go on: "
            f"--parallel3d.run.name {summary.files['run'].name}"
        )
    rows = summary.rows()
    width = max(len(name) for name, _ in rows)
    console.print()
    for name, value in rows:
        console.print(f"{name:<{width}}  {value}", highlight=False, markup=False, soft_wrap=True)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
