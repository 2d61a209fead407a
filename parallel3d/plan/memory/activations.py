"""Bytes of activations and new gradients that a stage holds on one rank."""

from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from parallel3d.model.spec import Recompute, Shape
from parallel3d.plan.layers.placement import StageLayers, cost_of
from parallel3d.plan.layers.weight_counts import weights_of_kind


class BackwardMoment(NamedTuple):
    """Bytes at one moment of a backward pass, relative to the moment it begins.

    `freed_bytes`: of activations already freed. `working_bytes`: of the temporaries of the layer at
    work. `logits_bytes`: held by the model's last layer, more or less. `gradients_bytes`: of the
    gradients that exist by then.
    """

    freed_bytes: int
    working_bytes: int
    logits_bytes: int
    gradients_bytes: int

    @property
    def total(self) -> int:
        """Bytes beyond the activations that were saved when the backward began."""
        return self.working_bytes + self.gradients_bytes - self.freed_bytes


class StageActivations(NamedTuple):
    """Bytes of one stage's activations on one tensor-parallel rank, and its fullest moments.

    `saved_bytes`: left in flight by one microbatch; `logits_bytes`: the part of them in the model's
    last layer. `resident_bytes`: present at any time. `hidden_bytes`: passed between stages.
    `first`: the fullest moment of a step's first backward, in which gradients come into being;
    `later`: of all other backwards, gradients left out; `ending`: of the end of a forward.
    `produced` and `backwards`, layer by layer from the last: the elements whose gradients exist
    after the layer's backward, and that moment.
    """

    saved_bytes: int
    logits_bytes: int
    resident_bytes: int
    hidden_bytes: int
    first: BackwardMoment
    later: BackwardMoment
    ending: BackwardMoment
    produced: tuple[int, ...]
    backwards: tuple[BackwardMoment, ...]


@lru_cache(maxsize=65536)
def stage(
    part: StageLayers, batch: int, seq: int, tp: int, sequence_parallel: bool, recompute: Recompute,
    hidden_size: int, element: int, gradient: int, classic: bool, on_cpu: bool,
) -> StageActivations:  # fmt: skip
    """Bytes of a stage's activations; a number has `element` bytes, a gradient `gradient`."""
    model, shape = part.model, Shape(batch, seq)
    hidden = shape.tokens * hidden_size * element // (tp if sequence_parallel else 1)
    kept = {}
    for kind in set(part.kinds):
        cost = cost_of(model, kind, shape, tp, sequence_parallel, recompute)
        held = (cost.saved, cost.working, cost.resident)
        num_bytes = [k.bytes(element, classic, not on_cpu) for k in held]
        kept[kind] = *num_bytes, bool(cost.recomputed.matmuls)
    freed = freed_logits = summed = 0
    if on_cpu and not part.ends:
        freed = hidden  # gloo does not say that a message has left: each stage's output stays
    narrow = element < gradient
    firsts: list[BackwardMoment] = []
    laters: list[BackwardMoment] = []
    moments: list[BackwardMoment] = []
    produced: list[int] = []
    for kind in reversed(part.kinds):
        saved, working, _, computes_again = kept[kind]
        weights = weights_of_kind(model, kind, tp)
        largest = weights.largest
        summed += weights.params
        logits = working if part.ends and not produced else -freed_logits
        # A gradient comes out of autograd in the training type and is added up in `gradient`; the
        # head's comes as it is added up where its logits are computed again, part by part.
        in_parts = part.ends and not produced and computes_again
        fresh = working + (element * largest if narrow and not in_parts else 0)
        firsts.append(BackwardMoment(freed, fresh, logits, gradient * summed))
        laters.append(BackwardMoment(freed, fresh + gradient * largest, logits, 0))
        moments.append(BackwardMoment(freed, working, logits, 0))
        produced.append(summed)
        if part.ends and len(produced) == 1:
            freed_logits = saved
        freed += saved
    saved, working, *_ = kept[part.kinds[-1]]
    ending = 0 if on_cpu or part.ends else hidden  # its output, until it was sent
    return StageActivations(
        freed, saved if part.ends else 0, sum(kept[kind][2] for kind in part.kinds), hidden,
        max(firsts, key=attrgetter("total")), max(laters, key=attrgetter("total")),
        BackwardMoment(0, working + ending, working if part.ends else 0, 0), tuple(produced),
        tuple(moments),
    )  # fmt: skip
