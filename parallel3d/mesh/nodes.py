"""Which ranks share a machine, as the machines report it, not the launcher (floor 1)."""

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parallel3d.base.lock import place_of_this_process
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh


@dataclass(frozen=True)
class Nodes:
    """The machine of each rank. Launchers may assign ranks to machines in any order."""

    hosts: tuple[str, ...]
    """Host name by rank."""
    machines: tuple[str, ...]
    """A unique id of the machine, by rank."""

    def first(self, rank: int) -> int:
        """Return the first rank on the machine of `rank`, which does work once per machine."""
        return self.machines.index(self.machines[rank])

    def torn(self, size: int) -> list[range]:
        """Return the groups of `size` neighbouring ranks that lie on several machines."""
        torn = []
        for start in range(0, len(self.machines), size):
            machines = self.machines[start : start + size]
            if len(set(machines)) > 1:
                torn.append(range(start, start + size))
        return torn

    def in_words(self, ranks: Iterable[int]) -> str:
        """Return the hosts of some ranks as text: "ranks 0, 1 on node0 and 2, 3 on node1"."""
        by_machine: dict[str, list[int]] = {}
        for rank in ranks:
            by_machine.setdefault(self.machines[rank], []).append(rank)
        parts = [
            f"{', '.join(map(str, own))} on {self.hosts[own[0]]}" for own in by_machine.values()
        ]
        return f"ranks {' and '.join(parts)}"


def find_nodes(mesh: Mesh) -> Nodes:
    """Return the machine of every rank. Collective."""
    pairs = gather_json(mesh, [socket.gethostname(), machine_of_this_process()], aside=True)
    hosts, machines = zip(*pairs, strict=True)
    return Nodes(hosts, machines)


def machine_of_this_process() -> str:
    """Return an id that differs between machines and between containers of one machine."""
    boot = place_of_this_process().partition(" ")[0]
    return f"{socket.gethostname()} {boot}"


def wait_until(look: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return True if `look` becomes true within `seconds`.

    A shared file system may show files of other hosts late.
    """
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
