"""Worker processes that tokenise shards, each every n-th one, and report in lines of JSON.

A worker is `python -m parallel3d.data.pool`: `multiprocessing` would run the caller's main script
again, and leave its children behind when the caller is killed. A worker ends once nobody reads its
lines.
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

# On two cores one process with two threads is as fast (7.4 MB/s) and starts two seconds sooner;
# but what it does alone, reading and converting, is not shared out when there are many cores.
CORES_FOR_THREADS = 4


def num_workers(asked: int | str, num_shards: int) -> int:
    """Return how many processes tokenise: 1 means this one, with a thread a core."""
    if asked != "auto":
        return min(int(asked), num_shards)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 1 if not cores or cores <= CORES_FOR_THREADS else min(cores, num_shards)


def make_shards(plan: ShardPlan, workers: int, on_documents: Callable[[int], None]) -> None:
    """Make the missing shards; `on_documents` is told how many documents are done.

    All workers have ended when this returns. Raises DataError as `make_shard` does, and if one
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
        with open(read) as said:
            for number in range(workers):
                processes.append(_start(plan.work, number, workers, write))
            os.close(write)
            for line in said:
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
        # The processes share the cores; threads of each would only get in each other's way.
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "parallel3d.data.pool", str(work), str(number), str(workers)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=write)


def _check(codes: Iterable[int | None]) -> None:
    """Raise DataError if a worker has ended with one of these codes before its work was done."""
    for code in codes:
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"a tokenising process {how}, often for lack of memory; lower data.workers. The"
                " next run goes on with the shards that are done"
            )


def work(folder: Path, number: int, workers: int) -> None:
    """Make the shards of one worker."""
    # Ctrl-C goes to all; the process that started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The output of libraries must not get between the lines.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: int | str) -> None:
        print(json.dumps(message), file=out)

    try:
        plan = ShardPlan.open(folder)
        tokenizer = plan.tokenizer()
        for shard in plan.todo[number::workers]:
            make_shard(plan, shard, tokenizer, lambda documents: say(documents=documents))
    except DataError as error:
        say(error=str(error))
    except BrokenPipeError:
        # Nobody listens any more; what is flushed at exit would fail again.
        os._exit(1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
