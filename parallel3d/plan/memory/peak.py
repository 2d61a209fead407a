"""Peak device, host and NVMe memory of each pipeline coordinate, in bytes, by part."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from parallel3d.config.hardware import Hardware
from parallel3d.model.spec import Recompute
from parallel3d.plan.layers.placement import (
    StageLayers,
    model_of,
    most_in_flight,
    parts_of,
    stages_on,
)
from parallel3d.plan.layers.weight_counts import sizes
from parallel3d.plan.memory.activations import StageActivations, stage
from parallel3d.plan.memory.moments import CoordinateRank
from parallel3d.plan.memory.states import states
from parallel3d.plan.setting import Setting
from parallel3d.schedule.schedules import splits_backward

PARTS = (
    "weights", "gathered", "gradients", "optimizer", "activations", "logits", "buffers", "margin",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank of one pipeline coordinate holds at its fullest moment.

    `parts`: on the device, by the names of PARTS. `host`, `nvme`: of offloaded states.
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
    """The peak memory of each pipeline coordinate.

    A GPU has a margin for memory beyond tensors. Without `hardware` the run is on CPUs.
    """
    return tuple(at(setting, coord, hardware) for coord in range(setting.pp))


def fullest(setting: Setting, hardware: Hardware | None = None) -> Memory:
    """The peak memory of the pipeline coordinate that needs most on its device."""
    return max(per_rank(setting, hardware), key=lambda memory: memory.total)


def at(setting: Setting, coord: int, hardware: Hardware | None = None) -> Memory:
    """The peak memory of one pipeline coordinate, under this engine."""
    on_cpu = is_cpu(hardware)
    home = stages_on(setting.schedule, setting.pp, setting.stages_per_rank)[coord]
    parts = _parts(setting)
    layers = tuple([parts[s] for s in home])
    stages = tuple([_stage(setting, part, on_cpu) for part in layers])
    rank = CoordinateRank(setting, coord, home, layers, stages, on_cpu)
    most = max(rank.moments(), key=sum)
    found = dict.fromkeys(PARTS, 0)
    found["weights"], found["optimizer"] = rank.held.weights, rank.held.optimizer
    found |= zip(("gathered", "gradients", "activations", "logits", "buffers"), most, strict=True)
    # Where the head alone is a stage, its input is with the logits, and was counted twice there.
    found["logits"] += min(0, found["activations"])
    found["activations"] = max(0, found["activations"])
    found["margin"] = margin(sum(found.values()), hardware)
    return Memory(found, rank.held.host, rank.held.nvme, coord)


def least_on_first(setting: Setting, hardware: Hardware | None) -> tuple[int, int]:
    """Return a cheap lower bound on the first rank's bytes: on its device, and on its host."""
    s, parts = setting, _parts(setting)
    layers = tuple([parts[i] for i in stages_on(s.schedule, s.pp, s.stages_per_rank)[0]])
    weights = sizes(layers, s.tp, s.persistence)
    held = states(s, weights, is_cpu(hardware))
    shard = held.shard if held.standing else 0
    device = held.weights + held.optimizer + held.buffers + shard + least_in_flight(s, hardware)
    most = most_in_flight(s.schedule, s.pp, s.num_microbatches, s.stages_per_rank)[0]
    if most < s.num_microbatches * s.stages_per_rank:  # a forward comes after a backward
        device += held.whole or held.shard - shard
    return device + margin(device, hardware), held.host


def least_in_flight(setting: Setting, hardware: Hardware | None) -> int:
    """Return a lower bound on the activations that the first pipeline rank holds at once."""
    s, on_cpu, parts = setting, is_cpu(hardware), _parts(setting)
    home = stages_on(s.schedule, s.pp, s.stages_per_rank)[0]
    stages = [_stage(s, part, on_cpu) for part in dict.fromkeys([parts[i] for i in home])]
    # On a CPU a stage's saved bytes count its output, which is also the next stage's input.
    saved = min(stage.saved_bytes - on_cpu * stage.hidden_bytes for stage in stages)
    return saved * most_in_flight(s.schedule, s.pp, s.num_microbatches, s.stages_per_rank)[0]


def saved_bytes(setting: Setting, hardware: Hardware | None = None) -> tuple[int, ...]:
    """For each stage, the bytes of activations that one microbatch leaves in flight."""
    return tuple(_stage(setting, part, is_cpu(hardware)).saved_bytes for part in _parts(setting))


def is_cpu(hardware: Hardware | None) -> bool:
    """Whether devices are processes on a machine's cores; so they are if no hardware is named."""
    return hardware is None or hardware.cores is not None


def _parts(setting: Setting) -> tuple[StageLayers, ...]:
    num_stages = setting.pp * setting.stages_per_rank
    return parts_of(model_of(setting.layers), num_stages, setting.shape.seq)


def _stage(setting: Setting, part: StageLayers, on_cpu: bool) -> StageActivations:
    software, shape = setting.software, setting.shape
    # From I to W the inputs of all linear layers are held, whatever was computed again for I.
    kept = setting.recompute == "full" and splits_backward(setting.schedule)
    recompute: Recompute = "none" if kept else setting.recompute
    return stage(
        part, shape.batch, shape.seq, setting.tp, setting.sequence_parallel, recompute,
        setting.hidden_size, setting.bytes_per_element, software.gradient_bytes,
        software.attention == "classic", on_cpu,
    )  # fmt: skip


CONTEXT = 1113 * 2**20
"""Bytes of a process's CUDA context and kernels: bigscience experiments/tr3m-1B3.md, "calibration"
(the same on a V100 of 16 GB and of 32 GB)."""
ALLOCATOR = 0.1
"""What torch's caching allocator reserves beyond the tensors at their fullest moment, as a share of
them: blocks that are free but of no fitting size. The same for every program and device. What runs
reported that had room to spare is 0.13 to 0.16 (published_memory.py, each group left out in turn);
an allocator that runs out first gives back what is free."""


def margin(tensors: int, hardware: Hardware | None) -> int:
    """Bytes of device memory beside `tensors` bytes of tensors; 0 where no GPU is named."""
    if hardware is None or hardware.cores is not None:
        return 0
    return CONTEXT + round(ALLOCATOR * tensors)
