"""Seconds of collectives and sends between devices, inside a node and across nodes."""

from math import gcd, log2
from typing import Literal, NamedTuple

from parallel3d.config.hardware import Hardware, Link
from parallel3d.plan.time.operators import Curves, refuse

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class RankGroup(NamedTuple):
    """A group of communicating ranks: its size, and the number that share a node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans."""
        return -(-self.ranks // self.per_node)


def group_of(ranks: int, stride: int, devices: int, hardware: Hardware) -> RankGroup:
    """Return the group of every `stride`-th device in a mesh of `devices` consecutive devices.

    If groups are spread unevenly over nodes, the one with the fewest members per node counts.
    """
    node = hardware.sharing(devices)
    if ranks == 1 or devices == node or node % (ranks * stride) == 0:
        return RankGroup(ranks, ranks)
    return RankGroup(ranks, 1 if node % stride else gcd(ranks, node // stride))


def crosses(stride: int, here: int, there: int, devices: int, hardware: Hardware) -> bool:
    """Return True if any message between two coordinates of `stride` devices leaves its node."""
    node = hardware.sharing(devices)
    if devices == node:
        return False
    first = here * stride
    other = there * stride
    return any((first + i) // node != (other + i) // node for i in range(min(stride, node)))


def collective_seconds(
    kind: Kind,
    num_bytes: float,
    ranks: int,
    ranks_per_node: int,
    hardware: Hardware,
    curves: Curves,
    one_ring: bool = False,
) -> float:
    """Return the seconds of one collective.

    In a ring of n ranks each sends (n-1)/n of the bytes, twice in an all-reduce (arXiv:1910.02054,
    section 7.1). Across nodes NCCL runs one ring per member of a node, each over its own network
    interface.

    - `num_bytes`: of the gathered tensor.
    - `one_ring`: True if there is only one ring.
    """
    if ranks == 1 or num_bytes == 0:
        return 0.0
    sweeps = 2 if kind == "all_reduce" else 1
    nodes = -(-ranks // ranks_per_node)
    moved = num_bytes * (ranks - 1) / ranks
    seconds = 0.0
    waiting = 0.0
    if ranks_per_node > 1:
        link = _link(hardware)
        seconds = moved / (link.bandwidth.value * curves.link)
        waiting = (ranks - nodes) * link.latency.value
    if nodes > 1:
        network = _network(hardware)
        rings = 1 if one_ring or network.one_ring else ranks_per_node
        rate = network.bandwidth.value * curves.network * rings
        crowd = 1 + curves.congestion * log2(nodes)
        seconds = max(seconds, moved / rate * crowd)
        ring = waiting + (nodes if nodes < ranks else ranks - 1) * network.latency.value
        # A tree over the nodes has log2(nodes) levels; each node's ring feeds it.
        inside = (ranks_per_node - 1) * _link(hardware).latency.value if ranks_per_node > 1 else 0.0
        tree = inside + log2(nodes) * network.latency.value
        waiting = min(ring, tree) if kind == "all_reduce" else ring
    return sweeps * (seconds + curves.latency * waiting) + _start(nodes, curves)


def all_to_all_seconds(
    num_bytes: float, group: RankGroup, hardware: Hardware, curves: Curves
) -> float:
    """Return the seconds in which each rank sends equal parts of `num_bytes` to all of a group.

    The parts for other nodes go through each rank's own network interface.
    """
    part = num_bytes / group.ranks
    seconds = 0.0
    waiting = 0.0
    if group.per_node > 1:
        link = _link(hardware)
        seconds = part * (group.per_node - 1) / (link.bandwidth.value * curves.link)
        waiting = link.latency.value
    if group.nodes > 1:
        network = _network(hardware)
        crowd = 1 + curves.congestion * log2(group.nodes)
        across = part * (group.ranks - group.per_node) * crowd
        seconds = max(seconds, across / (network.bandwidth.value * curves.network))
        waiting = (group.nodes - 1) * network.latency.value
    return seconds + curves.latency * waiting + _start(group.nodes, curves)


def send_seconds(num_bytes: float, crosses: bool, hardware: Hardware, curves: Curves) -> float:
    """Return the seconds of a message between two devices; `crosses`: it leaves the node."""
    channel = _network(hardware) if crosses else _link(hardware)
    share = curves.network if crosses else curves.link
    return curves.latency * channel.latency.value + num_bytes / (channel.bandwidth.value * share)


def _start(nodes: int, curves: Curves) -> float:
    """Return the seconds in which a collective starts and its ranks meet, beside its steps."""
    return curves.overhead_per_collective if nodes == 1 else curves.overhead_per_crossing


def _link(hardware: Hardware) -> Link:
    return hardware.link or refuse(hardware, "link", "plan for 1 device")


def _network(hardware: Hardware) -> Link:
    return hardware.network or refuse(hardware, "network", "plan for the devices of one node")
