"""Bytes that a rank of a pipeline coordinate holds at each moment that may be the step's fullest.

The candidate moments: as weights gathered by the program arrive, as a forward begins, as it ends,
in a stage's first backward, in a later one, in a gradient reduction, and in the optimizer's step.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import mul

from parallel3d.plan.layers.placement import MicrobatchCounts, in_flight, model_of, stages_of
from parallel3d.plan.layers.windows import Gradients, Held, gradients, windows
from parallel3d.plan.memory.activations import BackwardMoment, StageActivations
from parallel3d.plan.memory.gathered import GatheredBytes, arriving, gathered, held_of
from parallel3d.plan.memory.states import StateBytes, WeightSizes, sizes, states
from parallel3d.plan.setting import Setting

_TOKEN = 16  # bytes of a token and its label, int64
# Bytes of gathered weights, gradients, activations, logits and buffers at one moment.
Moment = tuple[int, int, int, int, int]


@dataclass(eq=False)
class CoordinateRank:
    """One rank of a pipeline coordinate, with its stages and what each of them holds.

    `home`: the coordinate's stages. `stages`: the bytes that each of them holds.
    """

    setting: Setting
    coord: int
    home: tuple[int, ...]
    stages: tuple[StageActivations, ...]
    on_cpu: bool
    held: StateBytes = field(init=False)
    """What it holds whatever the moment."""

    def __post_init__(self) -> None:
        s = self.setting
        self._places: Held = tuple(range(len(self.home)))
        self._order = s.schedule, s.pp, s.num_microbatches, s.stages_per_rank
        self._flight = in_flight(*self._order)[self.coord]
        self._known: dict[Held, WeightSizes] = {}
        self._in: dict[MicrobatchCounts, tuple[int, int]] = {}
        self._every = self._sizes(self._places)
        self.held = states(s, self._every, self.on_cpu)
        self._shard = self.held.shard if self.held.standing else 0
        self._always = s.num_microbatches * s.shape.tokens * _TOKEN
        self._always += sum([stage.resident_bytes for stage in self.stages])

    def moments(self) -> Iterator[Moment]:
        """Every candidate for the fullest moment of a step, as bytes by part."""
        held, always = self.held, self._always
        reduced = held.buffers + held.bucket + held.reducing
        yield 0, held.shard, always, 0, held.buffers + held.stepping
        own: tuple[Gradients | None, ...] = (None,) * len(self.home)
        if held.whole > 0 and len(self.home) > 1:
            own = gradients(*self._order)[self.coord]
        else:
            yield 0, held.whole + held.shard, always, 0, reduced
        if self.setting.holds_weights:
            coming = windows(*self._order, self.setting.weights)[self.coord]
            sums = arriving(self.setting, coming, self._sizes, self.on_cpu)
            for arrival, num_bytes in zip(coming.arrivals, sums, strict=True):
                body, logits = self._activations(arrival.flight)
                there = self._shard if arrival.forward or held.whole else held.shard
                yield num_bytes, there, body, logits, held.buffers
            weights = held_of(self.setting, coming, self._sizes, self.on_cpu)
        else:
            weights = [
                gathered(self.setting, self._sizes((place,)), self._every, self.on_cpu)
                for place in self._places
            ]
        for place, (whole, its) in enumerate(zip(weights, own, strict=True)):
            yield from self._of_stage(place, whole, its)
            if its:
                body, logits = self._activations(its.last)
                there = self._whole((*its.left, place)) + held.shard
                yield whole.reducing, there, body, logits, reduced

    def _of_stage(
        self, place: int, weights: GatheredBytes, own: Gradients | None
    ) -> Iterator[Moment]:
        """The moments of one stage's passes; `own`: its gradients, if reduced as they are made."""
        held, s, once = self.held, self.stages[place], self.held.whole > 0
        buffers = held.buffers if once or held.standing else held.buffers + held.bucket
        counts = self._most(place)
        # Whether a forward comes after a backward, and so finds its gradients.
        alternates = sum(counts) < self.setting.num_microbatches * len(self.stages)
        before = self._shard
        if alternates and own:
            before += max(map(self._whole, own.forward))
        elif alternates:
            before += held.whole if once else held.shard - self._shard
        at = self._in_flight(counts)
        yield at(s.ending, weights.forward, before, held.buffers)
        beginning = BackwardMoment(s.saved_bytes, 0, -s.logits_bytes, 0)
        yield at(beginning, weights.beginning, before, held.buffers)
        if once and not alternates:
            # Gradients come into being while activations go.
            there, first = self._shard + s.first.gradients_bytes, at
            if own:
                there += self._whole(own.beside)
                first = self._in_flight(own.first)
            yield first(s.first, weights.backward, there, buffers)
        else:
            yield at(s.later, weights.backward, before, buffers)
        if not once:
            # The first full bucket is reduced, and makes the shards where there are none.
            full = bisect_left(s.produced, self.setting.buffers.reduce_bucket_size)
            at_full = s.backwards[min(full, len(s.backwards) - 1)]
            yield at(at_full, weights.backward, held.shard, buffers + held.reducing)

    def _sizes(self, places: Held) -> WeightSizes:
        """Elements of the weights in some of the coordinate's stages."""
        if places not in self._known:
            s = self.setting
            model = model_of(s.layers)
            cuts = stages_of(model, s.pp * s.stages_per_rank, s.shape.seq)
            held = tuple([cuts[self.home[p]] for p in places])
            threshold = s.buffers.stage3_param_persistence_threshold
            self._known[places] = sizes(model, held, s.tp, threshold)
        return self._known[places]

    def _whole(self, places: Held) -> int:
        """Bytes of the unreduced gradients of some stages."""
        if not places:
            return 0
        return self._sizes(tuple(sorted(places))).params * self.setting.software.gradient_bytes

    def _activations(self, counts: MicrobatchCounts) -> tuple[int, int]:
        """Bytes of `counts` microbatches in flight in each stage: without logits, and of logits."""
        if counts not in self._in:
            logits = sum(map(mul, counts, [stage.logits_bytes for stage in self.stages]))
            saved = sum(map(mul, counts, [stage.saved_bytes for stage in self.stages])) - logits
            self._in[counts] = self._always + saved + self._passing(counts), logits
        return self._in[counts]

    def _in_flight(
        self, counts: MicrobatchCounts
    ) -> Callable[[BackwardMoment, int, int, int], Moment]:
        """A function that gives the moment of a pass beside `counts` microbatches in flight."""
        body, logits = self._activations(counts)

        def moment(m: BackwardMoment, whole: int, gradients: int, buffers: int) -> Moment:
            freed, working, more, _ = m
            return whole, gradients, body + working - freed - more, logits + more, buffers

        return moment

    def _most(self, place: int) -> MicrobatchCounts:
        """The fullest counts of microbatches in flight that include one in the stage at `place`."""
        if len(self._flight) == 1:
            return self._flight[0]
        saved = [stage.saved_bytes for stage in self.stages]
        # Its own backward is not before its own forward.
        possible = [counts for counts in self._flight if counts[place]]
        return max(possible, key=lambda counts: sum(map(mul, counts, saved)))

    def _passing(self, counts: MicrobatchCounts) -> int:
        """Bytes being sent between this coordinate's stages and its neighbours'."""
        s, total = self.setting, 0
        last = s.pp * s.stages_per_rank - 1
        count_of = dict(zip(self.home, counts, strict=True))
        for index, stage, count in zip(self.home, self.stages, counts, strict=True):
            before = index > 0 and index - 1 not in count_of
            waiting = before + (index < last and index + 1 not in count_of)
            # A receive is posted one compute ahead of its use.
            if self.on_cpu and before:
                # gloo does not say that a message has left: a gradient is held to the step's end.
                waiting += s.num_microbatches - count
            if self.on_cpu and index + 1 in count_of:
                # What a stage gives is what the next one takes, and is counted with both.
                waiting -= min(count, count_of[index + 1])
            elif index < last and index + 1 not in count_of and not self.on_cpu:
                waiting += 1  # what was sent last is let go of when the next one is
            total += waiting * stage.hidden_bytes
        return total
