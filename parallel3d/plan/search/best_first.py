"""Best-first search for the fastest plans of a request, without evaluating every plan.

A heap orders nodes by a lower bound on the seconds of a step. Its first node is replaced by the
nodes that it stands for, until it is a plan; that plan is the fastest that is left:

1. a mesh with micro batch and recomputation: all schedules;
2. with a schedule: the ZeRO states that fit, without those that a simpler one makes needless;
3. with a ZeRO state: the simulated step.

A test compares the rows with an exhaustive search.
"""

import gc
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import count, islice

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.model.recompute import FULL, NONE, Recompute
from parallel3d.plan.layers.placement import blocks_in_stages
from parallel3d.plan.memory.peak import least_in_flight, peak_of
from parallel3d.plan.memory.room import all_fit, room_of, worst
from parallel3d.plan.request import Request
from parallel3d.plan.search import candidates
from parallel3d.plan.search.candidates import setting_of
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.search.remedy import evaluate
from parallel3d.plan.setting import PLAIN, Flow, Order, Setting, ZeroState
from parallel3d.plan.time.operators import curves_for
from parallel3d.plan.time.step import costs_of, lower_bound, passes_bound, step_time

TOO_LARGE = 5  # the most plans that do not fit
OFFLOAD_GAIN = 0.1
"""The share of a step that an offload must save: the figures of hosts are assumed, not measured."""
DIVISION_GAIN = 0.03
"""The share of a step that context parallelism, or copies of ZeRO's shards, must save: less is
within the planner's error."""
_SAFE = 1 - 1e-8  # plans are ordered by seconds of nine digits


@dataclass(frozen=True)
class Ranking:
    """The outcome of a search: plans that fit, fastest first, and faster plans that do not.

    If nothing fits, the first that does not is the one that needs the least memory.
    """

    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...]

    @property
    def rows(self) -> tuple[Plan, ...]:
        """All plans of the search, in the order of the table."""
        return self.plans + self.too_large


