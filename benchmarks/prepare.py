"""How fast text is prepared, as ratios to `datasets.map` with the same tokenizer and workers.

    python benchmarks/prepare.py [--megabytes 64 --documents 3000 --workers 1 2 --rounds 3]

The contenders take turns, each in a process of its own that is forked from this one with all
imported: `datasets.map` with several processes sets TOKENIZERS_PARALLELISM=false for all that its
process does later. Each ratio is of medians over one run. Ours is all of a preparation: reading,
checking and digesting, split, tokenising, counting, joining and the cache's digests. `datasets` is
timed twice: `map` alone, on the table that `load_dataset` has made of the file, and both together.
One worker is one process with a thread a core, of either. Processor time is of user and system,
workers included, of all that the process did; it says what the clock does not on a machine with
other work. The text is the standard library's source, in documents of `--documents` bytes; 0 makes
one document of it all.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sysconfig
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import transformers

from parallel3d.config.data import DataConfig
from parallel3d.data.prepare import prepare
from parallel3d.data.sources import library_files
from parallel3d.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

Contender = Callable[[Path, Path, int, Path], dict[str, float]]


def write_rows(path: Path, num_bytes: int, size: int) -> str:
    """Write lines of JSON with `num_bytes` of text; give some of the text."""
    library = library_files(Path(sysconfig.get_path("stdlib")))
    text = "".join(file.read_text(errors="ignore") for file in library)
    text = (text * (num_bytes // len(text) + 1))[:num_bytes]
    size = size or num_bytes
    with open(path, "w") as file:
        for start in range(0, num_bytes, size):
            file.write(json.dumps({"text": text[start : start + size]}) + "\n")
        file.write(json.dumps({"text": "another one, to hold out"}) + "\n")
    return text[: 2 * 10**6]


def write_all(path: Path, tokenizer: Path, megabytes: int, size: int) -> dict[str, float]:
    """Write the rows, and a tokenizer that is trained on some of them."""
    save_tokenizer(train_tokenizer([write_rows(path, megabytes * 10**6, size)], 4096), tokenizer)
    return {}


def ours(path: Path, tokenizer: Path, workers: int, cache: Path) -> dict[str, float]:
    """Prepare the rows; give the seconds."""
    config = DataConfig(
        source="jsonl",
        paths=(str(path),),
        tokenizer=str(tokenizer),
        workers=workers,
        sequence_length=512,
        cache=str(cache),
    )
    start = time.perf_counter()
    corpus = prepare(config)
    seconds = time.perf_counter() - start
    assert corpus.num_tokens > 0
    return {"parallel3d": seconds}


def theirs(path: Path, tokenizer: Path, workers: int, cache: Path) -> dict[str, float]:
    """Load and map the rows with `datasets`; give the seconds of both, and of `map` alone."""
    datasets.disable_progress_bars()
    encode = load_tokenizer(tokenizer)

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = encode(batch["text"], add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": found["input_ids"]}

    start = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    loaded = time.perf_counter()
    processes = workers if workers > 1 else None
    rows.map(tokenise, batched=True, num_proc=processes, remove_columns=["text"])
    end = time.perf_counter()
    return {"datasets.map": end - loaded, "load_dataset and map": end - start}


def alone(work: Callable[..., dict[str, float]], *args: object) -> tuple[dict[str, float], float]:
    """Give what `work` gives in a process of its own, and that process's seconds of processors."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, work, args))
    process.start()
    sending.close()
    try:
        found: tuple[dict[str, float], float] = receiving.recv()
    finally:
        process.join()
    return found


def _send(
    pipe: Connection, work: Callable[..., dict[str, float]], args: tuple[object, ...]
) -> None:
    found = work(*args)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    pipe.send((found, sum(part.ru_utime + part.ru_stime for part in used)))


def report(workers: int, megabytes: int, taken: Mapping[str, list[float]]) -> None:
    """Print the medians of the seconds, by what was timed, and their ratios."""
    medians = {what: statistics.median(seconds) for what, seconds in taken.items()}
    for what, seconds in medians.items():
        ratio = seconds / medians["parallel3d"]
        print(
            f"workers {workers}  {what:<22}{seconds:7.2f} s {megabytes / seconds:7.2f} MB/s"
            f"   parallel3d is {ratio:.2f} times as fast",
            flush=True,
        )


def main() -> None:
    """Print a few lines for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--documents", type=int, default=3000, help="bytes of one; 0: all in one")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # Imported here, and used by none but the processes that are forked.
    assert transformers.AutoTokenizer and transformers.PreTrainedTokenizerFast
    contenders: dict[str, Contender] = {"parallel3d": ours, "datasets": theirs}
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
        path = folder / "rows.jsonl"
        tokenizer = folder / "tokenizer"
        cache = folder / "cache"
        alone(write_all, path, tokenizer, args.megabytes, args.documents)
        for workers in args.workers:
            taken: dict[str, list[float]] = {}
            used: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for who, contender in contenders.items():
                    found, seconds = alone(contender, path, tokenizer, workers, cache)
                    for what, clock in found.items():
                        taken.setdefault(what, []).append(clock)
                    used.setdefault(who, []).append(seconds)
                    shutil.rmtree(cache)
            report(workers, args.megabytes, taken)
            medians = {who: statistics.median(seconds) for who, seconds in used.items()}
            of_both = ", ".join(f"{who} {seconds:.1f} s" for who, seconds in medians.items())
            print(f"workers {workers}  processor time: {of_both}", flush=True)


if __name__ == "__main__":
    main()
