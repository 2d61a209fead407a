"""Best-first search for the fastest plans of a request, without evaluating every plan.

1. A heap orders nodes by a lower bound on the seconds of a step. It starts with one node per mesh,
   micro batch and recomputation.
2. The first node is split: into schedules and ZeRO stages, then into the offloads that fit. A
   setting that remains is simulated and goes back with its exact seconds.
3. A simulated plan at the top of the heap is the fastest that is left.

A test compares the rows with an exhaustive search.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count, islice
from typing import NamedTuple

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.model.recompute import FULL, NONE, Recompute
from parallel3d.plan.layers.placement import blocks_in_stages
from parallel3d.plan.memory.peak import least_in_flight, least_on_first, peak_of
from parallel3d.plan.search import candidates
from parallel3d.plan.search.candidates import setting_of
from parallel3d.plan.search.plans import Plan, Request
from parallel3d.plan.search.remedy import all_fit, evaluate, room_of, with_fewest_in_full, worst
from parallel3d.plan.setting import PLAIN, Choices, Flow, Order, Setting, ZeroState
from parallel3d.plan.time.operators import curves_for
from parallel3d.plan.time.step import costs_of, lower_bound, step_time

TOO_LARGE = 5  # the most plans that are faster than the first row, but do not fit
OFFLOAD_GAIN = 0.1
"""The share of a step that an offload must save: the figures of hosts are assumed, not measured."""
CP_GAIN = 0.03
"""The share of a step that context parallelism must save: less is within the planner's error."""
COPIES_GAIN = 0.03
"""The share of a step that copies of ZeRO's shards must save, for the same reason."""
_LEAN_MESHES = 30  # meshes that are searched for the plan with the least memory
_OF_A_MESH = 4  # settings of each of these
_TRIED = 4  # settings of a mesh that are compared to find the smallest of these
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
            work = _Search(request, meshes)
            most = per_mesh or max(1, rows // len(meshes))
            if plans := tuple(islice(work.best_first(most), rows)):
                break
        too_large = work.too_large(plans[0].time.seconds if plans else float("inf"))
        least = None
        if not plans:
            # Rows that are shown come first: of equal plans the sentence below names one of them.
            small = [*too_large, evaluate(request, work.leanest())]
            least = min(small, key=lambda plan: plan.memory.total)
        return Ranking(plans, tuple(too_large), least)
    finally:
        if collects:
            gc.enable()


class Untested(NamedTuple):
    """A flow with a schedule and ZeRO states that may fit.

    - `activations`: at least so many bytes are in flight on the first rank.
    - `groups`: alternative states, fastest first, then their fallback (candidates.alternatives).
    """

    flow: Flow
    order: Order
    activations: int
    groups: Sequence[Sequence[ZeroState]]


class _Search:
    """A search in progress."""

    def __init__(self, request: Request, meshes: tuple[MeshSizes, ...]) -> None:
        self.request = request
        self.hardware = request.hardware
        self.curves = curves_for(request.hardware)
        self.room = room_of(request.hardware)  # bytes of a device, and of its host
        # The time to accumulate gradients depends on the ZeRO stage; floors leave it out.
        software = replace(request.workload.software, gradient_bytes=0)
        self._floors_workload = replace(request.workload, software=software)
        flows = [flow for mesh in meshes for flow in candidates.flows(request, mesh)]
        self.floors = sorted((self._floor_of_any(flow), flow) for flow in flows)
        # If host and device are the same cores, an offload may be faster than none.
        self._offload_may_help = request.hardware.cores is not None

    def best_first(self, per_mesh: int) -> Iterator[Plan]:
        """Yield the plans that fit, fastest first; among equally fast plans the simplest first."""
        serial = count()
        num_plans = Counter[MeshSizes]()
        heap: list[
            tuple[float, tuple[object, ...], int, MeshSizes, Flow | Untested | Setting | Plan]
        ] = [
            (floor * self._way(flow), (), next(serial), flow.mesh, flow)
            for floor, flow in self.floors
        ]
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
        self, node: Flow | Untested | Setting
    ) -> Iterator[tuple[float, Untested | Setting | Plan]]:
        """Yield the nodes that a node is split into, each with its lower bound in seconds.

        A Setting is one that fits and is not simulated yet.
        """
        if isinstance(node, Flow):
            for order in candidates.orders(self.request, node):
                plain = setting_of(self.request, node, order, PLAIN)
                activations = least_in_flight(plain, self.hardware)
                if activations > self.room[0]:
                    continue
                for groups in candidates.alternatives(self.request, node.mesh):
                    if not candidates.go_together(node, order, groups[0][0]):
                        continue
                    possible = []
                    for group in groups:
                        if candidates.go_together(node, order, group[0]):
                            possible.append(group)
                    yield from self._untested(node, order, activations, possible)
        elif isinstance(node, Untested):
            flow, order, activations, ((state, *others), *fallback) = node
            plain = setting_of(self.request, flow, order, PLAIN)
            activations = least_in_flight(plain, self.hardware, counted=True)
            setting = fits = self._with_longest_gather(flow, order, activations, state)
            if setting and self._opens_full(setting):
                setting = with_fewest_in_full(setting, self.hardware, self._least_full(setting))
                # A setting that fits without recomputation has its own node.
                setting = None if setting.flow.recompute == NONE else setting
            if setting:
                yield self._bound(setting), setting
            if not fits:
                yield from self._untested(flow, order, activations, fallback)
            if not fits or self._offload_may_help:
                yield from self._untested(flow, order, activations, [others])
        else:
            time = step_time(node, self.hardware, self.curves)
            plan = Plan(self.request, node, worst(node, self.hardware), time)
            yield float(f"{time.seconds * self._handicap(node):.9g}"), plan

    def _handicap(self, setting: Setting) -> float:
        """Return the factor on a plan's seconds by which plans are ordered: 1 for simple ones."""
        offloads = setting.state.num_offloads > 0
        own = 1 + OFFLOAD_GAIN if offloads and not self._offload_may_help else 1.0
        own *= _handicap_of_copies(setting)
        return own if setting.mesh.cp == 1 else own * (1 + CP_GAIN)

    def _untested(
        self, flow: Flow, order: Order, activations: int, groups: Sequence[Sequence[ZeroState]]
    ) -> Iterator[tuple[float, Untested]]:
        """Yield the node of these groups with its lower bound, if any of their states may fit.

        The first state of a group adds the least time. At ZeRO-3 the next may be faster, if the
        first must gather weights more often to fit.
        """
        fastest = []
        for states in groups:
            settings = ((s, setting_of(self.request, flow, order, s)) for s in states)
            may_fit = (pair for pair in settings if self._may_fit(pair[1], activations))
            most = 2 if states and states[0].zero_stage == 3 else 1
            fitting_states = [*islice(may_fit, None if self._offload_may_help else most)]
            fastest += [setting for _, setting in fitting_states]
            if [state for state, _ in fitting_states[:1]] == [*states[:1]]:
                break  # the fallback counts only if the group's first state does not fit
        if fastest:
            node = Untested(flow, order, activations, groups)
            yield min(map(self._bound_of_any, fastest)), node

    def _with_longest_gather(
        self, flow: Flow, order: Order, activations: int, state: ZeroState
    ) -> Setting | None:
        """Return the setting with the longest gathers that fit, or None."""
        for variant in (state, *candidates.shorter_gathers(self.request, order, state)):
            setting = setting_of(self.request, flow, order, variant)
            if not self._may_fit(setting, activations):
                break
            if all_fit(setting, self.hardware):
                return setting
        return None

    def _may_fit(self, setting: Setting, activations: int) -> bool:
        """Return True if the lower bound on the first rank's memory fits."""
        device, host = least_on_first(setting, self.hardware, activations)
        return device <= self.room[0] and host <= self.room[1]

    def _opens_full(self, setting: Setting) -> bool:
        """Return True if the planner may recompute only some layers in full."""
        return setting.flow.recompute == FULL and candidates.opens_recompute(self.request)

    def _least_full(self, setting: Setting) -> int:
        """Return a lower bound on the layers of a stage that must be recomputed to fit."""
        full, _ = least_on_first(setting, self.hardware)
        without, _ = least_on_first(setting.recomputing(NONE), self.hardware)
        freed = without - full
        over = without - self.room[0]
        return max(0, over * min(blocks_in_stages(setting)) // max(1, freed))

    def _bound_of_any(self, setting: Setting) -> float:
        """Return a lower bound for any number of layers in full recomputation, and of gathers.

        The number of gathers follows from the whole schedule; one per step is the least.
        """
        if setting.state.weights == "per_pass":
            setting = setting.gathering("per_step")
        if self._opens_full(setting):
            least = Recompute(full_layers=max(1, self._least_full(setting)))
            setting = setting.recomputing(least)
        return self._bound(setting)

    def _bound(self, setting: Setting) -> float:
        """Return a lower bound on the seconds of a step; with copies, on those it is ordered by."""
        seconds = lower_bound(setting, self.hardware, self.curves)
        return _SAFE * seconds * _handicap_of_copies(setting)

    def _floor_of_any(self, flow: Flow) -> float:
        """Return a flow's lower bound, with any number of layers in full recomputation."""
        floor = self._floor(flow)
        blocks = len(self.request.workload.layers) - 2
        if flow.recompute != FULL or not candidates.opens_recompute(self.request) or blocks < 1:
            return floor
        # At least one layer of each stage, of which the first and the last may have none.
        share = max(0, flow.mesh.pp - 2) / blocks
        return share * floor + (1 - share) * self._floor(flow._replace(recompute=NONE))

    def _floor(self, flow: Flow) -> float:
        """Return a flow's lower bound: the seconds of all layers' passes divided by the ranks."""
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

    def leanest(self) -> Setting:
        """Return the setting with the least memory.

        It is found among those whose first rank needs least, over all meshes and of each of some.
        """
        smallest = self.request.fixed.get("micro_batch", 1)
        sizes: list[tuple[int, Choices]] = []
        for _, flow in self.floors:
            if flow.micro_batch == smallest:
                for state in candidates.states(self.request, flow.mesh):
                    sizes += self._sizes(flow, state)
        small = nsmallest(40, sizes)
        of_mesh = defaultdict[MeshSizes, list[tuple[int, Choices]]](list)
        for size, choices in sorted(sizes):
            of_mesh[choices[0].mesh].append((size, choices))
        for own in sorted(of_mesh.values())[:_LEAN_MESHES]:
            small += own[:_OF_A_MESH]
        settings = []
        for _, (flow, order, state) in small:
            variants = (state, *candidates.shorter_gathers(self.request, order, state))
            for variant in variants[-2:]:
                settings.append(setting_of(self.request, flow, order, variant))
        return min(settings, key=lambda s: worst(s, self.hardware).total)

    def too_large(self, fastest: float) -> list[Plan]:
        """Return plans that are faster but do not fit, at most one per mesh.

        Among a mesh's plans it is the smallest. All are at the simplest ZeRO stage that shards the
        optimizer's state.
        """
        near = defaultdict[MeshSizes, list[tuple[int, int, Choices]]](list)
        for number, (floor, flow) in enumerate(self.floors):
            if floor >= fastest:
                break
            if flow.mesh in near or len(near) < 2 * TOO_LARGE:
                states = candidates.states(self.request, flow.mesh)
                state = next((s for s in states if s.zero_stage), states[0])
                near[flow.mesh] += [(size, number, c) for size, c in self._sizes(flow, state)]
        missed: list[tuple[int, int, Setting]] = []
        for choices in near.values():
            settings = (setting_of(self.request, *c) for *_, c in sorted(choices))
            faster = islice((s for s in settings if self._bound(s) < fastest), _TRIED)
            sizes = [(peak_of(s, 0, self.hardware).total, i, s) for i, s in enumerate(faster)]
            for size, _, setting in sorted(sizes):
                if all_fit(setting, self.hardware):
                    continue
                if step_time(setting, self.hardware, self.curves).seconds < fastest:
                    missed.append((size, len(missed), setting))
                    break
        plans = [evaluate(self.request, s) for *_, s in nsmallest(TOO_LARGE, missed)]
        return sorted(plans, key=lambda plan: plan.time.seconds)

    def _sizes(self, flow: Flow, state: ZeroState) -> Iterator[tuple[int, Choices]]:
        """Yield a flow's choices with this state, and lower bounds on the first rank's bytes."""
        for order in candidates.orders(self.request, flow):
            if candidates.go_together(flow, order, state):
                choices = flow, order, state
                yield least_on_first(setting_of(self.request, *choices), self.hardware)[0], choices


def _handicap_of_copies(setting: Setting) -> float:
    """Return the factor by which plans with copies of the shards are ordered, 1 for the others."""
    return 1 + COPIES_GAIN if setting.state.copies > 1 else 1.0


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
