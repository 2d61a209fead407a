"""Export and import of a model with random weights, beside reading, writing and reading its bytes.

    python benchmarks/convert.py [--size small|124M|355M|1.5B --rounds 1 --folder DIR --json]

The sizes are GPT-2's. A checkpoint of them is made on the spot, exported, and the export imported.
Each is timed beside its *least*: the bytes of the source read once, those of the outcome written
once, synced, and read once. Each begins with sources that the page cache does not hold. Memory is
the most that the process grows by, mapped files included, without what its libraries take. Seconds
are the clock's and the processor's; the medians of all rounds are compared.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from parallel3d import models
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.chunks import Box, Chunk, header
from parallel3d.checkpoint.manifest import manifest_bytes
from parallel3d.config import RunConfig
from parallel3d.data.sources import no_progress
from parallel3d.huggingface.conversion import Proof, export, import_folder, quiet
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles
from parallel3d.model import optimizers
from parallel3d.model.spec import named_params

SIZES = {  # hidden size, layers, heads, vocabulary
    "small": (64, 2, 4, 512),
    "124M": (768, 12, 12, 50257),
    "355M": (1024, 24, 16, 50257),
    "1.5B": (1600, 48, 25, 50257),
}
BLOCK = 8 * 2**20
Times = dict[str, list[float]]


def make_checkpoint(size: str, folder: Path) -> Path:
    """Write step-1 of a model of this size, as one rank does; its weights and moments are random.

    Needs no more memory than its largest tensor.
    """
    hidden, layers, heads, vocabulary = SIZES[size]
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel3d": {
            "model": {
                "family": "gpt",
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "vocab_size": vocabulary,
                "max_position_embeddings": 1024,
            },
            "data": {
                "source": "tokens",
                "paths": ["ids.npy"],
                "tokenizer": "none",
                "vocab_size": vocabulary,
                "end_of_text_id": 0,
                "sequence_length": 1024,
            },
            "train": {"steps": 1},
        },
    }
    config = RunConfig.from_dict(raw).resolve(1)
    shapes = {n: s.shape for n, s in named_params(models.layers(config.model)).items()}
    most = max(map(prod, shapes.values()))
    numbers = (0.02 * torch.randn(most + 997)).numpy()
    chunks = [
        Chunk(name, kind, Box((0,) * len(shape), shape))
        for name, shape in shapes.items()
        for kind in optimizers.kinds("adamw")
    ]
    # Not the same ones in each.
    arrays = (
        numbers[at : at + chunk.box.numel]
        for at, chunk in zip(cycle(range(997)), chunks, strict=False)
    )
    (step := folder / "step-1").mkdir()
    name = "shard-00000-of-00001.safetensors"
    files = {name: disk.write_file(step / name, chain([header(chunks)], arrays))}
    state = {
        "format": 1,
        "step": 1,
        "tokens": 1024,
        "config": config.to_dict(),
        "tokenizer": "",
        "parameters": {name: {"shape": list(shape)} for name, shape in shapes.items()},
    }
    files["state.json"] = disk.write_file(step / "state.json", [json.dumps(state).encode()])
    disk.write_file(step / "manifest.json", [manifest_bytes(1, files)])
    return step


def least(source: Path, outcome: Path) -> Callable[[Path], None]:
    """What reads all bytes of a folder, writes those of another one, and reads them."""
    sizes = {path.name: path.stat().st_size for path in outcome.glob("*.safetensors")}
    sources = sorted(source.glob("*.safetensors"))

    def run(folder: Path) -> None:
        folder.mkdir()
        buffer = memoryview(bytearray(BLOCK))
        read(sources, buffer)
        for name, size in sizes.items():
            with open(folder / name, "wb", buffering=0) as file:
                for start in range(0, size, BLOCK):
                    file.write(buffer[: size - start])
                os.fsync(file.fileno())
        read([folder / name for name in sizes], buffer)

    return run


def read(paths: list[Path], buffer: memoryview) -> None:
    """Read files to their ends."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def exporting(step: Path) -> Callable[[Path], Proof]:
    """The export of a checkpoint, as the command line asks for it."""

    def run(to: Path) -> Proof:
        source = CheckpointSource(step)
        return export(source, source.about(), WeightFiles(source.config.model), to, no_progress)

    return run


def measured(work: Callable[[Path], Any], source: Path, to: Path, times: Times) -> None:
    """Run it once from a cold source, and add what it took; its outcome stays."""
    shutil.rmtree(to, ignore_errors=True)
    for path in source.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    processor = time.process_time()
    proof = work(to)
    times["seconds"].append(time.perf_counter() - start)
    times["processor"].append(time.process_time() - processor)
    times["memory"].append(memory("VmHWM") - before)
    assert not isinstance(proof, Proof) or proof.ok, proof


def memory(which: str) -> int:
    """Bytes of a line of /proc/self/status."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, which
    return int(found[1]) * 1024


def rows_of(size: str, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """For export and import, the medians of each and of its least, and the ratios."""
    step = make_checkpoint(size, folder)
    exported = folder / "exported"
    conversions = {
        "export": (exporting(step), step, exported),
        "import": (lambda to: import_folder(exported, to), exported, folder / "imported"),
    }
    for what, (convert, source, to) in conversions.items():
        ours, bare = ({k: [] for k in ("seconds", "processor", "memory")} for _ in range(2))
        for _ in range(rounds):
            measured(convert, source, to, ours)
            measured(least(source, to), source, folder / "bare", bare)
            shutil.rmtree(folder / "bare")
        row: dict[str, Any] = {"what": what, "size": size}
        row["bytes"] = sum(p.stat().st_size for p in to.glob("*.safetensors"))
        row["memory"] = max(ours["memory"])
        for key in ("seconds", "processor"):
            row[key], row[f"least_{key}"] = (statistics.median(t[key]) for t in (ours, bare))
            row[f"{key}_ratio"] = row[key] / row[f"least_{key}"]
        yield row
        if what == "export":
            shutil.rmtree(step)  # there may not be room for all of them
    shutil.rmtree(exported)


def main() -> None:
    """Print a row for the export and one for the import."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="355M")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (a temporary one)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        list(rows_of("small", 1, Path(folder)))  # imports what is imported at first use
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in rows_of(args.size, args.rounds, Path(folder)):
            print(json.dumps(row) if args.json else text_of(row), flush=True)


def text_of(row: dict[str, Any]) -> str:
    """A row for people."""
    parts = [f"{row['what']} of {decimal(row['bytes'])}: {decimal(row['memory'])} of memory"]
    for key in ("seconds", "processor"):
        parts.append(
            f"{row[key]:.1f} s of the {'clock' if key == 'seconds' else key}, "
            f"{row[f'{key}_ratio']:.2f} x the least ({row[f'least_{key}']:.1f} s)"
        )
    return "; ".join(parts)


if __name__ == "__main__":
    main()
