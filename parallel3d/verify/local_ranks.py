"""Runs functions on ranks of this machine: forked from a server that has torch loaded, in 0.2 s.

Ranks that live on run one function after another, each with process groups of its own, so that a
function pays for what it does and not for its ranks' start.
"""

import atexit
import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import models
from parallel3d.errors import TrainingError
from parallel3d.mesh.launch import Launch

# All that a rank would import: what the server has, a rank has at once.
PRELOAD = [
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


class RankFailed(TrainingError):
    """A rank raised, or died; the message holds its traceback."""


class RanksHung(TrainingError):
    """The ranks did not end in time; their stacks are on standard error."""


class _Rank(NamedTuple):
    process: ForkServerProcess
    pipe: Connection


class Ranks:
    """Processes of this machine, made as they are needed, that run one function after another.

    A function that raises, dies or hangs takes all of them with it; the next one gets new ones.
    What is sent either way is pickled: both ends are this program. `quiet`: their standard error
    does not tell where a rank hung.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._ranks: list[_Rank] = []

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300
    ) -> list[Any]:
        """`function(rank, *args)` on each of `world_size` processes: what they return, by rank.

        Each finds the launcher's variables in its environment. Raises RankFailed with a rank's own
        traceback if one raises, and RanksHung once `timeout` seconds are over.
        """
        while len(self._ranks) < world_size:
            self._ranks.append(self._start())
        ranks = self._ranks[:world_size]
        port, call = free_port(), pickle.dumps((function, args))
        try:
            for number, (_, pipe) in enumerate(ranks):
                launch = Launch(number, world_size, number, world_size)
                pipe.send_bytes(pickle.dumps((launch, port, timeout)))
                pipe.send_bytes(call)
            results = _collect(ranks, time.monotonic() + timeout + 5)
            # Only now may any of them leave: rank 0 holds the store that the others still talk to.
            for _, pipe in ranks:
                pipe.send_bytes(b"")
        except BaseException:
            self._kill()
            raise
        return results

    def _start(self) -> _Rank:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._quiet))
        process.start()
        theirs.close()
        return _Rank(process, ours)

    def _kill(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        self.close()

    def close(self) -> None:
        """End them; without it this program would wait for them at its own end."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks.clear()


def run_locally(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300,
    quiet: bool = False,
) -> list[Any]:
    """`function(rank, *args)` on `world_size` processes of its own; see `Ranks.run`."""
    ranks = Ranks(quiet)
    try:
        return ranks.run(function, world_size, *args, timeout=timeout)
    finally:
        ranks.close()


def run_warm(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300
) -> list[Any]:
    """`function(rank, *args)` on ranks that live on, for functions that leave no trace in them."""
    return _warm().run(function, world_size, *args, timeout=timeout)


@cache
def _warm() -> Ranks:
    ranks = Ranks()
    atexit.register(ranks.close)
    return ranks


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
    while waiting:
        seconds = max(0.0, deadline - time.monotonic())
        ready = mp.connection.wait(list(waiting), timeout=seconds)
        if not ready:
            raise RanksHung(f"ranks {sorted(waiting.values())} did not end in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = waiting.pop(pipe)
            try:
                is_done, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                process = ranks[number].process
                process.join(timeout=5)
                error = RanksHung if process.exitcode == 1 else RankFailed  # 1: faulthandler's
                said = f"rank {number} of {len(ranks)} died with exit code {process.exitcode}"
                raise error(said) from None
            if not is_done:
                raise RankFailed(f"rank {number} of {len(ranks)}: {value}")
            results[number] = value
    return [results[number] for number in range(len(ranks))]


def _serve(pipe: Connection, quiet: bool) -> None:
    """Run what comes through the pipe until it is closed (a rank's whole life)."""
    import torch

    from parallel3d.engine.quirks.core import number_afresh

    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage as it builds an engine; what is loaded is none
    log = open(os.devnull, "w") if quiet else sys.__stderr__  # noqa: SIM115
    with suppress(EOFError, OSError):
        while True:
            launch, port, seconds = pickle.loads(pipe.recv_bytes())
            launch.announce(port)
            faulthandler.dump_traceback_later(seconds, exit=True, file=log or sys.stderr)
            function = args = None
            try:
                function, args = pickle.loads(pipe.recv_bytes())
                answer = True, function(launch.rank, *args)
            except BaseException:
                answer = False, traceback.format_exc()
            # Plain pickle: multiprocessing's own would hand tensors over as files of this process.
            pipe.send_bytes(pickle.dumps(answer))
            pipe.recv_bytes()  # until the others have been heard, too
            faulthandler.cancel_dump_traceback_later()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            del answer, function, args
            gc.collect()  # an engine is full of cycles
            number_afresh()
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
