"""Runs a function on several ranks of this machine: forked from a server that has torch loaded."""

import faulthandler
import gc
import json
import multiprocessing as mp
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import models
from parallel3d.errors import TrainingError
from parallel3d.mesh.mesh import Launch

# All that a rank would import: what the server has, a rank has at once.
_PRELOAD = [
    "__main__",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "parallel3d.verify.measure",
    *(f"models.{family}.blocks" for family in models.families()),
]


def run_locally(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300
) -> list[Any]:
    """`function(launch, *args)` on each of `world_size` processes: what they return, by rank.

    What it takes must be picklable, what it returns JSON. Raises TrainingError with a rank's own
    traceback if one raises, and ends all of them when one dies or the time is over.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receive, send = context.Pipe()
        launch = Launch(rank, world_size, rank, world_size)
        process = context.Process(target=_rank, args=(send, function, launch, port, timeout, args))
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout + 5)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        # Only now may any of them end: rank 0 holds the store that the others still talk to.
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        seconds = max(0.0, deadline - time.monotonic())
        ready = mp.connection.wait(list(waiting), timeout=seconds)
        if not ready:
            raise TrainingError(f"ranks {sorted(waiting.values())} did not end in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer = json.loads(pipe.recv_bytes())
            except EOFError:
                raise TrainingError(f"rank {rank} of {len(pipes)} died") from None
            if "error" in answer:
                raise TrainingError(f"rank {rank} of {len(pipes)}: {answer['error']}")
            results[rank] = answer["value"]
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    launch: Launch,
    port: int,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage as it builds an engine; what is loaded is none
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faulthandler.dump_traceback_later(timeout, exit=True, file=sys.stderr)
    try:
        answer = {"value": function(launch, *args)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    pipe.send_bytes(json.dumps(answer).encode())
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # until the parent has heard from every rank
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a clean end would wait for peers that have failed


def free_port() -> int:
    """A port that nobody listens on, outside the range from which the system gives ports away."""
    for _ in range(100):
        port = 10_000 + int.from_bytes(os.urandom(2)) % 20_000
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
