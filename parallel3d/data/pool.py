"""Worker processes that tokenise shards (worker i of n: every n-th) and report in lines of JSON.

A worker is `python -m parallel3d.data.pool`. `multiprocessing` would run the caller's main script
again, and its children would survive if the caller is killed. These workers exit when their output
is no longer read.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import parallel3d
from parallel3d.base.errors import DataError
from parallel3d.data.shards import ShardPlan, make_shard

# On two cores, one process with two threads is as fast (7.4 MB/s) and starts two seconds sooner.
# With many cores, processes are faster, since reading and converting are not multithreaded.
CORES_FOR_THREADS = 4


def num_workers(setting: int | str, num_shards: int) -> int:
    """Return the number of tokenising processes; 1 means this one, with a thread per core."""
    if setting != "auto":
        return min(int(setting), num_shards)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 1 if not cores or cores <= CORES_FOR_THREADS else min(cores, num_shards)


def make_shards(plan: ShardPlan, workers: int, on_documents: Callable[[int], None]) -> None:
    """Make the missing shards, and call `on_documents` with the number of documents in each batch.

    All workers have ended when this returns. Raises DataError if `make_shard` does or a worker
    dies.
    """
    if workers <= 1:
        tokenizer = plan.tokenizer() if plan.todo else None
        for number in plan.todo:
            assert tokenizer
            make_shard(plan, number, tokenizer, on_documents)
        return
    processes: list[subprocess.Popen[bytes]] = []
    read, write = os.pipe()
    try:
        with open(read) as messages:
            for number in range(workers):
                processes.append(_start(plan.work, number, workers, write))
            os.close(write)
            for line in messages:
                message = json.loads(line)
                if "error" in message:
                    raise DataError(message["error"])
                on_documents(message["documents"])
                _check(process.poll() for process in processes)
        _check(process.wait() for process in processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _start(work: Path, number: int, workers: int, write: int) -> "subprocess.Popen[bytes]":
    root = str(Path(parallel3d.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        # There is a process per core already.
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "parallel3d.data.pool", str(work), str(number), str(workers)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=write)


def _check(codes: Iterable[int | None]) -> None:
    """Raise DataError if an exit code of a worker is neither None (running) nor 0."""
    for code in codes:
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"a tokenising process {how}, often for lack of memory; lower data.workers. The"
                " next run continues from the completed shards"
            )


def work(folder: Path, number: int, workers: int) -> None:
    """Make the shards of worker `number` of `workers`."""
    # Ctrl-C reaches all processes; the parent handles it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Send the output of libraries to standard error, to keep it out of the messages.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: int | str) -> None:
        print(json.dumps(message), file=out)

    try:
        plan = ShardPlan.open(folder)
        tokenizer = plan.tokenizer()
        for shard in plan.todo[number::workers]:
            make_shard(plan, shard, tokenizer, lambda documents: send(documents=documents))
    except DataError as error:
        send(error=str(error))
    except BrokenPipeError:
        # The parent is gone. Skip the flush at exit, which would fail again.
        os._exit(1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
