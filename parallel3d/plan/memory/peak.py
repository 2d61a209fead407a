"""Peak device, host and NVMe memory of each pipeline coordinate, in bytes, by part."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import (
    StageLayers,
    Stages,
    layers_by_stage,
    model_of,
    most_in_flight,
    stages_on,
)
from parallel3d.plan.memory.activations import StageActivations, stage_activations
from parallel3d.plan.memory.moments import CoordinateRank
from parallel3d.plan.setting import RankShare, Setting
from parallel3d.schedule.schedules import splits_backward

PARTS = (
    "weights",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "margin",
)


@dataclass(frozen=True)
class Memory:
    """Bytes of a pipeline coordinate's rank at its fullest moment.

    - `parts`: device memory, by the names of PARTS.
    - `host`, `nvme`: offloaded states.
    - `pp_coord`: the pipeline coordinate.
    """

    parts: Mapping[str, int]
    host: int
    nvme: int
    pp_coord: int

    @cached_property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


def per_rank(setting: Setting, hardware: Hardware | None = None) -> tuple[Memory, ...]:
    """Return the peak memory of each pipeline coordinate.

    A GPU needs a margin for memory beside tensors. Without `hardware` the run is on CPUs.
    """
    return tuple(peak_of(setting, coord, hardware) for coord in range(setting.mesh.pp))


def fullest(setting: Setting, hardware: Hardware | None = None) -> Memory:
    """Return the peak memory of the pipeline coordinate that needs the most device memory."""
    return max(per_rank(setting, hardware), key=lambda memory: memory.total)


def peak_of(setting: Setting, coord: int, hardware: Hardware | None = None) -> Memory:
    """Return the peak memory of one pipeline coordinate under this engine."""
    rank = _rank(setting, coord, hardware)
    most = max(rank.moments(), key=sum)
    by_part = dict.fromkeys(PARTS, 0)
    by_part["weights"] = rank.held.weights
    by_part["optimizer"] = rank.held.optimizer
    by_part |= zip(("gathered", "gradients", "activations", "logits", "buffers"), most, strict=True)
    # If the head is a stage by itself, its input belongs to the logits and was counted twice.
    by_part["logits"] += min(0, by_part["activations"])
    by_part["activations"] = max(0, by_part["activations"])
    by_part["margin"] = margin(sum(by_part.values()), hardware)
    by_part["margin"] += nccl_estimate(setting, coord, hardware)
    return Memory(by_part, rank.held.host + rank.waiting_on_host, rank.held.nvme, coord)


def exceeds(setting: Setting, coord: int, hardware: Hardware, room: tuple[int, int]) -> bool:
    """Return True if a coordinate needs more than `room`, the bytes of a device and of its host.

    It stops at the first moment that needs more.
    """
    rank = _rank(setting, coord, hardware)
    own = rank.held.weights + rank.held.optimizer
    rest = room[0] - nccl_estimate(setting, coord, hardware)
    return rank.held.host + rank.waiting_on_host > room[1] or any(
        tensors + margin(tensors, hardware) > rest
        for tensors in (own + sum(moment) for moment in rank.moments())
    )


def _rank(setting: Setting, coord: int, hardware: Hardware | None) -> CoordinateRank:
    on_cpu = is_cpu(hardware)
    parts = _parts(setting)
    home = _homes(setting)[coord]
    layers = tuple([parts[s] for s in home])
    stages = _stages(setting, layers, on_cpu)
    return CoordinateRank(setting, coord, home, layers, stages, on_cpu)


def least_in_flight(setting: Setting, hardware: Hardware | None) -> int:
    """Return a lower bound on the activations that the first pipeline rank holds at once."""
    s = setting
    on_cpu = is_cpu(hardware)
    parts = _parts(setting)
    different = dict.fromkeys(parts[i] for i in _homes(s)[0])
    saved = []
    for stage in _stages(s, different, on_cpu):
        # On a CPU the output is counted, and is also the next stage's input.
        saved.append(stage.saved_bytes - (stage.hidden_bytes if on_cpu else 0))
    return min(saved) * most_in_flight(s.actions)[0]


def saved_bytes(setting: Setting, hardware: Hardware | None = None) -> tuple[int, ...]:
    """Return for each stage the bytes of activations that one microbatch leaves in flight."""
    stages = _stages(setting, _parts(setting), is_cpu(hardware))
    return tuple(stage.saved_bytes for stage in stages)


def is_cpu(hardware: Hardware | None) -> bool:
    """Return True if devices are processes on a machine's cores, as they are without hardware."""
    return hardware is None or hardware.cores is not None