def search(request: Request, rows: int = 20, per_mesh: int | None = None) -> Ranking:
    """Return the `rows` fastest plans that fit, at most `per_mesh` of one mesh.

    The default of `per_mesh` leaves room for all meshes. A plan that fits without an offload is not
    listed with it, and one with an offload comes behind those that take less than OFFLOAD_GAIN
    longer; one with cp or copies of shards likewise (DIVISION_GAIN). The groups of
    `candidates.meshes_in_turn` count only if nothing fits of those before them.
    Raises ConfigError if no mesh is possible or the hardware lacks a figure.
    """
    meshes: list[MeshSizes] = []
    # Its objects have no cycles, and Python would look for some in two fifths of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        for group in candidates.meshes_in_turn(request):
            meshes += group
            most = per_mesh or max(1, rows // len(meshes))
            plans = tuple(islice(_Search(request, group).best_first(most), rows))
            if plans:
                faster = _too_large(request, meshes, plans[0].time.seconds)
                return Ranking(plans, tuple(evaluate(request, setting) for setting in faster))
        small = _leanest(request, meshes)
        return Ranking((), tuple(evaluate(request, setting) for setting in small))
    finally:
        if collects:
            gc.enable()


def _too_large(request: Request, meshes: Sequence[MeshSizes], seconds: float) -> Iterator[Setting]:
    """Yield settings that take less than `seconds` and fit only in twice a device's memory.

    They are the fastest of TOO_LARGE meshes, at ZeRO-1 where the request does not fix the stage.
    """
    fixed = {"zero_stage": 1, "gradient_reduction": "per_step", "offload_optimizer": "none"}
    simple = replace(request, fixed={**fixed, **request.fixed})
    for plan in islice(_Search(simple, meshes, times=2).best_first(1), TOO_LARGE):
        if plan.time.seconds < seconds and not all_fit(plan.setting, request.hardware):
            yield plan.setting


def _leanest(request: Request, meshes: Sequence[MeshSizes]) -> list[Setting]:
    """Return the settings with the least memory of TOO_LARGE meshes, the smallest first.

    A mesh's has the smallest micro batch, the most recomputation, the most divided activations and
    experts, and the first rank that needs least.
    """

    def size(flow: Flow) -> tuple[int, ...]:
        return flow.micro_batch, -flow.recompute.strength, -flow.sequence_parallel, -flow.ep

    def first(setting: Setting) -> int:
        return peak_of(setting, 0, request.hardware).total

    def total(setting: Setting) -> int:
        return worst(setting, request.hardware).total

    leanest = []
    for mesh in meshes:
        for flow in sorted(candidates.flows(request, mesh), key=size):
            choices = candidates.choices(request, [flow])
            if settings := [setting_of(request, *each) for each in choices]:
                leanest.append(min(settings, key=first))
                break  # no schedule that splits backwards runs the first, which recomputes all
    return nsmallest(TOO_LARGE, leanest, key=total)


Bounded = Iterator[tuple[float, "Node"]]  # nodes with lower bounds on their seconds
Node = Callable[[], Bounded] | Plan  # a function returns what its node stands for


class _Search:
    """A search in progress, on devices with `times` their memory."""

    def __init__(self, request: Request, meshes: Sequence[MeshSizes], times: int = 1) -> None:
        self.request = request
        self.meshes = meshes
        self.hardware = request.hardware
        self.curves = curves_for(request.hardware)
        device, host = room_of(request.hardware)
        self.room = times * device, host  # bytes
        # The time to accumulate gradients depends on the ZeRO stage; bounds for all leave it out.
        software = replace(request.workload.software, gradient_bytes=0)
        self._passes = replace(request.workload, software=software)

    def best_first(self, per_mesh: int) -> Iterator[Plan]:
        """Yield the plans that fit, fastest first; among equally fast plans the simplest first."""
        num_plans = Counter[MeshSizes]()
        serial = count()
        heap: list[tuple[float, tuple[object, ...], int, MeshSizes, Node]] = []
        for mesh in self.meshes:
            for flow in candidates.flows(self.request, mesh):
                node = partial(self._schedules, flow)
                heappush(heap, (self.floor(flow), (), next(serial), mesh, node))
        while heap:
            *_, mesh, first = heappop(heap)
            if num_plans[mesh] >= per_mesh:
                continue
            if isinstance(first, Plan):
                num_plans[mesh] += 1
                yield first
                continue
            for bound, part in first():
                rank = simplicity(part) if isinstance(part, Plan) else ()
                heappush(heap, (bound, rank, next(serial), mesh, part))

    def _schedules(self, flow: Flow) -> Bounded:
        for order in candidates.orders(self.request, flow):
            setting = setting_of(self.request, flow, order, PLAIN)
            if least_in_flight(setting, self.hardware) <= self.room[0]:
                yield self.bound_of_passes(setting), partial(self._states, flow, order)

    def _states(self, flow: Flow, order: Order, without: ZeroState | None = None) -> Bounded:
        """Yield the states that count if `without` does not fit."""
        for state, simpler in candidates.states_in_turn(self.request, flow.mesh):
            if simpler == without and candidates.go_together(flow, order, state):
                setting = setting_of(self.request, flow, order, state)
                if flow.recompute == FULL:
                    setting = setting.recomputing(Recompute(full_layers=1))
                yield self._bound(setting), partial(self._fit, flow, order, state)

    def _fit(self, flow: Flow, order: Order, state: ZeroState) -> Bounded:
        setting = self._fitting(flow, order, state)
        if setting is None:
            yield from self._states(flow, order, state)
            return
        if "recompute" not in self.request.fixed and flow.recompute == FULL:
            setting = self._with_fewest_in_full(setting)
            if setting.flow.recompute == NONE:  # it has its own flow
                return
        yield self._bound(setting), partial(self._simulated, setting)

    def _simulated(self, setting: Setting) -> Bounded:
        time = step_time(setting, self.hardware, self.curves)
        plan = Plan(self.request, setting, worst(setting, self.hardware), time)
        yield float(f"{time.seconds * self.handicap(setting):.9g}"), plan

    def _fitting(self, flow: Flow, order: Order, state: ZeroState) -> Setting | None:
        """Return a setting whose weights stay gathered for the longest time that fits, or None."""
        for way in candidates.ways(self.request, state.zero_stage, state.offload_param):
            setting = setting_of(self.request, flow, order, state._replace(weights=way))
            if all_fit(setting, self.hardware, self.room):
                return setting
        return None

    def _with_fewest_in_full(self, setting: Setting) -> Setting:
        """Return a setting with as few layers as fit recomputed in full; "none" if none need be."""

        def fewer(num_layers: int) -> Setting:
            return setting.recomputing(Recompute(full_layers=num_layers))

        def fits(num_layers: int) -> bool:
            return all_fit(fewer(num_layers), self.hardware, self.room)

        all_layers = max(blocks_in_stages(setting))
        enough = bisect_left(range(all_layers), True, key=fits)
        return setting if enough == all_layers else fewer(enough)

    def _bound(self, setting: Setting) -> float:
        seconds = lower_bound(setting, self.hardware, self.curves)
        return _SAFE * seconds * self.handicap(setting)

    def handicap(self, setting: Setting) -> float:
        """Return the factor on a plan's seconds by which plans are ordered: 1 for simple ones."""
        factor = 1.0
        # If host and device are the same cores, an offload may be faster than none.
        if setting.state.num_offloads and self.hardware.cores is None:
            factor *= 1 + OFFLOAD_GAIN
        if setting.state.copies > 1:
            factor *= 1 + DIVISION_GAIN
        if setting.mesh.cp > 1:
            factor *= 1 + DIVISION_GAIN
        return factor

    def floor(self, flow: Flow) -> float:
        """Return a lower bound on a flow's seconds: the passes of all layers, divided by the ranks.

        If there are fewer microbatches than ranks, one goes through all stages and back, with half
        of the backwards if they are split.
        """
        mesh = flow.mesh
        alone = _fastest(flow)._replace(mesh=mesh._replace(pp=1, dp=mesh.dp * mesh.pp))
        costs = costs_of(Setting(self._passes, 1, alone), self.hardware, self.curves)
        num_microbatches = self.request.global_batch_size / mesh.dp / flow.micro_batch
        ways = max(num_microbatches / mesh.pp, 1.0 if flow.recompute.full_layers else 0.5)
        seconds = _SAFE * ways * (sum(costs.forward[0]) + sum(costs.backward[0]))
        return seconds / self.hardware.crowd(mesh.ranks)

    def bound_of_passes(self, setting: Setting) -> float:
        """Return a lower bound on the seconds of a flow and a schedule with any ZeRO state."""
        passes = replace(setting, workload=self._passes, flow=_fastest(setting.flow))
        seconds = passes_bound(passes, self.hardware, self.curves)
        return _SAFE * seconds * self.handicap(setting)


def _fastest(flow: Flow) -> Flow:
    """Return the flow with no recomputation instead of a full one, which few layers may need."""
    return flow._replace(recompute=NONE) if flow.recompute == FULL else flow


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
