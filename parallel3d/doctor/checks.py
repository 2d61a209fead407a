"""Judge the facts and links of all ranks: one check per row, with the outliers and a remedy."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from parallel3d.config import RunConfig
from parallel3d.config.hardware import Hardware
from parallel3d.doctor.facts import UNLIMITED, Facts, folders_of
from parallel3d.doctor.links import SLOWER, Timed, common_ranks, slow_groups
from parallel3d.mesh.nodes import Nodes

_MOST_AHEAD = 1.0  # seconds between a clock and the median
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    value: str
    """The measured values as text."""
    outliers: tuple[int, ...] = ()
    """The ranks on which the check fails; empty if it passes."""
    where: str = ""
    """The outliers as text, with their hosts."""
    remedy: str = ""
    """The remedy; empty if the check passes."""


def judge(
    config: RunConfig, facts: Sequence[Facts], links: Sequence[Timed], nodes: Nodes,
    hardware: Hardware | None,
) -> Iterator[Check]:  # fmt: skip
    """Yield every check of the ranks' `facts` (by rank) and `links`."""

    def check(name: str, values: Sequence[Any], is_right: Callable[[Any], bool],
              remedy: str, show: Callable[[Any], str] = str) -> Check:  # fmt: skip
        right = list(dict.fromkeys(show(v) for v in sorted(values) if is_right(v)))
        text = " to ".join(dict.fromkeys(right[:1] + right[-1:]))
        wrong = tuple(rank for rank, value in enumerate(values) if not is_right(value))
        if not wrong:
            return Check(name, text)
        other = ", ".join(dict.fromkeys(show(values[rank]) for rank in wrong))
        where = nodes.in_words(wrong)
        others = f", the others {text}" if text else ""
        return Check(name, f"{where}: {other}{others}", wrong, where, remedy)

    def same(name: str, values: Sequence[str], remedy: str) -> Check:
        usual, _ = Counter(values).most_common(1)[0]
        return check(name, values, lambda value: value == usual, remedy)

    yield Check("hosts", nodes.in_words(range(len(facts))))
    for name in facts[0].versions:
        versions = [fact.versions.get(name, "none") for fact in facts]
        yield same(name, versions, f"install the same {name} on every host")
    yield same("device", [fact.device for fact in facts], "use equal devices for all ranks")
    on_gpu, several = facts[0].device != "CPU", len(set(nodes.machines)) > 1
    if on_gpu:
        yield check(
            "device memory in use", [fact.device_used for fact in facts], lambda x: x < 0.1,
            "end the other processes on the device (nvidia-smi lists them)", "{:.0%}".format,
        )  # fmt: skip
    yield check(
        "clock", [fact.seconds_ahead for fact in facts], lambda x: abs(x) <= _MOST_AHEAD,
        "synchronise the host's clock (chronyc makestep; timedatectl set-ntp true)",
        lambda x: f"{abs(x):.2f} s {'ahead' if x >= 0 else 'behind'}",
    )  # fmt: skip
    runs, cache = (folder.absolute() for folder in folders_of(config))
    yield check(
        "run directory", [fact.sees_runs for fact in facts], bool,
        f"set parallel3d.run.directory to a folder that rank 0 can write to and all hosts share, "
        f"or mount {runs.parent} there",
        lambda seen: f"{runs} {'is the same folder' if seen else 'is not the folder of rank 0'}",
    )  # fmt: skip
    if all(fact.sees_cache for fact in facts) or not facts[0].sees_cache:
        yield check(
            "data cache", [fact.sees_cache for fact in facts], bool,
            "set parallel3d.data.cache to a writable folder",
            lambda seen: f"{cache} {'is the same folder' if seen else 'cannot be written'}",
        )  # fmt: skip
    else:
        yield Check("data cache", f"{cache} is not shared: each host prepares its own corpus")
    files = 1024 + 8 * len(facts)
    yield check(
        "open files", [fact.open_files for fact in facts], lambda x: x >= files,
        f"raise the limit to {files:,} or more (ulimit -n; Docker: --ulimit nofile={files})",
        _count,
    )  # fmt: skip
    zero = config.zero_optimization
    on_nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    locked = _GIB if on_nvme or (on_gpu and several) else 0
    yield check(
        "locked memory", [fact.locked_memory for fact in facts], lambda x: x >= locked,
        "raise the limit, for NVMe offload and InfiniBand (ulimit -l unlimited; Docker: --ulimit "
        "memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)", _size,
    )  # fmt: skip
    shared = _GIB if on_gpu and len(facts) > 1 else 0
    yield check(
        "shared memory", [fact.shared_memory for fact in facts], lambda x: x >= shared,
        "enlarge /dev/shm, through which NCCL connects the ranks of a host (Docker: --shm-size 1g)",
        _size,
    )  # fmt: skip
    memory = [fact.free_memory for fact in facts]
    yield check(
        "free memory per rank", memory, lambda x: x >= max(median(memory) / 2, _GIB / 4),
        "end the other processes on the host, or leave it out", _size,
    )  # fmt: skip
    yield check(
        "free disk for runs", [fact.free_disk for fact in facts], lambda x: x >= _GIB,
        "free some space, or set parallel3d.run.directory to another disk", _size,
    )  # fmt: skip
    yield from _links(links, nodes, hardware)


def _links(links: Sequence[Timed], nodes: Nodes, hardware: Hardware | None) -> Iterator[Check]:
    """Yield a check for each kind of link beside the hardware file, and one of slow links."""
    for kind in dict.fromkeys(group.kind for group in links):
        groups = [group for group in links if group.kind == kind]
        rates = [f"{1e-9 * rate:.3g}" for rate in sorted(group.rate for group in groups)]
        value = f"{' to '.join(dict.fromkeys((rates[0], rates[-1])))} GB/s"
        expected = {group: group.expected(hardware) for group in groups}
        late = [group for group, s in expected.items() if s and group.seconds > SLOWER * s]
        if hardware and (seconds := expected[groups[0]]):
            planned = groups[0].rate * groups[0].seconds / seconds
            value += f", {hardware.name}: {1e-9 * planned:.3g}"
        ranks = tuple(sorted({rank for group in late for rank in group.ranks}))
        where = nodes.in_words(ranks) if ranks else ""
        remedy = (
            "check cables, drivers and the interface that NCCL and gloo use (NCCL_DEBUG=INFO, "
            "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); measure a CPU with `parallel3d plan "
            "--calibrate`"
        )
        yield Check(f"links: {kind}", value, ranks, where, remedy if ranks else "")
    if slow := slow_groups(links):
        outliers = tuple(common_ranks(slow, nodes))
        where, kinds = nodes.in_words(outliers), ", ".join(dict.fromkeys(g.kind for g in slow))
        text = f"{where}: common to {len(slow)} slow groups ({kinds})"
        remedy = f"they take over {SLOWER:g} times as long as others; leave the host out, or check"
        yield Check("slow links", text, outliers, where, f"{remedy} its network and its load")
    elif links:
        yield Check("slow links", "none")


def _count(number: int) -> str:
    return "unlimited" if number >= UNLIMITED else f"{number:,}"


def _size(num_bytes: int) -> str:
    return "unlimited" if num_bytes >= UNLIMITED else f"{num_bytes / _GIB:,.3g} GiB"
