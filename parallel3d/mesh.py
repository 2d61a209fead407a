"""The device mesh: pipeline x data x tensor ranks, and the only place that knows ranks (floor 1).

`tp` is innermost, so a tensor-parallel group lies on neighbouring devices (one node's fast links);
`pp` is outermost, so only activations cross the slowest links. A run of one process is a mesh of
1x1x1: there is no second code path.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.errors import ConfigError

AXES = ("pp", "dp", "tp")
_STARTUP_TIMEOUT = timedelta(minutes=30)  # data preparation and compilation happen under it


@dataclass(frozen=True)
class Launch:
    """What the launcher said about this process: `deepspeed`, `torchrun`, `srun` or plain python."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read the launcher's variables; none at all means one process."""
        env = os.environ
        if "RANK" in env:
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)))
        if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
            if "MASTER_ADDR" not in env:
                raise ConfigError(
                    "under srun, MASTER_ADDR is not set: set it to the first node's host name, "
                    "`export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)`"
                )
            return cls(
                int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"])
            )
        return cls(0, 1, 0)


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


class Mesh:
    """A pp x dp x tp grid of ranks with a process group along each axis.

    Axes: "pp", "dp", "tp", "model" (pp and tp together: the ranks that share one copy of the
    model), "world". Raises ConfigError if the sizes do not multiply to the number of processes.
    """

    def __init__(self, pp: int = 1, dp: int = 1, tp: int = 1, launch: Launch | None = None) -> None:
        launch = launch or Launch.from_environment()
        if pp * dp * tp != launch.world_size:
            raise ConfigError(
                f"mesh pp={pp} x dp={dp} x tp={tp} = {pp * dp * tp} ranks, but "
                f"{launch.world_size} processes were started; make the two equal"
            )
        self.rank = launch.rank
        self.local_rank = launch.local_rank
        self.device = pick_device(launch.local_rank)
        # DeepSpeed reads it wherever it wants a device index.
        os.environ["LOCAL_RANK"] = str(launch.local_rank)
        _join(launch, self.device)
        self._grid = init_device_mesh(self.device.type, (pp, dp, tp), mesh_dim_names=AXES)
        model = self._grid["pp", "tp"]._flatten("model")
        self._groups = {axis: self._grid.get_group(axis) for axis in AXES}
        self._groups |= {"model": model.get_group(), "world": dist.group.WORLD}
        self._coords = dict(zip(AXES, self._grid.get_coordinate() or (), strict=True))
        self._ends = self._group_of_ends()

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return dist.get_world_size(self._groups[axis])

    def coord(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return dist.get_rank(self._groups[axis])

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group that holds this rank and varies along `axis` alone."""
        return self._groups[axis]

    def ranks(self, axis: str) -> list[int]:
        """The global ranks of `group(axis)`, in group order."""
        return dist.get_process_group_ranks(self._groups[axis])

    @property
    def backend(self) -> str:
        """The collectives' library: "gloo" or "nccl"."""
        return str(dist.get_backend())

    def isend(self, tensor: torch.Tensor, pp_coord: int, tag: int) -> dist.Work:
        """Start sending to the same dp and tp coordinates at another pipeline coordinate."""
        work = dist.isend(tensor, group=self._groups["pp"], tag=tag, group_dst=pp_coord)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, pp_coord: int, tag: int) -> dist.Work:
        """Post a receive into `tensor` from another pipeline coordinate."""
        work = dist.irecv(tensor, group=self._groups["pp"], tag=tag, group_src=pp_coord)
        assert work is not None
        return work

    @property
    def ends(self) -> dist.ProcessGroup | None:
        """The first and the last pipeline coordinate at equal dp and tp: a tied weight's owners.

        None on the coordinates between them.
        """
        return self._ends

    def _group_of_ends(self) -> dist.ProcessGroup | None:
        mine = None
        grid = self._grid.mesh
        for d in range(grid.shape[1]):
            for t in range(grid.shape[2]):
                ranks = sorted({int(grid[0, d, t]), int(grid[-1, d, t])})
                # Every rank must take part in making every group, its own or not.
                group = dist.new_group(ranks, timeout=_STARTUP_TIMEOUT)
                if self.rank in ranks:
                    mine = group
        return mine

    def shorten_timeouts(self, seconds: float) -> None:
        """Let a collective fail after `seconds`: once training runs, a silent peer is a dead one.

        gloo notices a killed process at once, but a stopped one only by this timeout.
        """
        groups = [*self._groups.values(), self._ends]
        for group in {id(g): g for g in groups if g is not None}.values():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values` (equally many on each), in the order of global ranks."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size("world"))]
        dist.all_gather(everyone, mine)
        return [t.tolist() for t in everyone]

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, on every rank (plain bytes: no pickle crosses the network)."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, src=0)
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, src=0)
        return bytes(data.tolist()).decode()

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    @contextmanager
    def one_at_a_time(self) -> Iterator[bool]:
        """Node by node: local rank 0 runs the body first, its peers afterwards.

        Yields whether this rank is the first. For work whose result the node's ranks share
        through the file system.
        """
        first = self.local_rank == 0
        if not first:
            self.barrier()
        yield first
        if first:
            self.barrier()

    def picture(self) -> str:
        """The mesh as text: a column for each pipeline coordinate, a row for each dp coordinate."""
        pp, dp, tp = self._grid.mesh.shape
        width = max(len(str(dist.get_world_size() - 1)) * tp + tp - 1, 4)
        lines = [f"mesh pp {pp} x dp {dp} x tp {tp} = {pp * dp * tp} ranks, {self.backend}"]
        lines += ["        " + "   ".join(f"{f'pp {p}':^{width + 2}}" for p in range(pp))]
        for d in range(dp):
            cells = [" ".join(str(int(r)) for r in self._grid.mesh[p, d]) for p in range(pp)]
            row = " → ".join(f"[{cell:^{width}}]" for cell in cells)
            lines.append(f"  dp {d:<3}{row}")
        return "\n".join(lines)

    def close(self) -> None:
        """Leave the process group; without it torch ends the process with an abort."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(launch: Launch, device: torch.device) -> None:
    if dist.is_initialized():
        return
    backend = dist.get_default_backend_for_device(device)
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=_STARTUP_TIMEOUT
        )
        return
    os.environ.setdefault("MASTER_ADDR", socket.gethostname())
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(
        backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=_STARTUP_TIMEOUT,
        device_id=device if device.type != "cpu" else None,
    )
