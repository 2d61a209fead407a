"""The mesh: pipeline x data x context x tensor ranks (floor 1). Only this folder knows ranks.

`tp` is innermost, on the fast links of a node; `pp` is outermost, so only activations cross the
slowest links. One process is a mesh of 1x1x1x1: there is no second code path.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from math import prod
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from parallel3d.base import fault
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import AXES, MeshSizes
from parallel3d.mesh.device import limit_threads, pick_device
from parallel3d.mesh.groups import set_timeout, split
from parallel3d.mesh.join import STARTUP_TIMEOUT, join
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.messages import Messages
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.transfer import Transfer

# The axes if dp is three: copies of the shards, and ep neighbours at a time among a copy's ranks.
_DIVIDED = ("pp", "copies", "dp", "ep", "cp", "tp")


class Peers(NamedTuple):
    """The ranks that share a role with this rank, which is number `coord` of `size` in `group`."""

    group: dist.ProcessGroup
    size: int
    coord: int

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in group order."""
        return dist.get_process_group_ranks(self.group)


ROLES = (
    "pipeline",
    "samples",
    "context",
    "replicas",
    "shards",
    "copies",
    "tensor",
    "experts",
    "expert_replicas",
    "expert_shards",
    "model",
    "whole_model",
    "world",
    "alone",
)


