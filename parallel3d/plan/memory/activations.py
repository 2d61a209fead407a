"""Bytes of one stage's activations and new gradients on one rank."""

from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from parallel3d.model.recompute import FULL, Recompute
from parallel3d.plan.layers.placement import StageLayers, cost_of, recompute_of
from parallel3d.plan.layers.weight_counts import weights_of_kind
from parallel3d.plan.memory.states import page_locked
from parallel3d.plan.setting import RankShare

GATHERED = 3
"""Copies of all cp ranks' keys and values in a backward: themselves, their gradients, and these in
the order of the ranks."""


class BackwardMoment(NamedTuple):
    """Bytes at one moment of a backward pass, relative to the moment it begins.

    - `freed_bytes`: activations that are already freed.
    - `working_bytes`: temporaries of the current layer.
    - `logits_bytes`: change in the bytes of the model's last layer; may be negative.
    - `gradients_bytes`: gradients that exist by then.
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

    - `saved_bytes`: left in flight by one microbatch.
    - `host_bytes`: left on the host by one microbatch.
    - `logits_bytes`: the part of them in the model's last layer.
    - `resident_bytes`: present at any time.
    - `hidden_bytes`: passed between stages.
    - `first`: the fullest moment of a step's first backward, which creates the gradients.
    - `later`: the fullest moment of all other backwards, without gradients.
    - `ending`: the end of a forward.
    - `produced`, `backwards` [layers, last first]: the elements whose gradients exist after the
      layer's backward, and the moment of that backward.
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
    host_bytes: int


@lru_cache(maxsize=65536)
def stage_activations(
    part: StageLayers,
    own: RankShare,
    recompute: Recompute,
    gradient: int,
    classic: bool,
    on_cpu: bool,
) -> StageActivations:
    """Return the bytes of a stage's activations.

    - `gradient`: bytes of one accumulated gradient element.
    - `classic`: True if the attention writes its scores to memory.
    - `on_cpu`: True if the devices are processes on a machine's cores.
    """
    model = part.model
    workload = own.workload
    element = workload.bytes_per_element
    on_host = workload.offload_activations and not on_cpu  # cores have no other memory
    tokens = own.shape.tokens
    hidden = own.hidden_bytes
    by_kind = {}
    moved_bytes = 0
    layers = [*zip(part.kinds, recompute_of(part, recompute), strict=True)]
    for layer in set(layers):
        cost = cost_of(model, layer[0], own.shape, own.tp, own.sequence_parallel, layer[1])
        held = (cost.saved, cost.working, cost.resident)
        saved, working, *others = [k.bytes(element, classic, not on_cpu) for k in held]
        if own.cp > 1 and cost.forward.attention:
            working += GATHERED * own.cp * cost.forward.attention.key_elements * element
        if own.ep > 1:
            # What comes back from other ranks is kept; in a backward so much leaves and arrives.
            rows = model.kinds[layer[0]].rows_per_token * tokens * workload.hidden_size * element
            products = (m for m in cost.forward.matmuls if m.batch > 1)
            more = sum(m.batch * m.m * (m.k + m.n) for m in products) * element
            # The additional inputs and outputs of its experts.
            more = round((workload.ep_imbalance - 1) * more)
            if layer[1] != FULL:
                saved += more + rows
            working += 2 * rows + more
        moved = saved if on_host and layer[0] not in model.ends else 0
        # On its way back, and of the layer before it.
        by_kind[layer] = saved - moved, working + 2 * moved, *others, bool(cost.recomputed.matmuls)
        moved_bytes += moved * layers.count(layer)
    freed = freed_logits = summed = 0
    if on_cpu and not part.ends:
        freed = hidden  # gloo does not report that a message has left: each stage's output stays
    narrow = element < gradient
    backwards: list[tuple[int, BackwardMoment, BackwardMoment, BackwardMoment]] = []
    for layer in reversed(layers):
        saved, working, _, computes_again = by_kind[layer]
        weights = weights_of_kind(model, layer[0], own.tp, 0, own.ep)
        largest = weights.largest
        summed += weights.params
        logits = working if part.ends and not backwards else -freed_logits
        # Autograd returns a gradient in the training type, which is then accumulated in `gradient`.
        # With recomputed logits the head's is accumulated part by part, without that copy.
        in_parts = part.ends and not backwards and computes_again
        fresh = working + (element * largest if narrow and not in_parts else 0)
        backwards.append(
            (
                summed,
                BackwardMoment(freed, fresh, logits, gradient * summed),
                BackwardMoment(freed, fresh + gradient * largest, logits, 0),
                BackwardMoment(freed, working, logits, 0),
            )
        )
        if part.ends and len(backwards) == 1:
            freed_logits = saved
        freed += saved
    if on_host and part.kinds[0] != model.ends[0]:  # the gradient of its input is still to come
        freed = freed + hidden
        moved_bytes = moved_bytes - hidden
    produced, firsts, laters, moments = zip(*backwards, strict=True)
    saved, working, *_ = by_kind[layers[-1]]
    ending = 0 if on_cpu or part.ends else hidden  # the output, until it is sent
    return StageActivations(
        freed,
        saved if part.ends else 0,
        sum(by_kind[layer][2] for layer in layers),
        hidden,
        max(firsts, key=attrgetter("total")),
        max(laters, key=attrgetter("total")),
        BackwardMoment(0, working + ending, working if part.ends else 0, 0),
        produced,
        moments,
        # Each tensor is rounded, and most have the size of the hidden states or a few times that.
        moved_bytes * page_locked(hidden) // hidden,
    )
