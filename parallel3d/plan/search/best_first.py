"""Best-first search for the fastest plans of a request, without evaluating every plan.

1. A heap orders nodes by a lower bound on the seconds of a step. It starts with one node per mesh,
   micro batch and recomputation.
2. The first node is split: into schedules and ZeRO stages, then into the offloads that fit. A
   setting that remains is simulated and goes back with its exact seconds.
3. A simulated plan at the top of the heap is the fastest that is left.

A test compares the rows with an exhaustive search.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count, islice
from typing import NamedTuple

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.model.recompute import FULL, NONE, Recompute
from parallel3d.plan.layers.placement import blocks_in_stages
from parallel3d.plan.memory.peak import least_in_flight, least_on_first
from parallel3d.plan.search import candidates
from parallel3d.plan.search.candidates import setting_of
from parallel3d.plan.search.plans import Plan, Request
from parallel3d.plan.search.remedy import all_fit, evaluate, room_of, with_fewest_in_full, worst
from parallel3d.plan.setting import PLAIN, Choices, Flow, Setting, ZeroState
from parallel3d.plan.time.operators import curves_for
from parallel3d.plan.time.step import costs_of, lower_bound, step_time
from parallel3d.schedule.sharding import Weights

TOO_LARGE = 5  # the most plans that do not fit
OFFLOAD_GAIN = 0.1
"""The share of a step that an offload must save: the figures of hosts are assumed, not measured."""
CP_GAIN = 0.03
"""The share of a step that context parallelism must save: less is within the planner's error."""
COPIES_GAIN = 0.03
"""The share of a step that copies of ZeRO's shards must save, for the same reason."""
_OF_A_MESH = 4  # settings of a mesh that are compared to find the one with the least memory
_SAFE = 1 - 1e-9  # a bound and a simulation may be rounded differently


@dataclass(frozen=True)
class Ranking:
    """The outcome of a search: plans that fit, fastest first, and faster plans that do not."""

    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...]
    least: Plan | None = None
    """If nothing fits, the plan that needs the least memory."""

    @property
    def rows(self) -> tuple[Plan, ...]:
        """All plans of the search, in the order of the table."""
        return self.plans + self.too_large


