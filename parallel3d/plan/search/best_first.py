"""Best-first search for the fastest plans of a request, without evaluating every plan.

A heap holds undecided nodes by a lower bound on the seconds of a step. The node that comes off it
is split (a mesh with its micro batch and recomputation, then schedules and ZeRO stages, then
offloads) until it is one plan, which is simulated. When a simulated plan comes off the heap, no
undecided node can be faster. So the rows equal those of an exhaustive search; a test compares them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count, islice
from typing import Any

from parallel3d.model.spec import Shape
from parallel3d.plan.memory.peak import Memory, at
from parallel3d.plan.search import candidates, least, refuse
from parallel3d.plan.search.candidates import Flow, MeshSizes, Order, ZeroState, setting_of
from parallel3d.plan.search.least import HeldBytes, InFlightBytes
from parallel3d.plan.search.plans import Plan, Request
from parallel3d.plan.search.remedy import Capacity, Choices, evaluate, fitting, worst
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.cost import costs_of
from parallel3d.plan.time.curves import curves_for
from parallel3d.plan.time.operators import Curves
from parallel3d.plan.time.step import lower_bound, step_time

TOO_LARGE = 5  # plans that would be faster than the first row, but do not fit
_TRIED = 4  # of a mesh, to find the smallest of these
_SAFE = 1 - 1e-9  # a bound and a simulation may round differently


@dataclass(frozen=True)
class FoundPlans:
    """The rows of a search: plans that fit, fastest first, and faster plans that do not fit."""

    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...]
    num_simulated: int
    per_mesh: int
    least: Plan | None = None
    """Where nothing fits, the plan that needs least memory."""
    num_hidden: int = 0  # faster plans that do not fit, for which there are not rows enough

    @property
    def rows(self) -> tuple[Plan, ...]:
        """All plans of the search, in the order of the table."""
        return self.plans + self.too_large


def search(
    request: Request, rows: int = 20, per_mesh: int | None = None, curves: Curves | None = None
) -> FoundPlans:
    """The `rows` fastest plans that fit, at most `per_mesh` of one mesh.

    By default `per_mesh` leaves room in the table for all meshes, and is at least 1. A plan that
    fits without an offload is not listed with that offload. Raises ConfigError where no mesh is
    possible, or where the hardware's description lacks a figure.
    """
    refuse.check_fixed(dict(request.fixed))
    refuse.refuse_empty(request)
    work = _Search(request, curves or curves_for(request.hardware))
    per_mesh = per_mesh or max(1, rows // len(work.meshes))
    plans: list[Plan] = []
    for plan in work.best_first(per_mesh):
        plans.append(plan)
        if len(plans) == rows:
            break
    fastest = plans[0].time.seconds if plans else float("inf")
    too_large = tuple(work.too_large(fastest))
    leanest = None if plans else evaluate(request, work.leanest(), curves)
    return FoundPlans(tuple(plans), too_large, work.num_simulated, per_mesh, leanest)


@dataclass
class _Search:
    """A search in progress, with results cached for choices that many plans share."""

    request: Request
    curves: Curves
    num_simulated: int = 0
    _saved: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)
    _passes: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _states: dict[tuple[MeshSizes, Order, ZeroState], HeldBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = Capacity.of(self.request.hardware)
        # Adding up gradients depends on the ZeRO stage; without it the floor is one for all.
        self._software = replace(self.request.base.software, gradient_bytes=0)
        self.meshes = tuple(candidates.meshes(self.request))
        self.floors = sorted(
            (self._floor(flow), flow)
            for mesh in self.meshes
            for flow in candidates.flows(self.request, mesh)
        )

    def best_first(self, per_mesh: int) -> Iterator[Plan]:
        """The plans that fit, fastest first; among equally fast plans the simplest first."""
        serial, taken = count(), Counter[MeshSizes]()
        heap: list[tuple[float, bool, Any, int, Any]] = [
            (floor, False, (), next(serial), flow) for floor, flow in self.floors
        ]
        heapify(heap)
        while heap:
            *_, node = heappop(heap)
            mesh = _mesh_of(node)
            if taken[mesh] >= per_mesh:
                continue
            if isinstance(node, Plan):
                taken[mesh] += 1
                yield node
                continue
            for bound, plan, inner in self._inside(node):
                order = simplicity(plan) if plan else ()
                heappush(heap, (bound, plan is not None, order, next(serial), plan or inner))

    def _inside(self, node: Any) -> Iterator[tuple[float, Plan | None, Any]]:
        """The nodes that a node of the heap splits into, each with its lower bound in seconds."""
        request = self.request
        if isinstance(node, Flow):
            for order in candidates.orders(request, node):
                in_flight = self._in_flight(node, order)
                if in_flight.device > self.capacity.device:
                    continue
                for states, fallback in candidates.alternatives(request, node.mesh):
                    if not candidates.go_together(order, states[0]):
                        continue
                    left, later = (
                        tuple(s for s in some if self._may_fit(node, order, s, in_flight))
                        for some in (states, fallback)
                    )
                    if left[:1] == states[:1]:
                        yield from self._undecided(node, order, left, later)
                    else:
                        yield from self._undecided(node, order, left)
                        yield from self._undecided(node, order, later)
            return
        flow, order, (state, *others), fallback = node
        setting = setting_of(request, flow, order, state)
        memory = fitting(setting, self.capacity, request.hardware)
        if memory:
            plan = self._simulated(setting, memory)
            yield float(f"{plan.time.seconds:.9g}"), plan, None
        else:
            yield from self._undecided(flow, order, fallback)
            others = [*candidates.shorter_gathers(request, order, state)[:1], *others]
        if not memory or self._shares_cores:
            yield from self._undecided(flow, order, others)

    def _undecided(
        self,
        flow: Flow,
        order: Order,
        states: Sequence[ZeroState],
        fallback: Sequence[ZeroState] = (),
    ) -> Iterator[tuple[float, Plan | None, Any]]:
        """Yield the node of alternative states, if there are any, with its lower bound.

        `fallback`: states to look at if the first of `states` does not fit.
        """
        if states:
            bound = min(self._bound(flow, order, s) for s in self._tried(states))
            yield bound, None, (flow, order, states, fallback)

    @property
    def _shares_cores(self) -> bool:
        """Whether host and device are the same cores, so that offload may be faster."""
        return self.request.hardware.cores is not None

    def _tried(self, states: Sequence[ZeroState]) -> Sequence[ZeroState]:
        """The states, of offloads of one kind, that may be the fastest: the first adds least time.

        Where the first must gather weights more often to fit, the next may be faster.
        """
        if self._shares_cores:
            return states
        return states[: 1 + (states[0].zero_stage == 3 and len(states) > 1)]

    def _simulated(self, setting: Setting, memory: Memory) -> Plan:
        self.num_simulated += 1
        time = step_time(setting, self.request.hardware, self.curves)
        return Plan(self.request, setting, memory, time)

    def _bound(self, flow: Flow, order: Order, state: ZeroState) -> float:
        setting = setting_of(self.request, flow, order, state)
        return _SAFE * lower_bound(setting, self.request.hardware, self.curves)

    def _floor(self, flow: Flow) -> float:
        """Lower bound on the seconds of a flow's step: its computes, shared evenly by the ranks."""
        request, mesh = self.request, flow.mesh
        return self._flow_seconds(flow) * (
            request.global_batch_size / mesh.dp / flow.micro_batch / mesh.pp
        )

    def _flow_seconds(self, flow: Flow) -> float:
        """Seconds of one microbatch's forward and backward through all layers, without ZeRO."""
        key = (flow.mesh.tp, *flow[1:])
        if key not in self._passes:
            costs = costs_of(self._alone(flow), self.request.hardware, self.curves)
            self._passes[key] = _SAFE * (sum(costs.forward[0]) + sum(costs.backward[0]))
        return self._passes[key]

    def _alone(self, flow: Flow) -> Setting:
        """The setting of one microbatch of a flow on a single tensor-parallel group."""
        base = self.request.base
        return base.but(
            shape=Shape(flow.micro_batch, base.shape.seq),
            num_microbatches=1,
            dp=self.request.devices // flow.mesh.tp,
            tp=flow.mesh.tp,
            sequence_parallel=flow.sequence_parallel,
            recompute=flow.recompute,
            zero_stage=0,
            reduces_once=True,
            offload_optimizer="none",
            offload_param="none",
            software=self._software,
        )

    def _may_fit(
        self, flow: Flow, order: Order, state: ZeroState, in_flight: InFlightBytes
    ) -> bool:
        """Whether the lower bound on the first rank's memory fits: necessary, not sufficient."""
        held_bytes = self._held(flow, order, state)
        needed = least.total(held_bytes, in_flight, self.request.hardware)
        return needed <= self.capacity.device and held_bytes.host <= self.capacity.host

    def _least(self, flow: Flow, order: Order, state: ZeroState) -> int:
        """Lower bound on the bytes of the first rank's device."""
        in_flight = self._in_flight(flow, order)
        return least.total(self._held(flow, order, state), in_flight, self.request.hardware)

    def _held(self, flow: Flow, order: Order, state: ZeroState) -> HeldBytes:
        """Bytes that the first rank holds whatever its microbatches."""
        key = flow.mesh, order, state
        if key not in self._states:
            setting = setting_of(self.request, flow, order, state)
            self._states[key] = least.held_on_first(setting, self.request.hardware)
        return self._states[key]

    def _in_flight(self, flow: Flow, order: Order) -> InFlightBytes:
        """Bytes of the first rank's activations in flight."""
        key = (flow.mesh.tp, *flow[1:])
        if key not in self._saved:
            self._saved[key] = least.saved_of_kinds(self._alone(flow), self.request.hardware)
        microbatches = self.request.global_batch_size // flow.mesh.dp // flow.micro_batch
        return least.in_flight_on_first(
            self.request.base, self._saved[key], flow.mesh.pp, microbatches, order
        )

    def leanest(self) -> Setting:
        """The setting with the least device memory, among those whose first rank needs least."""
        sizes: list[tuple[int, int, Choices]] = []
        for mesh in self.meshes:
            flows = candidates.flows(self.request, mesh)
            for flow in [f for f in flows if f.micro_batch == flows[0].micro_batch]:
                for state in candidates.states(self.request, mesh):
                    for order in candidates.orders(self.request, flow, state):
                        size = self._least(flow, order, state)
                        sizes.append((size, len(sizes), (flow, order, state)))
        settings = [
            setting_of(self.request, flow, order, kept)
            for *_, (flow, order, state) in nsmallest(40, sizes)
            for kept in (state, *candidates.shorter_gathers(self.request, order, state))[-2:]
        ]
        return min(settings, key=lambda s: worst(s, self.capacity, self.request.hardware).total)

    def too_large(self, fastest: float) -> list[Plan]:
        """Faster plans that do not fit, for each mesh the one that comes nearest to fitting.

        Faster than `fastest` seconds a step, at the simplest ZeRO stage that shards the optimizer's
        state.
        """
        near = defaultdict[MeshSizes, list[tuple[int, int, Choices]]](list)
        for number, (floor, flow) in enumerate(self.floors):
            if floor >= fastest:
                break
            if flow.mesh not in near and len(near) == 2 * TOO_LARGE:
                continue
            states = candidates.states(self.request, flow.mesh)
            for state in [s for s in states if s.zero_stage][:1] or states[:1]:
                for order in candidates.orders(self.request, flow, state):
                    size = self._least(flow, order, state)
                    near[flow.mesh].append((size, number, (flow, order, state)))
        missed: list[tuple[int, int, Setting]] = []
        hardware = self.request.hardware
        for choices in near.values():
            faster = (c for *_, c in sorted(choices) if self._bound(*c) < fastest)
            settings = [setting_of(self.request, *c) for c in islice(faster, _TRIED)]
            for size, i in sorted((at(s, 0, hardware).total, i) for i, s in enumerate(settings)):
                if fitting(settings[i], self.capacity, hardware):
                    continue
                if step_time(settings[i], hardware, self.curves).seconds < fastest:
                    missed.append((size, len(missed), settings[i]))
                    break
        plans = [evaluate(self.request, s, self.curves) for *_, s in nsmallest(TOO_LARGE, missed)]
        return sorted(plans, key=lambda plan: plan.time.seconds)


def simplicity(plan: Plan) -> tuple[Any, ...]:
    """Sort key of equally fast plans: fewer stages, less offload, smaller tp, and so on, first."""
    s = plan.setting
    flow, order, state = candidates.choices_of(s)
    return (
        s.pp * s.stages_per_rank,
        state,
        s.tp,
        s.sequence_parallel,
        candidates.RECOMPUTES.index(s.recompute),
        plan.memory.total,
        order,
        flow.micro_batch,
    )


def _mesh_of(node: Any) -> MeshSizes:
    """The mesh of a node of the heap: a plan, a flow, or a flow with an order and states."""
    if isinstance(node, Plan):
        return MeshSizes(node.setting.pp, node.setting.dp, node.setting.tp)
    mesh: MeshSizes = (node if isinstance(node, Flow) else node[0]).mesh
    return mesh