def _parts(setting: Setting) -> tuple[StageLayers, ...]:
    work = setting.workload
    return layers_by_stage(model_of(work.layers), setting.num_stages, work.seq)


def _homes(setting: Setting) -> tuple[Stages, ...]:
    """Return the stages of each pipeline coordinate."""
    stages_per_rank, schedule = setting.order
    return stages_on(schedule, setting.mesh.pp, stages_per_rank)


def _stages(
    setting: Setting, parts: Iterable[StageLayers], on_cpu: bool
) -> tuple[StageActivations, ...]:
    """Return the activations of some of a setting's stages."""
    own = RankShare.of(setting)
    software = setting.workload.software
    gradient = software.gradient_bytes
    classic = software.attention == "classic"
    recompute = setting.flow.recompute
    if splits_backward(setting.order.schedule):  # the inputs of all linear layers stay from I to W
        recompute = recompute.while_weights_wait()
    return tuple(
        [stage_activations(part, own, recompute, gradient, classic, on_cpu) for part in parts]
    )


CONTEXT = 1113 * 2**20
"""Bytes of a process's CUDA context and kernels. Source: bigscience experiments/tr3m-1B3.md,
"calibration" (the same on a V100 of 16 GB and of 32 GB)."""
ALLOCATOR = 0.1
"""Memory that torch's caching allocator reserves beside the tensors at their peak, as a share of
them: free blocks of the wrong size. One value for all programs and devices. Published runs with
room to spare reported 0.13 to 0.16 (`python -m benchmarks.published`, each group left out in turn);
an allocator that runs out of memory first releases its free blocks."""


def margin(tensors: int, hardware: Hardware | None) -> int:
    """Return the bytes of device memory beside `tensors` bytes of tensors; 0 without a GPU."""
    return 0 if is_cpu(hardware) else CONTEXT + round(ALLOCATOR * tensors)


# Estimates until a GPU has measured them (docs/planner/memory.md).
COMMUNICATOR = 256 * 2**20
"""Bytes of an NCCL communicator of several ranks: buffers of its channels, and NVLS's on NVSwitch.
Older versions of NCCL took 544 to 688 MB on four A100 (github.com/NVIDIA/nccl/issues/964); versions
from 2.22 on connect an algorithm when it is first used."""
KEPT_MESSAGES = 4
"""Messages that the streams of the pipeline's groups keep per neighbouring stage, two in each
direction: ProcessGroupNCCL returns a message's memory only after all that its stream had queued,
and the host queues ahead of the device."""


def nccl_estimate(setting: Setting, coord: int, hardware: Hardware | None) -> int:
    """Return the estimated bytes of NCCL's communicators and of kept messages; 0 on a CPU."""
    mesh = setting.mesh
    if is_cpu(hardware) or mesh.ranks == 1:
        return 0
    message = RankShare.of(setting).hidden_bytes
    stages_per_rank, schedule = setting.order
    crossings = _crossings(schedule, mesh.pp, stages_per_rank, coord)
    communicators = _communicators(mesh, setting.flow.ep, setting.state.copies)
    return communicators * COMMUNICATOR + KEPT_MESSAGES * crossings * message


@lru_cache(maxsize=4096)
def _communicators(mesh: MeshSizes, ep: int, copies: int) -> int:
    """Return the number of a rank's groups of mesh/mesh.py; an axis of all ranks is the world."""
    pp, dp, cp, tp = mesh
    exists = {
        "world": True,
        "pp": 1 < pp < mesh.ranks,
        "dp": 1 < dp < mesh.ranks,
        "cp": 1 < cp < mesh.ranks,
        "tp": 1 < tp < mesh.ranks,
        "pp backward": pp > 1,
        "ep": ep > 1,
        "ep model": ep > 1,
        "ep replicas": ep > 1 and dp * cp > ep,
        "ep shards": ep > 1 and copies > 1 and dp * cp > ep * copies,
        "dp shards": copies > 1 and dp * cp > copies,
        "dp copies": 1 < copies < dp,
        "model": pp * tp > 1 and dp * cp > 1,
        "dp cp": pp * tp > 1 and dp > 1 and cp > 1,
    }
    return sum(exists.values())


@lru_cache(maxsize=65536)
def _crossings(schedule: str, pp: int, stages_per_rank: int, coord: int) -> int:
    """Return the number of neighbouring stages, before and after each own one, on other ranks."""
    home = stages_on(schedule, pp, stages_per_rank)[coord]
    others = {*range(pp * stages_per_rank)} - {*home}
    neighbours = [stage + 1 for stage in home] + [stage - 1 for stage in home]
    return sum(stage in others for stage in neighbours)
