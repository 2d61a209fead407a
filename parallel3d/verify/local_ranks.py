"""Run functions on ranks of this machine, forked from a server that has torch loaded.

The server must not initialise GPUs, because a forked process could not use them then; the parent
looks for them instead. Four ranks start in 0.12 s. Reusing ranks for the next function would not be
faster: gloo's event loops spin on after the peers have left a process group.
"""

import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from parallel3d import models
from parallel3d.base.errors import TrainingError
from parallel3d.mesh.launch import Launch

# Imported by the server once, so that no rank has to.
PRELOAD = [
    "__main__",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.ops.adam",
    "parallel3d.verify.case",
    *(f"parallel3d.models.{family}.blocks" for family in models.families()),
]


_LATE = (
    "did not end in time: the ranks wait for each other (see their stacks on standard error), or "
    "other programs use the cores"
)


class RankFailed(TrainingError):
    """A rank raised or died; the message holds its traceback."""


class RanksHung(TrainingError):
    """The ranks did not end in time; their stacks are on standard error."""


def run_locally(
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout: float = 300,
    quiet: bool = False,
) -> list[Any]:
    """Run `function(rank, *args)` on `world_size` new processes and return the results by rank.

    Each process has the launcher's environment variables. Arguments and results are pickled. All
    processes have ended when this returns.

    Raises RankFailed with the rank's traceback, and RanksHung after `timeout` seconds, with the
    stacks on standard error unless `quiet`.
    """
    from parallel3d.mesh.device import settle_accelerator  # imports torch; this file must not

    settle_accelerator()  # before the server starts, which inherits it
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    ranks = []
    for rank in range(world_size):
        parent_end, child_end = context.Pipe()
        launch = Launch(rank, world_size, rank, world_size)
        process = context.Process(
            target=_run, args=(child_end, launch, port, timeout, quiet, function, args)
        )
        process.start()
        child_end.close()
        ranks.append((process, parent_end))
    try:
        return _collect(ranks, time.monotonic() + timeout + 5)
    except BaseException:
        for process, _ in ranks:
            process.kill()
        raise
    finally:
        # No rank may end earlier: rank 0 hosts the store that the others still use.
        for _, pipe in ranks:
            pipe.close()
        for process, _ in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(ranks: list[tuple[ForkServerProcess, Connection]], deadline: float) -> list[object]:
    results: dict[int, object] = {}
    waiting = {pipe: number for number, (_, pipe) in enumerate(ranks)}
    lost: RankFailed | None = None  # a rank that lost its peer; the peer's own error is better
    while waiting:
        seconds = max(0.0, deadline - time.monotonic())
        ready = mp.connection.wait(list(waiting), timeout=seconds)
        if not ready:
            raise lost or RanksHung(f"ranks {sorted(waiting.values())} {_LATE}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = waiting.pop(pipe)
            try:
                is_done, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                process, _ = ranks[number]
                process.join(timeout=5)
                rank = f"rank {number} of {len(ranks)}"
                if process.exitcode == 1:  # faulthandler's
                    raise RanksHung(f"{rank} {_LATE}") from None
                raise RankFailed(f"{rank} died with exit code {process.exitcode}") from None
            if not is_done:
                failed = RankFailed(f"rank {number} of {len(ranks)}: {value}")
                if not re.search(r"connection (closed|reset) by peer", value, re.IGNORECASE):
                    raise failed
                lost = lost or failed
                deadline = min(deadline, time.monotonic() + 1)
            results[number] = value
    if lost is not None:
        raise lost
    return [results[number] for number in range(len(ranks))]


def _run(
    pipe: Connection,
    launch: Launch,
    port: int,
    timeout: float,
    quiet: bool,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """Set a rank up, call the function, send its result, and exit when the parent has all."""
    import torch

    gc.freeze()  # else each collection visits all that the server has imported
    torch.set_num_threads(1)
    launch.announce(port)
    log = open(os.devnull, "w") if quiet else sys.__stderr__ or sys.stderr  # noqa: SIM115
    faulthandler.enable(file=log)  # prints the stack of a native crash
    faulthandler.dump_traceback_later(timeout, exit=True, file=log)
    try:
        answer = True, function(launch.rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    # Plain pickle: multiprocessing's would pass tensors as files that end with this process.
    pipe.send_bytes(pickle.dumps(answer))
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # until every rank has answered
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a clean exit would wait for peers that have failed


def free_port() -> int:
    """Return an unused port below the range that the system assigns from."""
    for _ in range(100):
        port = 10_000 + int.from_bytes(os.urandom(2)) % 20_000
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