def search(request: Request, rows: int = 20, per_mesh: int | None = None) -> Ranking:
    """Return the `rows` fastest plans that fit, at most `per_mesh` of one mesh.

    The default of `per_mesh` leaves room for all meshes. A plan that fits without an offload is not
    listed with it, and one with an offload comes behind those that take less than OFFLOAD_GAIN
    longer; one with cp (CP_GAIN) or copies of shards (COPIES_GAIN) likewise. Tensor parallelism
    across nodes counts only if nothing else fits. Raises ConfigError if no mesh is possible or the
    hardware lacks a figure.
    """
    candidates.check_fixed(request.fixed)
    candidates.refuse_empty(request)
    all_meshes = tuple(candidates.meshes(request))
    node = request.hardware.sharing(request.devices)
    # Its objects have no cycles, and Python would look for some in two fifths of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        for meshes in filter(None, (tuple(m for m in all_meshes if m.tp <= node), all_meshes)):
            most = per_mesh or max(1, rows // len(meshes))
            plans = tuple(islice(_Search(request, meshes).best_first(most), rows))
            if plans:
                faster = _too_large(request, meshes, plans[0].time.seconds)
                return Ranking(plans, tuple(evaluate(request, setting) for setting in faster))
        small = [evaluate(request, setting) for setting in _leanest(request, all_meshes)]
        return Ranking((), tuple(small), small[0])
    finally:
        if collects:
            gc.enable()


def _too_large(
    request: Request, meshes: tuple[MeshSizes, ...], seconds: float
) -> Iterator[Setting]:
    """Yield settings that take less than `seconds` and fit only in twice a device's memory.

    They are the fastest of TOO_LARGE meshes, at ZeRO-1 where the request does not fix the stage.
    """
    fixed = {"zero_stage": 1, "gradient_reduction": "per_step", "offload_optimizer": "none"}
    simple = replace(request, fixed={**fixed, **request.fixed})
    for plan in islice(_Search(simple, meshes, times=2).best_first(1), TOO_LARGE):
        if plan.time.seconds < seconds and not all_fit(plan.setting, request.hardware):
            yield plan.setting


def _leanest(request: Request, meshes: tuple[MeshSizes, ...]) -> list[Setting]:
    """Return the settings with the least memory of TOO_LARGE meshes, the smallest first.

    A mesh's is found among the _OF_A_MESH whose first rank needs least.
    """
    smallest = request.fixed.get("micro_batch", 1)

    def size(choices: Choices) -> tuple[int, Choices]:
        setting = setting_of(request, *choices)
        return least_on_first(setting, request.hardware)[0], choices

    def total(setting: Setting) -> int:
        return worst(setting, request.hardware).total

    leanest = []
    for mesh in meshes:
        flows = [f for f in candidates.flows(request, mesh) if f.micro_batch == smallest]
        near = nsmallest(_OF_A_MESH, candidates.choices(request, flows), key=size)
        if near:
            leanest.append(min((setting_of(request, *choices) for choices in near), key=total))
    return nsmallest(TOO_LARGE, leanest, key=total)


class Candidate(NamedTuple):
    """A setting whose first rank may fit; its other ranks are looked at when it is the fastest.

    - `activations`: a lower bound on the bytes in flight on its first rank.
    """

    setting: Setting
    activations: int


class _Search:
    """A search in progress, on devices with `times` their memory."""

    def __init__(self, request: Request, meshes: tuple[MeshSizes, ...], times: int = 1) -> None:
        self.request = request
        self.hardware = request.hardware
        self.curves = curves_for(request.hardware)
        device, host = room_of(request.hardware)
        self.room = times * device, host  # bytes
        # The time to accumulate gradients depends on the ZeRO stage; floors leave it out.
        software = replace(request.workload.software, gradient_bytes=0)
        self._floors_workload = replace(request.workload, software=software)
        flows = [flow for mesh in meshes for flow in candidates.flows(request, mesh)]
        self.floors = sorted((self._floor(flow), flow) for flow in flows)

    def best_first(self, per_mesh: int) -> Iterator[Plan]:
        """Yield the plans that fit, fastest first; among equally fast plans the simplest first."""
        serial = count()
        num_plans = Counter[MeshSizes]()
        heap: list[
            tuple[float, tuple[object, ...], int, MeshSizes, Flow | Candidate | Setting | Plan]
        ] = []
        for floor, flow in self.floors:
            heap.append((floor * self._way(flow), (), next(serial), flow.mesh, flow))
        heapify(heap)
        while heap:
            *_, mesh, node = heappop(heap)
            if num_plans[mesh] >= per_mesh:
                continue
            if isinstance(node, Plan):
                num_plans[mesh] += 1
                yield node
                continue
            for bound, part in self._split(node):
                rank = simplicity(part) if isinstance(part, Plan) else ()
                heappush(heap, (bound, rank, next(serial), mesh, part))

    def _split(
        self, node: Flow | Candidate | Setting
    ) -> Iterator[tuple[float, Candidate | Setting | Plan]]:
        """Yield the nodes that a node is split into, each with its lower bound in seconds."""
        if isinstance(node, Flow):
            for order in candidates.orders(self.request, node):
                plain = setting_of(self.request, node, order, PLAIN)
                activations = least_in_flight(plain, self.hardware)
                if activations <= self.room[0]:
                    yield from self._candidates(Candidate(plain, activations), None)
        elif isinstance(node, Candidate):
            settings = (node.setting.gathering(way) for way in self._ways(node.setting.state))
            setting = next((s for s in settings if all_fit(s, self.hardware, self.room)), None)
            if setting is None:
                yield from self._candidates(node, node.setting.state)
                return
            if candidates.opens_recompute(self.request) and setting.flow.recompute == FULL:
                setting = with_fewest_in_full(
                    setting, self.hardware, self.room, self._least_full(setting)
                )
                if setting.flow.recompute == NONE:  # it has its own flow
                    return
            yield self._bound(setting), setting
        else:
            time = step_time(node, self.hardware, self.curves)
            plan = Plan(self.request, node, worst(node, self.hardware), time)
            yield float(f"{time.seconds * self._handicap(node):.9g}"), plan

    def _candidates(
        self, like: Candidate, without: ZeroState | None
    ) -> Iterator[tuple[float, Candidate]]:
        """Yield candidates with the states that count if the one `without` does not fit."""
        flow, order, _ = like.setting.choices
        for state in candidates.fallbacks(self.request, flow.mesh)[without]:
            if not candidates.go_together(flow, order, state):
                continue
            lean = state._replace(weights=self._ways(state)[-1])
            leanest = setting_of(self.request, flow, order, lean)
            device, host = least_on_first(leanest, self.hardware, like.activations)
            if device > self.room[0] or host > self.room[1]:
                yield from self._candidates(like, state)
                continue
            fastest = setting = setting_of(self.request, flow, order, state)
            if flow.recompute == FULL:
                fewest = Recompute(full_layers=max(1, self._least_full(leanest)))
                fastest = setting.recomputing(fewest)
            yield self._bound(fastest), Candidate(setting, like.activations)

    def _ways(self, state: ZeroState) -> tuple[Weights, ...]:
        """Return how long a state's weights may stay gathered, fastest first."""
        return candidates.ways(self.request, state.zero_stage, state.offload_param)

    def _handicap(self, setting: Setting) -> float:
        """Return the factor on a plan's seconds by which plans are ordered: 1 for simple ones."""
        factor = 1.0
        # If host and device are the same cores, an offload may be faster than none.
        if setting.state.num_offloads and self.hardware.cores is None:
            factor *= 1 + OFFLOAD_GAIN
        if setting.state.copies > 1:
            factor *= 1 + COPIES_GAIN
        if setting.mesh.cp > 1:
            factor *= 1 + CP_GAIN
        return factor

    def _least_full(self, setting: Setting) -> int:
        """Return a lower bound on the layers of a stage that must be recomputed to fit."""
        full, _ = least_on_first(setting, self.hardware)
        without, _ = least_on_first(setting.recomputing(NONE), self.hardware)
        over = without - self.room[0]
        return max(0, over * min(blocks_in_stages(setting)) // max(1, without - full))

    def _bound(self, setting: Setting) -> float:
        """Return a lower bound on the seconds that a setting is ordered by."""
        seconds = lower_bound(setting, self.hardware, self.curves)
        return _SAFE * seconds * self._handicap(setting)

    def _floor(self, flow: Flow) -> float:
        """Return a flow's lower bound: the seconds of all layers' passes divided by the ranks.

        Full recomputation counts as none, because the planner may need it in few layers.
        """
        if flow.recompute == FULL:
            flow = flow._replace(recompute=NONE)
        request = self.request
        mesh = flow.mesh
        alone = flow._replace(mesh=mesh._replace(pp=1, dp=mesh.dp * mesh.pp))
        setting = Setting(self._floors_workload, 1, alone)
        costs = costs_of(setting, self.hardware, self.curves)
        seconds = _SAFE * (sum(costs.forward[0]) + sum(costs.backward[0]))
        return seconds * (request.global_batch_size / mesh.dp / flow.micro_batch / mesh.pp)

    def _way(self, flow: Flow) -> float:
        """Return a factor on a flow's floor if it has fewer microbatches than pipeline ranks.

        One of them goes through all stages and back, with half of the backwards if they are split.
        """
        share = flow.mesh.pp * flow.mesh.dp * flow.micro_batch / self.request.global_batch_size
        return max(1.0, share if flow.recompute.full_layers else share / 2)


def simplicity(plan: Plan) -> tuple[object, ...]:
    """Return the sort key of equally fast plans: fewer stages first, then less offload, etc."""
    flow, order, state = plan.setting.choices
    return (
        plan.setting.num_stages,
        state,
        flow.mesh.cp,
        flow.mesh.tp,
        flow.sequence_parallel,
        flow.recompute.strength,
        plan.memory.total,
        order,
        flow.micro_batch,
    )
