"""Memory of the other programs whose published runs the planner is checked against.

What a program holds besides is in a `Holds`; activations are those of LayerCost, in flight as
the schedule has them. Formulas: ZeRO, arXiv:1910.02054, section 3.1; activations, arXiv:2205.05198.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from parallel3d.config.hardware import Hardware
from parallel3d.model.optimizers import state_bytes
from parallel3d.model.recompute import FULL
from parallel3d.model.spec import KeptMemory, LayerCost, Shape
from parallel3d.plan.layers.placement import LayerKinds, cost_of, in_flight, model_of, stages_on
from parallel3d.plan.memory.peak import margin
from parallel3d.plan.setting import Setting

Parts = dict[str, int]


@dataclass(frozen=True)
class Holds:
    """Bytes that a program holds on a device besides activations; facts, as in Software.

    `weight`, `states`, `bucket`: for each parameter; ZeRO divides the optimizer's `states` (and at
    stage 3 weights and gradients), a `bucket` is a data-parallel reduction's own copy. Under ZeRO,
    `partition`: more for each parameter of a rank's part, `fixed`: buffers whatever the model.
    `logit`: the most for a logit while the loss is computed;
    `logit_tp`: under tensor parallelism, where that differs. `placement`: how layers come to
    stages, see `stages_of`. `reports`: which rank's memory its reports give,
    `of_device`: as the driver sees it, rather than what torch's allocator reserved.
    """

    weight: int = 2
    states: int = state_bytes("adamw")
    bucket: int = 0
    partition: int = 0
    fixed: int = 0
    logit: int = 10
    logit_tp: int | None = None
    placement: Literal["equal", "greedy"] = "equal"
    reports: Literal["first", "fullest"] = "fullest"
    of_device: bool = False


def parts_of(setting: Setting, holds: Holds, hardware: Hardware | None = None) -> tuple[Parts, ...]:
    """Bytes on a device of each pipeline coordinate, by the names of the planner's PARTS."""
    model = model_of(setting.workload.layers)
    cuts = stages_of(model, setting.num_stages, holds.placement, setting.workload.seq)
    order = setting.actions
    if order.pp == 1:
        order = order._replace(schedule="one_f_one_b")  # none keeps more than one
    homes = stages_on(order.schedule, order.pp, order.stages_per_rank)
    found = []
    for coord, home in enumerate(homes):
        stages = tuple(cuts[stage] for stage in home)
        layers = tuple(model.kind_of[i] for stage in stages for i in stage)
        passing = [_pass(setting, model, stage) for stage in stages]
        counts = max(
            in_flight(order, coord),
            key=lambda c: sum(n * p.saved for n, p in zip(c, passing, strict=True)),
        )
        parts = _states(setting, holds, model, layers)
        parts["activations"] = sum(n * p.saved for n, p in zip(counts, passing, strict=True))
        logits = holds.logit_tp if setting.mesh.tp > 1 and holds.logit_tp else holds.logit
        logits *= max(p.logits for p in passing)
        working = max(p.working for p in passing)
        # The loss comes before the first block's backward: whichever of the two takes more.
        parts["logits"], extra = (logits, 0) if logits > working else (0, working)
        parts["activations"] += extra
        parts["margin"] = margin(sum(parts.values()), hardware)
        found.append(parts)
    return tuple(found)


class _Pass(NamedTuple):
    """Of one microbatch in one stage: bytes it leaves, the most besides, and its logits."""

    saved: int
    working: int
    logits: int


