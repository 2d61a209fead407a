"""Runs a function on many gloo ranks: forked from a server that has torch loaded, in 0.2 s."""

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
from contextlib import suppress

# All that a rank would import, which is what its test's file does.
PRELOAD = [
    "parallel3d.engine", "torch", "torch.distributed", "torch.distributed.device_mesh",
    "torch.utils.checkpoint", "deepspeed", "torch._dynamo", "deepspeed.ops.adam",
    "deepspeed.runtime.zero.muon.muon_optimizer", "launch.train", "parallel3d.train.trainer",
    "parallel3d.checkpoint.weights", "parallel3d.engine.selftest", "parallel3d.verify.measure",
    "models.gpt.blocks", "models.llama.blocks", "safetensors.torch", "pytest", "hypothesis",
    "tests.verify.parity",
]  # fmt: skip


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


class RanksHung(AssertionError):
    """The ranks did not end in time; their stacks are on standard error."""


def run_ranks(function, world_size, *args, timeout=120, expect_hang=False):
    """`function(rank, *args)` on each of `world_size` ranks: the list of what they return.

    The ranks' stacks are printed and all of them end when the time is over.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receive, send = context.Pipe()
        process = context.Process(
            target=_rank, args=(send, function, rank, world_size, port, timeout, expect_hang, args)
        )
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    try:
        return _collect(pipes, processes, time.monotonic() + timeout + 5)
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


def _collect(pipes, processes, deadline):
    results, open_pipes = {}, {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = mp.connection.wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksHung(f"ranks {sorted(open_pipes.values())} did not end")
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                error = RanksHung if code == 1 else RankFailed
                raise error(f"rank {rank} ended with exit code {code}") from None
            if not ok:
                raise RankFailed(f"rank {rank} of {len(pipes)}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe, function, rank, world_size, port, timeout, expect_hang, args):
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage as it builds an engine; what is loaded is none
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    log = open(os.devnull, "w") if expect_hang else sys.__stderr__  # noqa: SIM115
    faulthandler.dump_traceback_later(timeout, exit=True, file=log)
    try:
        value = True, function(rank, *args)
    except BaseException:
        value = False, traceback.format_exc()
    # Plain pickle: multiprocessing's own would hand tensors over as files of a dying process.
    pipe.send_bytes(pickle.dumps(value))
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # until the parent has heard from every rank
    faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized():
        # A clean end would wait for peers that have failed.
        sys.stdout.flush()
        os._exit(0)


def free_port():
    """A port that nobody listens on, outside the range from which the system gives ports away."""
    for _ in range(100):
        port = 10_000 + int.from_bytes(os.urandom(2)) % 20_000
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
