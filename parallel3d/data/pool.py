"""Worker processes that tokenise shards; each reads shard numbers and writes lines.

A worker is `python -m parallel3d.data.worker`, not a child of `multiprocessing`: that would run
the caller's main script again, and leave its children behind when the caller is killed. A worker
ends by itself when its pipe does.
"""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import parallel3d
from parallel3d.base.errors import DataError
from parallel3d.data.shards import ShardPlan, make_shard

# On two cores one process with two threads is as fast (7.4 MB/s) and starts two seconds sooner;
# but what it does alone, reading and converting, is not shared out when there are many cores.
CORES_FOR_THREADS = 4


def num_workers(asked: int | str, num_shards: int) -> int:
    """How many processes tokenise: 1 means this one, with a thread a core."""
    if asked != "auto":
        return min(int(asked), num_shards)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 1 if not cores or cores <= CORES_FOR_THREADS else min(cores, num_shards)


def make_shards(
    plan: ShardPlan, shards: Sequence[int], workers: int, on_documents: Callable[[int], None]
) -> None:
    """Tokenise the shards; `on_documents` is told the number of documents as they are done.

    Whatever goes wrong, all workers have ended when this returns. Raises DataError as `make_shard`
    does, and if a worker dies.
    """
    if workers == 1:
        tokenizer = plan.tokenizer()
        for number in shards:
            make_shard(plan, number, tokenizer, on_documents)
        return
    processes: list[subprocess.Popen[bytes]] = []
    try:
        # Before any of them is waited for: each takes two seconds to start.
        processes += [_start(plan.work) for _ in range(min(workers, len(shards)))]
        _serve(processes, list(shards), on_documents)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe
                pipe.close()


def _serve(
    processes: Sequence["subprocess.Popen[bytes]"],
    shards: list[int],
    on_documents: Callable[[int], None],
) -> None:
    """Hand out the shards, one at a time, until all are done."""
    selector = selectors.DefaultSelector()
    waiting = shards[::-1]
    unread: dict[int, bytes] = {}
    for process in processes:
        assert process.stdout
        selector.register(process.stdout, selectors.EVENT_READ, process)
        _hand_out(process, waiting)
    num_left = len(shards)
    with selector:
        while num_left:
            for key, _ in selector.select():
                process = key.data
                received = os.read(key.fd, 2**16)
                if not received:
                    raise DataError(_death(process.wait()))
                *lines, unread[key.fd] = (unread.get(key.fd, b"") + received).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "error" in message:
                        raise DataError(message["error"])
                    if "documents" in message:
                        on_documents(message["documents"])
                    else:
                        num_left -= 1
                        _hand_out(process, waiting)


def _hand_out(process: "subprocess.Popen[bytes]", waiting: list[int]) -> None:
    if waiting:
        pipe: IO[bytes] | None = process.stdin
        assert pipe
        try:
            pipe.write(b"%d\n" % waiting.pop())
            pipe.flush()
        except BrokenPipeError:
            raise DataError(_death(process.wait())) from None


def _start(work: Path) -> "subprocess.Popen[bytes]":
    root = str(Path(parallel3d.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        # The processes share the cores; threads of each would only get in each other's way.
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "parallel3d.data.worker", str(work)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _death(code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return (
        f"a tokenising process {how}, often for lack of memory; lower data.workers. What is"
        " tokenised is kept: the next run goes on from there"
    )
