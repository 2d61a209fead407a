"""Measure streams: orders, disk, waits, memory and shuffle quality (docs/streams.md).

    python -m benchmarks.streams FOLDER [--tokens 1000000000] [--only throttled] [--load 20]

writes 1,000 shards of that many ids to FOLDER, and streams them from it; a corpus of 1.2 GB is
streamed from Python's HTTP server at 5 MB/s, while `--load` other processes compute. A step is a
pause of 50 ms. It is late if it gets its samples after LATE_SECONDS. It waited for data if a shard
was missing when its samples were read; else for the processor, as a thread does that only sleeps.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil

from parallel3d.config.data import DataConfig
from parallel3d.data import streams
from parallel3d.data.ahead import ReadAhead
from parallel3d.data.batches import Batches
from parallel3d.data.order import ShardOrder
from parallel3d.data.prepare import prepare, prepare_manifests
from parallel3d.data.sharded import Shard, ShardCache
from tests.data.stores import http_store

END = 7
SIZE = 50_000
LENGTH = 1024
BATCH = 32
SPEED = 5_000_000
STEP_SECONDS = 0.05
THROTTLED_STEPS = 3000
LATE_SECONDS = 0.025


def write_shards(folder: Path, num_shards: int, tokens: int) -> None:
    """Write flat arrays of random ids; a document has 1,000 ids on average."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_shards):
        path = folder / f"{number:04}.npy"
        if not path.exists():
            rng = np.random.default_rng(number)
            ids = rng.integers(END + 1, SIZE, tokens, dtype=np.uint16)
            ids[rng.integers(0, tokens, tokens // 1000)] = END
            ids[-1] = END
            ids.tofile(path)


def config(paths: str, folder: Path, stream: bool = True, **settings: object) -> DataConfig:
    """Return the settings of a corpus in `folder`."""
    own: dict[str, object] = {"source": "tokens", "tokenizer": "none", "vocab_size": SIZE}
    own |= {"end_of_text_id": END, "paths": (paths,), "sequence_length": LENGTH}
    own |= {"held_out_fraction": 0, "cache": str(folder / "cache")} | settings
    if stream:
        own |= {"stream": True, "manifest": str(folder / "manifest")}
    return DataConfig(**own)  # type: ignore[arg-type]


def orders(folder: Path) -> None:
    """Print the hashes of three epochs, local and streamed, on several meshes and batches."""
    write_shards(folder / "shards", 40, 50_000)
    paths = str(folder / "shards/*.npy")

    def digest(settings: DataConfig, step: int, dp: int) -> str:
        batches = Batches(prepare(settings).train, LENGTH, seed=3)
        hashed = sha256()
        for start in range(0, 3 * batches.num_samples, step):
            end = min(start + step, 3 * batches.num_samples)
            for part in np.array_split(np.arange(start, end), dp):
                if len(part):
                    tokens, labels = batches.microbatch(int(part[0]), len(part))
                    hashed.update(np.hstack([tokens, labels[:, -1:]]).tobytes())
        batches.close()
        return hashed.hexdigest()[:16]

    prepare_manifests(config(paths, folder))
    print("| local |  | 32 | 1 |", digest(config(paths, folder, stream=False), 32, 1), "|")
    for window in ("all", 4):
        for step, dp in ((32, 1), (32, 2), (48, 4)):
            settings = config(paths, folder, stream_window=window)
            print("| streamed |", window, "|", step, "|", dp, "|", digest(settings, step, dp), "|")


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes that the files of a folder take, some of which may be removed meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


class TimedCache(ShardCache):
    """A cache that keeps the times (begin, end) at which readers waited for a missing shard."""

    waits: ClassVar[list[tuple[float, float]]] = []

    def load(self, shard: Shard) -> None:
        """Wait for a shard, and note how long."""
        began = time.perf_counter()
        super().load(shard)
        self.waits.append((began, time.perf_counter()))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Let other processes compute."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def throttled(folder: Path, load: int) -> None:
    """Stream a corpus of 50 times the cache at 5 MB/s; print disk and waits."""
    write_shards(folder / "shards", 300, 2_000_000)
    settings = config(str(folder / "shards/*.npy"), folder, stream_window=2)
    with http_store(folder / "shards") as server:
        settings = settings.model_copy(update={"paths": (f"{server.url}/*.npy",)})
        prepare_manifests(settings)
        total = 300 * 4_000_000
        limit = total // 50
        settings = settings.model_copy(update={"stream_cache_bytes": limit})
        server.speed = SPEED
        most = 0
        is_over = threading.Event()
        streams.ShardCache = TimedCache  # type: ignore[misc]
        naps: list[tuple[float, float]] = []

        def sample() -> None:
            nonlocal most
            while not is_over.wait(0.01):
                most = max(most, bytes_on_disk(folder / "cache/streams"))

        def nap() -> None:
            while not is_over.is_set():
                slept = time.perf_counter()
                time.sleep(0.005)
                naps.append((slept, time.perf_counter()))

        threading.Thread(target=sample, daemon=True).start()
        threading.Thread(target=nap, daemon=True).start()
        began = time.perf_counter()
        batches = Batches(prepare(settings).train, LENGTH, seed=3)
        ahead = ReadAhead(lambda start: (time.perf_counter(), batches.microbatch(start, 2 * BATCH)))
        waits = []
        with busy(load):
            for step in range(THROTTLED_STEPS):
                asked = time.perf_counter()
                read, _ = ahead.take(step * 2 * BATCH, [(step + n) * 2 * BATCH for n in (1, 2)])
                waits.append((read, asked, time.perf_counter()))
                if step == 0:
                    first = time.perf_counter() - began
                time.sleep(STEP_SECONDS)
        seconds = time.perf_counter() - began
        needed = len(waits) * 2 * BATCH * LENGTH * 2
        is_over.set()
        batches.close()
        ahead.close()
    print(f"corpus {total:,} bytes, limit {limit:,}, most on the disk {most:,}")
    print(
        f"{len(waits)} steps, {needed / seconds / 1e6:.2f} MB/s needed, first after {first:.2f} s"
    )
    late = [wait for wait in waits[10:] if wait[2] - wait[1] > LATE_SECONDS]
    for_data = [
        wait
        for wait in late
        if any(begin < wait[2] and end > wait[0] for begin, end in TimedCache.waits)
    ]
    for name, some in (("late", late), ("for data", for_data)):
        longest = max((end - asked for _, asked, end in some), default=0.0)
        print(f"{name}: {len(some)} steps after the tenth, the longest {longest:.3f} s")
    overslept = np.array([end - begin - 0.005 for begin, end in naps])
    share = np.mean(overslept > LATE_SECONDS)
    print(f"a thread that sleeps for 5 ms: {share:.2%} late, the longest {overslept.max():.3f} s")
    print(f"load {os.getloadavg()[0]:.1f}")


OPEN = """
import json, sys, time
import psutil
from benchmarks.streams import DataConfig, BATCH, LENGTH
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus
from parallel3d.data.streams import open_shard_cache
settings = DataConfig.model_validate_json(sys.argv[1])
before = psutil.Process().memory_info().rss
began = time.perf_counter()
corpus = Corpus.open(settings.manifest, shards=open_shard_cache(settings))
batches = Batches(corpus.train, LENGTH, seed=3)
opened, most = time.perf_counter() - began, 0
batches.microbatch(0, BATCH)
first = time.perf_counter() - began
for step in range(3000):
    batches.microbatch(step * BATCH, BATCH)
    most = max(most, psutil.Process().memory_info().rss)
batches.close()
print(json.dumps([opened, first, (most - before) / 1e6, 3000 / (time.perf_counter() - began)]))
"""


def large(folder: Path, tokens: int) -> None:
    """Stream 1,000 shards; print the time to open them, and the memory of a process."""
    write_shards(folder / "shards", 1000, tokens // 1000)
    settings = config(str(folder / "shards/*.npy"), folder, stream_window=16)
    began = time.perf_counter()
    prepare_manifests(settings)
    manifest = bytes_on_disk(folder / "manifest")
    print(f"manifest: {time.perf_counter() - began:.0f} s, {manifest / 1e6:.1f} MB")
    command = [sys.executable, "-c", OPEN, settings.model_dump_json()]
    opened, first, memory, rate = json.loads(subprocess.run(command, stdout=-1, check=True).stdout)
    print(f"opened in {opened:.3f} s, first step after {first:.2f} s, {memory:.0f} MB more memory")
    print(f"{rate:.0f} steps/s of {BATCH} x {LENGTH} ids")


def shuffle_quality() -> None:
    """Print the mean distance in an epoch of samples that are neighbours in the corpus."""
    counts = np.full(1000, 1000)
    size = int(counts.sum())
    for window in (1, 4, 16, 64, 256, 1000):
        places = np.empty(size, np.int64)
        places[ShardOrder(counts, window).sample_index(3, np.arange(size))] = np.arange(size)
        distances = np.abs(np.diff(places))
        within = distances[np.arange(size - 1) % 1000 != 999]
        print(f"| {window} | {distances.mean() / size:.4f} | {within.mean() / size:.4f} |")


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--only", choices=("throttled",))
    parser.add_argument("--load", type=int, default=0)
    args = parser.parse_args()
    print(f"{psutil.cpu_count()} cores")
    if args.only is None:
        orders(args.folder / "orders")
        shuffle_quality()
        large(args.folder / "large", args.tokens)
    throttled(args.folder / "throttled", args.load)


if __name__ == "__main__":
    main()
