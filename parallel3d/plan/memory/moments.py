"""The moments of a step at which one rank's memory may be the fullest.

They are: the arrival of weights that the program gathers; the beginning and the end of a forward; a
stage's first backward and a later one; a gradient reduction; the optimizer's step.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

from parallel3d.plan.layers.placement import (
    MicrobatchCounts,
    StageLayers,
    Stages,
    in_flight,
)
from parallel3d.plan.layers.weight_counts import WeightSizes, sizes
from parallel3d.plan.layers.windows import Gradients, Held, Windows, gradients, windows_of
from parallel3d.plan.memory.activations import BackwardMoment, StageActivations
from parallel3d.plan.memory.states import StateBytes, states
from parallel3d.plan.setting import TOKEN_BYTES, Setting

# Bytes of gathered weights, gradients, activations, logits and buffers at one moment.
Moment = tuple[int, int, int, int, int]


class GatheredBytes(NamedTuple):
    """Bytes of gathered weights during the passes of a stage.

    - `forward`, `backward`: during the pass.
    - `beginning`: when a forward begins.
    - `reducing`: after the stage's last backward, while its gradients are reduced.
    """

    forward: int
    backward: int
    beginning: int
    reducing: int = 0


@dataclass(eq=False)
class CoordinateRank:
    """One rank of a pipeline coordinate: its stages (`home`), their layers and activations."""

    setting: Setting
    coord: int
    home: Stages
    layers: tuple[StageLayers, ...]
    stages: tuple[StageActivations, ...]
    on_cpu: bool
    held: StateBytes = field(init=False)
    """Weights, gradients and optimizer states, the same at any moment of the step."""

    def __post_init__(self) -> None:
        setting = self.setting
        state = setting.state
        self._places: Held = tuple(range(len(self.home)))
        self._flight = in_flight(setting.actions, self.coord)
        self._all_sizes = self._sizes(self._places)
        self.held = states(setting, self._all_sizes, self.on_cpu)
        self._shard = self.held.shard if self.held.standing else 0
        # Weights are gathered or fetched if they are sharded over several ranks or offloaded.
        self._gathers = state.zero_stage == 3 and (
            setting.mesh.dp > 1 or (state.offload_param != "none" and not self.on_cpu)
        )
        tokens = setting.flow.micro_batch * setting.workload.seq
        self._always = setting.num_microbatches * tokens // setting.mesh.cp * TOKEN_BYTES
        self._always += sum([stage.resident_bytes for stage in self.stages])
        self._logits = [stage.logits_bytes for stage in self.stages]
        self._saved = [stage.saved_bytes for stage in self.stages]
        self._place_of = {stage: place for place, stage in enumerate(self.home)}
        self._posted = self._posted_bytes()

    @property
    def waiting_on_host(self) -> int:
        """Bytes of activations that wait on the host at the fullest moment."""
        sizes = [stage.host_bytes for stage in self.stages]
        return int(max(sum(map(mul, counts, sizes)) for counts in self._flight))

    def moments(self) -> Iterator[Moment]:
        """Yield every candidate for the fullest moment of a step, as bytes by part."""
        held = self.held
        always = self._always
        reduced = held.buffers + held.bucket + held.reducing
        yield 0, held.shard, always, 0, held.buffers + held.stepping
        own: tuple[Gradients | None, ...] = (None,) * len(self.home)
        if held.unreduced > 0 and len(self.home) > 1:
            own = gradients(self.setting.actions, self.coord)
        else:
            yield 0, held.unreduced + held.shard, always, 0, reduced
        coming: Windows | None = None
        if self.setting.state.holds_weights:
            coming = windows_of(self.setting.actions, self.setting.state.weights, self.coord)
        # A search stops at the first moment that does not fit, which is most often a pass.
        for place, its in enumerate(own):
            if coming:
                gathered = self._gathered_by_program(coming, place)
            else:
                gathered = self._gathered_by_hooks(place)
            yield from self._stage_moments(place, gathered, its)
            if its:
                body, logits = self._activations(its.last)
                gradient_bytes = self._unreduced_bytes((*its.left, place)) + held.shard
                yield gathered.reducing, gradient_bytes, body, logits, reduced
        if coming:
            yield from self._arrival_moments(coming)

    def _arrival_moments(self, coming: Windows) -> Iterator[Moment]:
        """Yield the moments at which weights that the program gathers arrive.

        A layer's weights arrive in one buffer and are copied out of it, except with dp = 1.
        """
        held = self.held
        for arrival in coming.arrivals:
            body, logits = self._activations(arrival.flight)
            gradient_bytes = self._shard if arrival.forward or held.unreduced else held.shard
            gathered = self._gathered(arrival.held)
            if self.setting.mesh.dp > 1:
                copied = self._sizes((arrival.place,)).copied
                gathered += copied * self.setting.workload.bytes_per_element
            yield gathered, gradient_bytes, body, logits, held.buffers

    def _gathered_by_program(self, coming: Windows, place: int) -> GatheredBytes:
        """Return the bytes of gathered weights in a stage's passes if the program gathers."""
        forward = max(map(self._gathered, coming.forward[place]))
        backward = max(map(self._gathered, coming.backward[place]))
        others = {tuple(p for p in held if p != place) for held in coming.backward[place]}
        return GatheredBytes(forward, backward, forward, max(map(self._gathered, others)))

    def _gathered_by_hooks(self, place: int) -> GatheredBytes:
        """Return the bytes of gathered weights in a stage's passes if DeepSpeed's hooks gather.

        The hooks prefetch along the trace of each pass (engine/quirks/tracing.py). Soon the stage
        is gathered up to the limit of live parameters; it is released module by module. Parameters
        that are too small to be sharded stay, for all stages. Recomputed products use
        their weights twice in a backward.
        """
        if not self._gathers:
            return GatheredBytes(0, 0, 0)
        recompute = self.setting.flow.recompute
        s = self._sizes((place,))
        element = self.setting.workload.bytes_per_element
        buffers = self.setting.workload.buffers
        one = (s.module + self._all_sizes.small) * element
        stage_bytes = self._gathered((place,))
        ahead = buffers.stage3_prefetch_bucket_size
        if not ahead:
            again = 0
            if recompute.full_layers or "mlp" in recompute.parts:
                again = min(s.layer, buffers.stage3_max_reuse_distance) * element
            return GatheredBytes(one, min(one + again, stage_bytes + s.module * element), one)
        live = min(stage_bytes, max(one, buffers.stage3_max_live_parameters * element))
        # Prefetched weights arrive in one buffer and are copied out of it.
        copied = min(s.params - s.small, ahead + s.largest) * element
        return GatheredBytes(live, live + copied, live + copied)

    def _gathered(self, places: Held) -> int:
        """Return the bytes of some stages' gathered weights, plus all stages' unsharded ones."""
        if not self._gathers:
            return 0
        elements = self._all_sizes.small
        if places:
            own = self._sizes(places)
            elements += own.params - own.small
        return elements * self.setting.workload.bytes_per_element

    def _stage_moments(
        self, place: int, weights: GatheredBytes, own: Gradients | None
    ) -> Iterator[Moment]:
        """Yield the moments of one stage's passes.

        `own` is the lifetime of the stage's gradients if the rank has several stages whose
        gradients are reduced once per step.
        """
        held = self.held
        s = self.stages[place]
        once = self.held.unreduced > 0
        buffers = held.buffers if once or held.standing else held.buffers + held.bucket
        counts = self._fullest_counts(place)
        saved = self._activations(counts)
        # True if some forward runs after a backward, and so beside its gradients.
        alternates = sum(counts) < self.setting.num_microbatches * len(self.stages)
        before = self._shard
        if alternates and own:
            before += max(map(self._unreduced_bytes, own.forward))
        elif alternates:
            before += held.unreduced if once else held.shard - self._shard
        yield self._moment(saved, s.ending, weights.forward, before, held.buffers)
        beginning = BackwardMoment(s.saved_bytes, 0, -s.logits_bytes, 0)
        yield self._moment(saved, beginning, weights.beginning, before, held.buffers)
        if once and not alternates:
            # The first backward creates gradients while it frees activations.
            gradient_bytes = self._shard + s.first.gradients_bytes
            first = saved
            if own:
                gradient_bytes += self._unreduced_bytes(own.beside)
                first = self._activations(own.first)
            yield self._moment(first, s.first, weights.backward, gradient_bytes, buffers)
        else:
            yield self._moment(saved, s.later, weights.backward, before, buffers)
        if not once:
            # The reduction of the first full bucket creates the shards if there are none.
            full = bisect_left(s.produced, self.setting.workload.buffers.reduce_bucket_size)
            at_full = s.backwards[min(full, len(s.backwards) - 1)]
            reducing = buffers + held.reducing
            yield self._moment(saved, at_full, weights.backward, held.shard, reducing)

    def _sizes(self, places: Held) -> WeightSizes:
        """Return the sizes of the weights in some of the coordinate's stages."""
        held = tuple([self.layers[p] for p in places])
        return sizes(held, self.setting.mesh.tp, self.setting.persistence, self.setting.flow.ep)

    def _unreduced_bytes(self, places: Held) -> int:
        """Return the bytes of the unreduced gradients of some stages."""
        if not places:
            return 0
        params = self._sizes(tuple(sorted(places))).params
        return params * self.setting.workload.software.gradient_bytes

    def _activations(self, counts: MicrobatchCounts) -> tuple[int, int]:
        """Return the bytes of `counts` microbatches in flight: all but logits, and logits."""
        logits = sum(map(mul, counts, self._logits))
        saved = sum(map(mul, counts, self._saved)) - logits
        return self._always + saved + self._passing(counts), logits

    def _moment(
        self, saved: tuple[int, int], m: BackwardMoment, gathered: int, grads: int, buffers: int
    ) -> Moment:
        """Return the moment of a pass beside the `_activations` that are saved for microbatches."""
        body, logits = saved
        body += m.working_bytes - m.freed_bytes - m.logits_bytes
        return gathered, grads, body, logits + m.logits_bytes, buffers

    def _fullest_counts(self, place: int) -> MicrobatchCounts:
        """Return the fullest counts of microbatches in flight with at least one at `place`."""
        if len(self._flight) == 1:
            return self._flight[0]
        # A stage's backward needs a microbatch of its own in flight.
        possible = [counts for counts in self._flight if counts[place]]
        return max(possible, key=lambda counts: sum(map(mul, counts, self._saved)))

    def _posted_bytes(self) -> int:
        """Return the bytes of messages that other ranks' stages exchange with these at any moment.

        A receive is posted one compute ahead of its use.
        """
        total = 0
        for index, stage in zip(self.home, self.stages, strict=True):
            messages = 0
            if self._is_elsewhere(index - 1):
                messages += 1
            if self._is_elsewhere(index + 1):
                # On a device a sent message is freed when the next one is sent.
                messages += 1 if self.on_cpu else 2
            total += messages * stage.hidden_bytes
        return total

    def _is_elsewhere(self, stage: int) -> bool:
        """Return True if another rank has the stage."""
        return 0 <= stage < self.setting.num_stages and stage not in self._place_of

    def _passing(self, counts: MicrobatchCounts) -> int:
        """Return the bytes of messages between stages beside microbatches in flight."""
        total = self._posted
        if not self.on_cpu:
            return total
        for index, stage, count in zip(self.home, self.stages, counts, strict=True):
            if self._is_elsewhere(index - 1):
                # gloo does not report that a message has left: gradients stay until the step ends.
                total += (self.setting.num_microbatches - count) * stage.hidden_bytes
            if index + 1 in self._place_of:
                # The output of a stage is the input of the next one, and was counted with both.
                after = counts[self._place_of[index + 1]]
                total -= min(count, after) * stage.hidden_bytes
        return total
