"""What a launcher tells each process, and how the processes find each other (floor 1)."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel3d.errors import ConfigError

STARTUP_TIMEOUT = timedelta(minutes=30)  # data preparation and compilation happen under it


@dataclass(frozen=True)
class Launch:
    """What the launcher said of this process: `deepspeed`, `torchrun`, `srun` or plain python."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int = 1
    restart_count: int = 0  # how often torchrun has started these ranks before

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read the launcher's variables; none at all means one process."""
        env = os.environ
        if "RANK" in env:
            # torchrun's name, then deepspeed's; where neither is said, all may be on this node.
            here = env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", env["WORLD_SIZE"]))
            local_rank, restarts = env.get("LOCAL_RANK"), env.get("TORCHELASTIC_RESTART_COUNT")
            numbers = (env["RANK"], env["WORLD_SIZE"], local_rank or 0, here, restarts or 0)
            return cls(*map(int, numbers))
        if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
            if "MASTER_ADDR" not in env:
                raise ConfigError(
                    "under srun, MASTER_ADDR is not set: set it to the first node's host name, "
                    "`export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)`"
                )
            return cls(
                int(env["SLURM_PROCID"]),
                int(env["SLURM_NTASKS"]),
                int(env["SLURM_LOCALID"]),
                int(env.get("SLURM_NTASKS_PER_NODE", 1)),
            )
        return cls(0, 1, 0)

    def announce(self, port: int) -> None:
        """Tell this process what a launcher would, the store on `port` of this machine."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


def pick_device(local_rank: int) -> torch.device:
    """The accelerator of this process, or the CPU where there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device: this node shows {count}; start at most "
            f"{count} processes here"
        )
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)  # type: ignore[union-attr]
    torch.accelerator.set_device_index(local_rank)
    return device


def rank_0_first(launch: Launch, speak: Callable[[], None]) -> None:
    """Run `speak` on rank 0, and keep the others until it is done, or 30 s are over.

    For last words that all ranks share: a launcher that sees one rank end ends the others at once.
    """
    if launch.rank == 0:
        speak()
    if launch.world_size == 1:
        return
    patience = timedelta(seconds=30)
    with suppress(Exception):  # nobody can be told any more
        if not dist.is_initialized():
            rank, size, store = launch.rank, launch.world_size, _meet(launch, patience)
            dist.init_process_group("gloo", None, patience, size, rank, store)
        store = dist.distributed_c10d._get_default_store()
        if launch.rank == 0:
            store.set("rank 0 has spoken", "yes")
        else:
            store.wait(["rank 0 has spoken"], patience)


def join(launch: Launch, device: torch.device) -> None:
    """Make the process group of all processes, unless there is one."""
    if dist.is_initialized():
        return
    backend = dist.get_default_backend_for_device(device)
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, None, STARTUP_TIMEOUT, 1, 0, store)
        return
    os.environ.setdefault("MASTER_ADDR", socket.gethostname())
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(
        backend,
        store=_meet(launch, STARTUP_TIMEOUT),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=STARTUP_TIMEOUT,
        device_id=device if device.type != "cpu" else None,
    )


def _meet(launch: Launch, patience: timedelta) -> dist.Store:
    """The store through which the ranks find each other."""
    store, *_ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience))
    # On one node torchrun's store outlives a restart; on several `--rdzv_backend c10d` renews it.
    one_node = launch.local_world_size == launch.world_size
    return dist.PrefixStore(f"attempt {launch.restart_count}", store) if one_node else store
