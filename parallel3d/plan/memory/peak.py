"""Device, host and NVMe memory of each pipeline coordinate, in bytes, part by part.

A rank's fullest moment is looked for among those of a step that can be: as a forward begins, as it
ends, in the first backward, in a later one, in the reduction, and in the optimizer's step.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul

from parallel3d.hardware import Hardware
from parallel3d.plan.layers.placement import (
    Counts,
    Part,
    in_flight,
    model_of,
    parts_of,
    stages_of,
    stages_on,
)
from parallel3d.plan.memory.activations import Backward, Stage, stage
from parallel3d.plan.memory.margin import margin
from parallel3d.plan.memory.states import Gathered, Sizes, States, gathered, sizes, states
from parallel3d.plan.setting import Setting

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
_TOKEN = 16  # bytes of a token and its label, int64
# Bytes of gathered weights, gradients, activations, logits and buffers at one moment.
_Moment = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank of one pipeline coordinate holds at its fullest moment.

    `parts`: on the device, by the names of PARTS. `host` and `nvme`: what offload puts there.
    """

    parts: Mapping[str, int]
    host: int
    nvme: int
    pp_coord: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts.values()))


def per_rank(setting: Setting, hardware: Hardware | None = None) -> tuple[Memory, ...]:
    """The memory of each pipeline coordinate.

    With a `hardware` that is a GPU there is a margin. Without one it is the tensors of a run on
    CPUs, which lack fused norms and a fused Adam.
    """
    return tuple(at(setting, coord, hardware) for coord in range(setting.pp))


def fullest(setting: Setting, hardware: Hardware | None = None) -> Memory:
    """The memory of the coordinate that needs most on its device."""
    ranks: Iterable[Memory]
    if setting.stages_per_rank == 1 and not is_cpu(hardware):
        coords = _unlike(setting.schedule, setting.num_microbatches, _parts(setting), setting.pp)
        ranks = (at(setting, coord, hardware) for coord in coords)
    else:
        ranks = per_rank(setting, hardware)
    return max(ranks, key=lambda memory: memory.total)


@lru_cache(maxsize=16384)
def _unlike(
    schedule: str, num_microbatches: int, parts: tuple[Part, ...], pp: int
) -> tuple[int, ...]:
    """The coordinates of which no other has the same layers and surely as much in flight.

    One with all microbatches in flight has no gradients meanwhile, and one with all but one, or
    with a single one, gathers as no other does.
    """
    homes = stages_on(schedule, pp, 1)
    found: dict[tuple[Part, bool, int], tuple[int, int]] = {}
    for coord, flight in enumerate(in_flight(schedule, pp, num_microbatches, 1)):
        (stage_index,), ((count,),) = homes[coord], flight
        case = 2 if count == 1 else max(-2, count - num_microbatches)
        key = parts[stage_index], stage_index in (0, pp - 1), case
        found[key] = max(found.get(key, (0, 0)), (count, coord))
    return tuple(coord for _, coord in found.values())


def at(setting: Setting, coord: int, hardware: Hardware | None = None) -> Memory:
    """The memory of one pipeline coordinate, under this engine."""
    on_cpu = is_cpu(hardware)
    home = stages_on(setting.schedule, setting.pp, setting.stages_per_rank)[coord]
    flight = in_flight(
        setting.schedule, setting.pp, setting.num_microbatches, setting.stages_per_rank
    )[coord]
    size, held = _held(setting, home, on_cpu)
    parts = _parts(setting)
    stages = [_stage(setting, parts[s], on_cpu) for s in home]
    weights = gathered(setting, size, max(map(sum, flight)), on_cpu)
    most = max(_moments(setting, home, stages, flight, held, weights, on_cpu), key=sum)
    found = dict.fromkeys(PARTS, 0)
    found["weights"], found["optimizer"] = held.weights, held.optimizer
    found |= zip(("gathered", "gradients", "activations", "logits", "buffers"), most, strict=True)
    # Where the head alone is a stage, its input is with the logits, and was counted twice there.
    found["logits"] += min(0, found["activations"])
    found["activations"] = max(0, found["activations"])
    found["margin"] = margin(sum(found.values()), hardware)
    return Memory(found, held.host, held.nvme, coord)


def saved_bytes(setting: Setting, hardware: Hardware | None = None) -> tuple[int, ...]:
    """Bytes of activations that one microbatch leaves in flight, of each stage."""
    return tuple(_stage(setting, part, is_cpu(hardware)).saved for part in _parts(setting))


def is_cpu(hardware: Hardware | None) -> bool:
    """Whether devices are processes on a machine's cores: so they are where none is named."""
    return hardware is None or hardware.cores is not None


