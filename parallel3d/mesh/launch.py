"""The variables that a launcher sets for each process; read before torch is imported (floor 1)."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass

import psutil

from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import Job

# Launchers that end with their own exit code, and a variable that each of them sets.
_LAUNCHERS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}


@dataclass(frozen=True)
class Launch:
    """A process as `deepspeed`, `torchrun`, `srun` or plain python started it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int = 1
    restart_count: int = 0
    """How often torchrun has restarted these ranks."""
    restarts_left: int = 0
    """How often torchrun may restart them again."""
    jobs: tuple[Job, ...] = ()
    """Jobs that a scheduler or torchrun restarts under the same id."""
    launcher: str = ""
    """The launcher, if any, that ends with its own exit code."""
    is_elastic: bool = False
    """True if torchrun may start these ranks again with other hosts."""
    has_agents: bool = False
    """True if torchruns on several hosts may start these ranks again."""

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read the launcher's variables; without any, the launch is one process.

        Raises ConfigError if they are inconsistent.
        """
        if "RANK" in os.environ:
            return cls._of_launcher()
        if "SLURM_PROCID" in os.environ and _number("SLURM_NTASKS", default=1) > 1:
            return cls._of_srun()
        return cls(rank=0, world_size=1, local_rank=0, jobs=jobs_of_this_process())

    @classmethod
    def _of_launcher(cls) -> "Launch":
        """Read the variables of torchrun or deepspeed."""
        world_size = _number("WORLD_SIZE", least=1)
        # torchrun's name, else deepspeed's; without either, all ranks may be on this node.
        name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
        local_world_size = _number(name, default=world_size, least=1, most=world_size)
        restarts = _number("TORCHELASTIC_RESTART_COUNT", default=0)
        most_restarts = _number("TORCHELASTIC_MAX_RESTARTS", default=0)
        is_elastic = _LAUNCHERS["torchrun"] in os.environ and _has_range_of_nodes()
        return cls(
            rank=_number("RANK", most=world_size - 1),
            world_size=world_size,
            local_rank=_number("LOCAL_RANK", default=0, most=local_world_size - 1),
            local_world_size=local_world_size,
            restart_count=restarts,
            restarts_left=max(0, most_restarts - restarts),
            jobs=jobs_of_this_process(),
            launcher=next((name for name, known in _LAUNCHERS.items() if known in os.environ), ""),
            is_elastic=is_elastic,
            has_agents=is_elastic or (most_restarts > 0 and local_world_size < world_size),
        )

    @classmethod
    def _of_srun(cls) -> "Launch":
        """Read the variables of srun."""
        world_size = _number("SLURM_NTASKS")
        local_rank = _number("SLURM_LOCALID", most=world_size - 1)
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                "under srun, MASTER_ADDR is not set: set it to the first node's host name, "
                "`export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)`"
            )
        return cls(
            rank=_number("SLURM_PROCID", most=world_size - 1),
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_tasks_on_this_node(least=local_rank + 1, most=world_size),
            jobs=jobs_of_this_process(),
        )

    def announce(self, port: int) -> None:
        """Set a launch's environment variables; the store listens on `port` of this machine."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


def _has_range_of_nodes() -> bool:
    """Return True if torchrun was told to start between two numbers of nodes, such as 1:4.

    It does not tell its ranks, so this reads its command line.
    """
    texts = [f"--nnodes={os.environ.get('PET_NNODES', '')}"]
    with suppress(psutil.Error):
        texts += [" ".join(process.cmdline()) for process in psutil.Process().parents()]
    ranges = [re.search(r"--?nnodes[= ](\d+):(\d+)", text) for text in texts]
    return any(found[1] != found[2] for found in ranges if found)


def _tasks_on_this_node(least: int, most: int) -> int:
    """Return how many processes srun started on this node; `least` if it is not known.

    SLURM_STEP_TASKS_PER_NODE = "8(x4),4" means 8 on each of four nodes and 4 on the next.
    """
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text, re.ASCII):
        return least
    node = _number("SLURM_NODEID", default=0)
    nodes_so_far = 0
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        nodes_so_far += int(times or 1)
        if node < nodes_so_far:
            return int(size) if least <= int(size) <= most else least
    return least


def jobs_of_this_process() -> tuple[Job, ...]:
    """Return the scheduler jobs of this process, innermost last, with their restart counts."""
    names = (
        ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("torchelastic", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    )
    return tuple(
        (kind, os.environ[name], _number(count, default=0))
        for kind, name, count in names
        if os.environ.get(name, "none") != "none"  # torchrun's default, "none", identifies no job
    )


def _number(name: str, *, default: int | None = None, least: int = 0, most: int = 2**31) -> int:
    """Return a whole number that the launcher set; raise ConfigError if it is not valid."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
        problem = f"{name} is not set, but others are"
        if name in os.environ:
            problem = f'{name} = "{text}"'
        upwards = f" to {most}" if most < 2**31 else " on"
        raise ConfigError(
            f"the launcher's variables in the environment: {problem}; it must be a whole number "
            f"from {least}{upwards}. Start with deepspeed, torchrun or srun, which set it; for one "
            "process unset RANK, WORLD_SIZE and SLURM_PROCID"
        )
    return int(text)