def _pass(setting: Setting, model: LayerKinds, layers: range) -> _Pass:
    flow = setting.flow
    shape = Shape(flow.micro_batch, -(-setting.workload.seq // flow.mesh.cp))
    element = setting.workload.bytes_per_element
    classic = setting.workload.software.attention == "classic"
    saved = working = logits = 0
    for i in layers:
        kind = model.kind_of[i]
        cost = cost_of(model, kind, shape, flow.mesh.tp, flow.sequence_parallel, flow.recompute)
        if i == len(model.layers) - 1:
            product = cost.forward.matmuls[0]
            logits = product.m * product.n
            saved += cost.saved.bytes(element) - logits * element  # counted with the loss
        else:
            kept = cost.saved + _kept_products(setting, cost)
            saved += kept.bytes(element, classic)
            working = max(working, cost.working.bytes(element, classic))
    return _Pass(saved, working, logits)


def _kept_products(setting: Setting, cost: LayerCost) -> KeptMemory:
    """What "full" recomputation of only a share of the products keeps: the others' results."""
    attention = cost.forward.attention
    if setting.flow.recompute != FULL or setting.recomputed_share == 1 or attention is None:
        return KeptMemory()
    results = sum(m.m * m.n for m in cost.forward.matmuls)
    attended = attention.batch * attention.seq * attention.heads * attention.head_size
    return KeptMemory(round((1 - setting.recomputed_share) * results) + attended)


def _states(setting: Setting, holds: Holds, model: LayerKinds, layers: tuple[int, ...]) -> Parts:
    sizes = [_elements(model, kind, setting.mesh.tp) for kind in layers]
    elements = sum(sizes)
    shards = setting.shards
    first = model.kind_of[0]
    last = model.kind_of[-1]
    if first in layers and last in layers:
        elements -= _tied(model, last, setting.mesh.tp)
    sharded = -(-elements // shards)
    owned = sharded if setting.state.zero_stage else elements
    gradient = setting.workload.software.gradient_bytes
    states = holds.states
    fixed = 0
    if setting.state.zero_stage:
        states = states + holds.partition
        fixed = holds.fixed
    parts = {
        "weights": holds.weight * (sharded if setting.state.zero_stage == 3 else elements),
        "gathered": 0,
        "gradients": gradient * elements,
        "optimizer": 0 if setting.state.offload_optimizer != "none" else states * owned,
        "activations": 0,
        "logits": 0,
        "buffers": fixed + (holds.bucket * elements if shards > 1 else 0),
        "margin": 0,
    }
    if setting.state.zero_stage == 3:
        ends = sum(_elements(model, k, setting.mesh.tp) for k in {first, last} & set(layers))
        blocks = [
            size for kind, size in zip(layers, sizes, strict=True) if kind not in (first, last)
        ]
        if setting.mesh.pp > 1 or setting.state.holds_weights:
            # In a pipeline weights stay gathered, and gradients whole, from first to last pass.
            parts["gathered"] = setting.workload.bytes_per_element * elements
        else:
            # The group of embedding and head, a block, and the next one that is on its way.
            gathered = ends + 2 * max(blocks, default=0)
            parts["gathered"] = setting.workload.bytes_per_element * gathered
            parts["gradients"] = gradient * sharded
    return parts


@lru_cache(maxsize=4096)
def stages_of(model: LayerKinds, num_stages: int, placement: str, seq: int) -> tuple[range, ...]:
    """The layers of each stage as the program places them.

    "equal": equally many blocks, earlier stages one more where they do not divide, as Megatron-LM,
    DeepSpeed's "type:transformer" and torchtitan have it. "greedy": the block that exceeds a
    stage's share of the cost is the stage's last, as in nanotron (models/base.py).
    """
    count = len(model.layers)
    if placement == "equal":
        each, more = divmod(count - 2, num_stages)
        ends = [1 + each * (s + 1) + min(s + 1, more) for s in range(num_stages)]
        ends[-1] = count
    else:
        costs = [cost_of(model, k, Shape(1, seq)).forward_flops for k in model.kind_of]
        share = sum(costs) / num_stages
        total = 0
        ends = []
        for i, cost in enumerate(costs):
            total += cost
            if total > share * (len(ends) + 1) and len(ends) < num_stages - 1:
                ends.append(i + 1)
        ends += [count] * (num_stages - len(ends))
    starts = [0, *ends[:-1]]
    return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))


@lru_cache(maxsize=4096)
def _elements(model: LayerKinds, kind: int, tp: int) -> int:
    """Parameters of a layer on one tp rank."""
    params = model.kinds[kind].params
    return sum(p.elements({"tensor": tp}) for p in params)


def _tied(model: LayerKinds, kind: int, tp: int) -> int:
    """Elements of a layer's parameters that another layer shares, so that they exist once."""
    names = {name for name, _ in model.kinds[kind].tied}
    return sum(p.elements({"tensor": tp}) for p in model.kinds[kind].params if p.name in names)