def _parts(setting: Setting) -> tuple[Part, ...]:
    num_stages = setting.pp * setting.stages_per_rank
    return parts_of(model_of(setting.layers), num_stages, setting.shape.seq)


def _stage(setting: Setting, part: Part, on_cpu: bool) -> Stage:
    software, shape = setting.software, setting.shape
    return stage(
        part,
        shape.batch,
        shape.seq,
        setting.tp,
        setting.sequence_parallel,
        setting.recompute,
        setting.hidden_size,
        setting.bytes_per_element,
        software.gradient_bytes,
        software.attention == "classic",
        on_cpu,
    )


def _held(setting: Setting, home: tuple[int, ...], on_cpu: bool) -> tuple[Sizes, States]:
    model = model_of(setting.layers)
    cuts = stages_of(model, setting.pp * setting.stages_per_rank, setting.shape.seq)
    size = sizes(
        model,
        tuple([cuts[s] for s in home]),
        setting.tp,
        setting.buffers.stage3_param_persistence_threshold,
    )
    return size, states(setting, size, on_cpu)


def _moments(
    setting: Setting,
    home: tuple[int, ...],
    stages: list[Stage],
    flight: tuple[Counts, ...],
    held: States,
    weights: Gathered,
    on_cpu: bool,
) -> Iterator[_Moment]:
    """What may be the fullest moment of a step."""
    always = setting.num_microbatches * setting.shape.tokens * _TOKEN
    always += sum(s.resident for s in stages)
    reduction = held.buffers + held.bucket + held.reducing
    yield 0, held.whole + held.shard, always, 0, reduction
    yield 0, held.shard, always, 0, held.buffers + held.stepping
    shard = held.shard if held.standing else 0
    once = held.whole > 0
    buffers = held.buffers if once or held.standing else held.buffers + held.bucket
    for index, s in enumerate(stages):
        # Its own backward is not before its own forward.
        counts = _most(flight, stages, index) if len(flight) > 1 else flight[0]
        # Whether a forward comes after a backward, and so finds its gradients.
        alternates = sum(counts) < setting.num_microbatches * len(stages)
        before = shard
        if alternates:
            before += held.whole if once else held.shard - shard
        logits = sum(map(mul, counts, [other.logits for other in stages]))
        body = sum(map(mul, counts, [other.saved for other in stages])) - logits
        body += always + _passing(setting, home, stages, counts, on_cpu)

        def moment(m: Backward, whole: int, gradients: int, buffers: int) -> _Moment:
            own = m.working - m.freed - m.logits
            return whole, gradients, body + own, logits + m.logits, buffers  # noqa: B023

        yield moment(s.ending, weights.forward, before, held.buffers)
        beginning = Backward(s.saved, 0, -s.logits, 0)
        yield moment(beginning, weights.beginning, before, held.buffers)
        if once and not alternates:
            # Gradients come into being while activations go.
            other = held.whole - s.first.gradients if len(stages) > 1 else 0
            gradients = shard + s.first.gradients + max(0, other)
            yield moment(s.first, weights.backward, gradients, buffers)
        else:
            yield moment(s.later, weights.backward, before, buffers)
        if not once:
            # The first full bucket is reduced, and makes the shards where there are none.
            full = bisect_left(s.produced, setting.buffers.reduce_bucket_size)
            at_full = s.backwards[min(full, len(s.backwards) - 1)]
            yield moment(at_full, weights.backward, held.shard, buffers + held.reducing)


def _most(flight: tuple[Counts, ...], stages: list[Stage], index: int) -> Counts:
    """The counts that hold most, of those with a microbatch in the stage of that index."""
    saved = [s.saved for s in stages]
    possible = [counts for counts in flight if counts[index]]
    return max(possible, key=lambda counts: sum(map(mul, counts, saved)))


def _passing(
    setting: Setting, home: tuple[int, ...], stages: list[Stage], counts: Counts, on_cpu: bool
) -> int:
    """Bytes on their way between this coordinate's stages and others'."""
    last, total = setting.pp * setting.stages_per_rank - 1, 0
    count_of = dict(zip(home, counts, strict=True))
    for index, s, count in zip(home, stages, counts, strict=True):
        ends = (index > 0 and index - 1 not in count_of) + (
            index < last and index + 1 not in count_of
        )
        waiting = ends  # a receive is posted one compute ahead of its use
        if on_cpu:
            # gloo does not say that a message has left: each is held to the end of the step.
            waiting += ends * (setting.num_microbatches - count)
        if index + 1 in count_of:
            # What a stage gives is what the next one takes, and is counted with both.
            waiting -= min(count, count_of[index + 1])
        total += waiting * s.hidden
    return total