class Mesh:
    """A pp x dp x cp x tp grid of ranks, with a group of this rank and its peers for each role.

    - `pp`, `dp`, `cp`, `tp`: the sizes of its axes.
    - `ep`: how many dp neighbours divide the experts among them; it divides dp.
    - `dp_shards`: how many dp neighbours hold one copy of what ZeRO shards (with all of cp); it
      divides dp, and `ep` divides it. None: all, so that there is one copy.
    - `launch`: the launch of this process; by default that of the environment.
    - `watched`: start a sentry beside each rank.

    The roles:

    - `pipeline`: the ranks that hold the other stages; stages exchange activations.
    - `samples`: the ranks that compute other samples of the batch.
    - `context`: the ranks that hold the other tokens of this rank's samples.
    - `replicas`: the ranks whose gradients of the same weights are averaged (dp and cp).
    - `shards`: the ranks over which ZeRO shards weights, gradients and optimizer states.
    - `copies`: the ranks of `replicas` that hold the same shards.
    - `tensor`: the ranks that hold the other parts of this rank's matrices.
    - `experts`: the ranks that hold the other experts: `ep` neighbours along dp.
    - `expert_replicas`: the ranks of `replicas` that hold the same experts.
    - `expert_shards`: the ranks of `shards` that hold the same experts.
    - `model`: the ranks that share one copy of the model (pp and tp), but for experts.
    - `whole_model`: the ranks that share one copy of the model and of all experts.
    - `world`: all ranks.
    - `alone`: this rank.

    Raises ConfigError if the launch has a different number of ranks.
    """

    def __init__(
        self,
        *,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        dp_shards: int | None = None,
        launch: Launch | None = None,
        watched: bool = False,
    ) -> None:
        launch = launch or Launch.from_environment()
        sizes = MeshSizes(pp=pp, dp=dp, cp=cp, tp=tp)
        if sizes.ranks != launch.world_size:
            raise ConfigError(
                f"mesh {sizes.label} = {sizes.ranks} ranks, but "
                f"{launch.world_size} processes were started; the two must be equal"
            )
        self.rank = launch.rank
        fault.set_rank(launch.rank)
        self.local_rank = launch.local_rank
        self.local_size = launch.local_world_size
        self.restart_count = launch.restart_count
        self.is_elastic = launch.is_elastic
        self.device = pick_device(launch)
        # DeepSpeed takes its device index from this variable.
        index = self.device.index
        os.environ["LOCAL_RANK"] = str(launch.local_rank if index is None else index)
        limit_threads(self.device, launch.local_world_size)
        join(launch, self.device, watched)
        if dp_shards is not None:
            self._agree_on(dp_shards)
        self._grid = torch.arange(sizes.ranks).view(sizes)
        place = dict(zip(AXES, (self._grid == self.rank).nonzero()[0].tolist(), strict=True))
        self.coords: tuple[int, ...] = tuple(place[axis] for axis in sizes.shown)
        """This rank's coordinates along AXES, without cp if it is 1."""
        shards = dp if dp_shards is None else dp_shards
        self._divided = self._grid.view(pp, dp // shards, shards // ep, ep, cp, tp)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._of_axes: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.alone = self._along("self")
        self.pipeline = self._along("pp", "pp")
        self.samples = self._along("dp", "copies", "dp", "ep")
        self.context = self._along("cp", "cp")
        self.tensor = self._along("tp", "tp")
        self.model = self.whole_model = self._along("model", "pp", "tp", own=True)
        if ep > 1:
            self.whole_model = self._along("ep model", "pp", "ep", "tp", own=True)
        self.world = self._along("world", *_DIVIDED)
        self.replicas = self._along("dp cp", "copies", "dp", "ep", "cp")
        self.shards = self._along("dp shards", "dp", "ep", "cp")
        self.copies = self._along("dp copies", "copies")
        self.experts = self._along("ep", "ep", own=ep > 1)
        self.expert_replicas = self._along("ep replicas", "copies", "dp", "cp")
        self.expert_shards = self._along("ep shards", "dp", "cp")
        # One group per direction, so that gradients do not queue behind activations.
        self._backward = self.pipeline.group
        if pp > 1:
            self._backward = self._split(self._rows("pp"), "pp backward", shared=False)
        self.messages = Messages(self.rank, self.device, self.places)
        self._pairs: dict[tuple[int, int], dist.ProcessGroup | None] = {}

    def _agree_on(self, dp_shards: int) -> None:
        """Raise ConfigError on all ranks unless they agree, before they make different groups."""
        ends = torch.tensor([dp_shards, -dp_shards], device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, least = ends.abs().tolist()
        if most != least:
            raise ConfigError(
                f'parallel3d.mesh.dp_shards = "node": hosts have different numbers of ranks, for '
                f"{least} and {most} shards; use a number, or as many ranks on each host"
            )

    def beside(self) -> Self:
        """Return this mesh with another group beside training, for one more thread. Collective."""
        other = copy(self)
        other.messages = self.messages.beside()
        return other

    def _rows(self, *axes: str) -> torch.Tensor:
        """Return the ranks of each group along axes of `_DIVIDED`: [groups, ranks]."""
        across = [dim for dim, axis in enumerate(_DIVIDED) if axis not in axes]
        along = [dim for dim, axis in enumerate(_DIVIDED) if axis in axes]
        sizes = [self._divided.shape[dim] for dim in along]
        return self._divided.permute(*across, *along).reshape(-1, prod(sizes))

    def _along(self, name: str, *axes: str, own: bool = False) -> Peers:
        """Return the ranks along axes of `_DIVIDED`.

        - `own`: their messages do not queue behind those of a group that has the same ranks.
        """
        sizes = zip(_DIVIDED, self._divided.shape, strict=True)
        longer = tuple(axis for axis, size in sizes if axis in axes and size > 1)
        known = None if own else self._of_axes.get(longer)
        group = self._groups[name] = known or self._split(self._rows(*longer), name)
        self._of_axes.setdefault(longer, group)
        return Peers(group, group.size(), group.rank())

    def _split(self, ranks: torch.Tensor, name: str, shared: bool = True) -> dist.ProcessGroup:
        """Return the group of this rank's row of `ranks`.

        - `shared`: use the world's group where the row holds every rank.
        """
        group = dist.group.WORLD
        if len(ranks) > 1 or not shared:
            is_urgent = name[:2] in AXES
            group = split(ranks.tolist(), name, STARTUP_TIMEOUT, is_urgent)
        assert group is not None
        return group

    def peers(self, role: str) -> Peers:
        """Return the ranks of one of ROLES."""
        peers: Peers = getattr(self, role)
        return peers

    def name_of(self, group: dist.ProcessGroup) -> str:
        """Return the axis along which `group` varies, "ends" (a tied weight's owners) or "other".

        An axis that holds every rank is called "pp=world", because the two groups are one.
        """
        name = group.group_name
        if name == self._backward.group_name:
            name = self.pipeline.group.group_name
        names = [own for own, known in self._groups.items() if known.group_name == name]
        if "world" in names[1:] and names[0] in AXES:
            return f"{names[0]}=world"
        if names:
            return names[0]
        pairs = [known.group_name for known in self._pairs.values() if known is not None]
        return "ends" if name in pairs else "other"

    @property
    def backend(self) -> str:
        """The collective library: "gloo" or "nccl" ("strict" and "fake" in tests)."""
        return str(dist.get_backend())

    def isend(self, tensor: torch.Tensor, pp_coord: int, tag: int) -> Transfer:
        """Start sending to another pipeline coordinate, at this rank's place of its stage."""
        group = self._pipe(pp_coord - self.pipeline.coord)
        work = dist.isend(tensor, group=group, tag=tag, group_dst=pp_coord)
        return Transfer.of(work, self.messages.timeout)

    def irecv(self, tensor: torch.Tensor, pp_coord: int, tag: int) -> Transfer:
        """Post a receive into `tensor` from another pipeline coordinate."""
        group = self._pipe(self.pipeline.coord - pp_coord)
        work = dist.irecv(tensor, group=group, tag=tag, group_src=pp_coord)
        return Transfer.of(work, self.messages.timeout)

    @property
    def places(self) -> list[int]:
        """The ranks of all pp and dp coordinates, in order, with this rank's cp and tp ones."""
        grid = self._grid.flatten(0, 1)[:, self.context.coord, self.tensor.coord]
        return [int(rank) for rank in grid]

    def _pipe(self, step: int) -> dist.ProcessGroup:
        """Return the group for messages over `step` pipeline coordinates."""
        return self.pipeline.group if step > 0 else self._backward

    def join_pair(self, a: int, b: int) -> dist.ProcessGroup | None:
        """Return the group of pipeline coordinates `a` and `b`, which share a tied weight.

        Its ranks have equal dp, cp and tp coordinates. None on other ranks, and if `a` equals `b`.
        Collective over the world, before `set_timeouts`.
        """
        pair = min(a, b), max(a, b)
        if a != b and pair not in self._pairs:
            ends = self._grid[list(pair)].flatten(1).t().tolist()
            self._pairs[pair] = split(ends, "ends", STARTUP_TIMEOUT)
        return self._pairs.get(pair)

    def join_stage(self) -> Peers:
        """Return the ranks that hold parts of one copy of the same layers.

        Collective over the world, before `set_timeouts`.
        """
        return self._along("stage", "dp", "ep", "cp", "tp")

    def set_timeouts(self, seconds: float) -> None:
        """Let all communication fail after `seconds`; 0 means a week.

        gloo notices a killed process at once, but a stopped one only by this timeout. In a watched
        run the groups' timeouts are longer, so that the arbiter names the late rank first.
        """
        pulse.set_limit(seconds)
        if not seconds:
            seconds = timedelta(days=7).total_seconds()
        elif pulse.is_watched():
            seconds += 15.0  # in which the arbiter names a late rank first
        groups = {*self._groups.values(), self._backward, *self._pairs.values()}
        for group in groups:
            if group is not None:
                set_timeout(group, timedelta(seconds=seconds))
        if self.backend == "gloo":
            self.messages.timeout = timedelta(seconds=seconds)

    @pulse.waiting("at a barrier")
    def barrier(self) -> None:
        """Wait for every rank, on the host."""
        flag = torch.zeros(1, device=self.device)
        dist.all_reduce(flag)
        flag.item()  # on a device, all_reduce returns once it is queued

    @contextmanager
    def one_at_a_time(self) -> Iterator[bool]:
        """Run the body on local rank 0 first, then on the other ranks of its node.

        Yields True on the first rank. For results that ranks share through the file system.
        """
        first = self.local_rank == 0
        if not first:
            self.barrier()
        yield first
        if first:
            self.barrier()

    def picture(self) -> str:
        """Return the mesh as text: a column per pipeline coordinate, a row per dp coordinate."""
        return draw_mesh(self._grid)

    def close(self) -> None:
        """Leave the process group; otherwise torch ends the process with an abort.

        gloo's threads end with the last reference to their group. A thread that is still at work
        when the interpreter ends aborts the process too.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in (*ROLES, "_groups", "_of_axes", "_pairs", "_backward", "messages"):
            vars(self).pop(name, None)


_LIMIT = 8  # rows and columns shown; a longer axis shows only its ends


def draw_mesh(grid: torch.Tensor) -> str:
    """Draw the ranks `grid` [pp, dp, cp, tp]: a column for each pp coordinate, a row for each dp.

    A cell holds the tp groups of its cp coordinates.
    """
    pp, dp, cp, tp = grid.shape
    sizes = MeshSizes(pp=pp, dp=dp, cp=cp, tp=tp)
    columns = _shown(sizes.pp)
    table = [["", *("" if p is None else f"pp {p}" for p in columns)]]
    for d in _shown(sizes.dp):
        cells = ["·" if p is None or d is None else _cell(grid[p, d].tolist()) for p in columns]
        table.append(["" if d is None else f"dp {d}", *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    ranks = "1 rank" if sizes.ranks == 1 else f"{sizes.ranks} ranks"
    lines = [f"mesh {sizes.label} = {ranks}"]
    for number, row in enumerate(table):
        label, *cells = (f"{cell:^{width}}" for cell, width in zip(row, widths, strict=True))
        between = "   " if number == 0 else " → "  # the first row has the columns' names
        lines.append(f"  {label}  {between.join(cells)}".rstrip())
    legend = (
        "→ pp cuts the layers",
        "rows: dp cuts the batch",
        "cells: cp cuts the tokens",
        "[ ] tp cuts the matrices",
    )
    notes = [text for text, size in zip(legend, sizes, strict=True) if size > 1]
    if notes:
        lines.append("  " + "   ".join(notes))
    return "\n".join(lines)


def _shown(size: int) -> list[int | None]:
    """Return the coordinates of an axis to print; None stands for those that are left out."""
    return list(range(size)) if size <= _LIMIT else [*range(_LIMIT - 2), None, size - 1]


def _cell(groups: Sequence[Sequence[int]]) -> str:
    """Return the tp groups of a pp and dp coordinate as text; of more than two, the ends."""
    if len(groups) <= 2:
        return " ".join(map(_tp_group, groups))
    return f"{_tp_group(groups[0])} .. {_tp_group(groups[-1])}"


def _tp_group(ranks: Sequence[int]) -> str:
    return f"[{' '.join(map(str, ranks))}]" if len(ranks) <= 4 else f"[{ranks[0]}..{ranks[-1]}]"
