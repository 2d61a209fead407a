"""Which ranks are on one machine, as the machines say it and no launcher's numbers (floor 1)."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from parallel3d.base.lock import place_of_this_process
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh


@dataclass(frozen=True)
class Nodes:
    """The machine of each rank, by its boot; launchers may deal ranks out in any order."""

    hosts: tuple[str, ...]
    """By rank, the name of its host."""
    machines: tuple[str, ...]
    """By rank, what no two machines have in common."""

    def first(self, rank: int) -> int:
        """The first of the ranks on the machine of `rank`: it does what is done once a machine."""
        return self.machines.index(self.machines[rank])

    def torn(self, size: int) -> list[range]:
        """The groups of `size` neighbouring ranks that lie on several machines."""
        starts = range(0, len(self.machines), size)
        groups = (range(start, start + size) for start in starts)
        return [group for group in groups if len({self.machines[rank] for rank in group}) > 1]

    def in_words(self, ranks: range) -> str:
        """The hosts of some ranks: "ranks 0, 1 on node0 and 2, 3 on node1"."""
        by_machine: dict[str, list[int]] = {}
        for rank in ranks:
            by_machine.setdefault(self.machines[rank], []).append(rank)
        parts = (f"{', '.join(map(str, r))} on {self.hosts[r[0]]}" for r in by_machine.values())
        return f"ranks {' and '.join(parts)}"


def find_nodes(mesh: Mesh) -> Nodes:
    """The machine of every rank. Collective."""
    found = gather_json(mesh, [socket.gethostname(), machine_of_this_process()], aside=True)
    hosts, machines = zip(*found, strict=True)
    return Nodes(hosts, machines)


def machine_of_this_process() -> str:
    """Return a text that tells two machines apart, and two containers of one machine."""
    boot = place_of_this_process().partition(" ")[0]
    return f"{socket.gethostname()} {boot}"


def appears(look: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `look` comes true in time: a file system may show another host's files late."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
