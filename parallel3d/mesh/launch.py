"""The variables that a launcher sets for each process; read before torch is imported (floor 1)."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

import psutil

from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import Job

# Launchers that end with their own exit code, and a variable that each of them sets.
_LAUNCHERS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
# Rank, number of ranks, and both on this node, as the launchers of MPI name them.
_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_HYDRA = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]  # MPICH and Intel MPI
# Variables of launchers, known or not; NODE_RANK also stands in environments of single processes.
_OF_A_RANK = re.compile(r"(?!NODE_RANK)\w*RANK(ID)?|(LOCAL_)?WORLD_SIZE|MASTER_ADDR")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID")
_PORT = 29500  # torch's default
_LAST_PORT = 65535
_PORTS = 1000  # how many ports from it on are for the jobs of mpirun
_NAMESPACE_OF_THE_HOST = 0xEFFFFFFC  # Linux: the inode of the first namespace of process ids


@dataclass(frozen=True)
class Launch:
    """A process as `deepspeed`, `torchrun`, `srun`, `mpirun` or plain python started it."""

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
    is_known: bool = field(default=True, compare=False)
    """False if the variables are torch's, but those of no launcher that we know beside them."""
    port: int = field(default=_PORT, compare=False)
    """Port of the store, unless MASTER_PORT is set."""

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read the launcher's variables; without any, the launch is one process.

        Raises ConfigError if they are inconsistent, or no launcher's that we know.
        """
        if "RANK" in os.environ:
            return cls._of_launcher()
        if _OPEN_MPI[0] in os.environ:
            return cls._of_mpirun(_OPEN_MPI)
        if _HYDRA[2] in os.environ:
            return cls._of_mpirun(_HYDRA)
        if _is_task_of_srun():
            return cls._of_srun()
        if _HYDRA[0] in os.environ:
            return cls._of_mpirun(_HYDRA)
        if _has_half_a_launcher():
            raise ConfigError(
                f"the launcher's variables in the environment: RANK is not set, but others are; "
                f"{_remedy()}"
            )
        return cls(rank=0, world_size=1, local_rank=0, jobs=jobs_of_this_process())

    @classmethod
    def _of_launcher(cls) -> "Launch":
        """Read the variables of torchrun or deepspeed."""
        _check_port()
        world_size = _number("WORLD_SIZE", least=1)
        # torchrun's name, else deepspeed's; without either, all ranks may be on this node.
        name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
        local_world_size = _number(name, default=world_size, least=1, most=world_size)
        restarts = _number("TORCHELASTIC_RESTART_COUNT", default=0)
        most_restarts = _number("TORCHELASTIC_MAX_RESTARTS", default=0)
        is_elastic = _LAUNCHERS["torchrun"] in os.environ and _has_range_of_nodes()
        launcher = next((name for name, known in _LAUNCHERS.items() if known in os.environ), "")
        return cls(
            rank=_number("RANK", most=world_size - 1),
            world_size=world_size,
            local_rank=_number("LOCAL_RANK", default=0, most=local_world_size - 1),
            local_world_size=local_world_size,
            restart_count=restarts,
            restarts_left=max(0, most_restarts - restarts),
            jobs=jobs_of_this_process(),
            launcher=launcher,
            is_elastic=is_elastic,
            has_agents=is_elastic or (most_restarts > 0 and local_world_size < world_size),
            is_known=launcher != "",
        )

    @classmethod
    def _of_mpirun(cls, names: list[str]) -> "Launch":
        """Read the variables of mpirun, which `names` lists as `_OPEN_MPI` does."""
        _check_port()
        world_size = _number(names[1], least=1)
        rank = _number(names[0], most=world_size - 1)
        # PMI does not tell which ranks share a node; without a word they all do.
        local_world_size = _number(names[3], default=world_size, least=1, most=world_size)
        local_rank = _number(names[2], default=rank, most=local_world_size - 1)
        if local_world_size < world_size and "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                "under mpirun on several nodes, MASTER_ADDR is not set: set it to the host name of "
                "rank 0, `mpirun -x MASTER_ADDR=$(hostname) ...` (MPICH: -genv MASTER_ADDR)"
            )
        job = os.environ.get("PMIX_NAMESPACE", "")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            jobs=jobs_of_this_process(),
            # Two jobs on one node must not meet at one port.
            port=_PORT + crc32(job.encode()) % _PORTS if job else _PORT,
        )

    @classmethod
    def _of_srun(cls) -> "Launch":
        """Read the variables of srun."""
        _check_port()
        world_size = _tasks_of_srun()
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


def _has_half_a_launcher() -> bool:
    """Return True if a variable says that this is one of several ranks, though RANK is missing."""
    of_no_launcher = {"MASTER_ADDR", *_SLURM}
    if os.environ.get("WORLD_SIZE") == "1":
        of_no_launcher.add("WORLD_SIZE")
    return not of_no_launcher.issuperset(_names_found())


def _is_task_of_srun() -> bool:
    """Return True if srun has started this process as one of several.

    Slurm's variables also stand in the shell of a batch script or of salloc, and in shells that
    inherit a task's environment.
    """
    if "SLURM_PROCID" not in os.environ or _tasks_of_srun() < 2:
        return False
    of_step = any(name.startswith("SLURM_STEP") for name in os.environ)
    if not of_step and _number("SLURM_PROCID") == 0:
        return False  # a batch script's shell
    return not _task_has_ended()


def _tasks_of_srun() -> int:
    """Return the tasks of the step; the tasks of the job if srun does not say."""
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    return _number(name, default=1)


def _task_has_ended() -> bool:
    """Return True if this process is none of the task whose variables it has.

    In a container, which has process ids of its own, this cannot be known.
    """
    with suppress(OSError, ValueError, psutil.Error):
        task = int(os.environ.get("SLURM_TASK_PID", ""))
        own = [os.getpid(), *(process.pid for process in psutil.Process().parents())]
        return os.stat("/proc/self/ns/pid").st_ino == _NAMESPACE_OF_THE_HOST and task not in own
    return False


def describe_variables() -> str:
    """Return the launcher's variables in the environment, known or not, for a message."""
    return ", ".join(f"{name}={os.environ[name]}" for name in _names_found()) or "none"


def _names_found() -> list[str]:
    return [name for name in sorted(os.environ) if _OF_A_RANK.fullmatch(name) or name in _SLURM]


def _remedy() -> str:
    """Return what was found, and what to do about it."""
    return (
        f"found {describe_variables()}. Start with deepspeed, torchrun, srun or mpirun, or set "
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each "
        "rank; for one process unset them"
    )


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


def _check_port() -> None:
    """Raise ConfigError if MASTER_PORT is set to what is no port."""
    if "MASTER_PORT" in os.environ:
        _number("MASTER_PORT", most=_LAST_PORT)


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
            f"from {least}{upwards}; {_remedy()}"
        )
    return int(text)
