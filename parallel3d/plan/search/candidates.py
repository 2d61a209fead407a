"""The choices of mesh, microbatch, schedule, ZeRO stage and offload that a request allows.

The config's own checks rule out what the config would refuse. The schedules are the files of
parallel3d/schedule/schedules.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import gcd

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.section import Problem, Problems, nearest
from parallel3d.config import MeshConfig, checks
from parallel3d.config.model_checks import divisors_of
from parallel3d.config.parallel3d_block import PipelineConfig
from parallel3d.model import optimizers
from parallel3d.model.recompute import FULL, MLP, MODES, NONE, parse
from parallel3d.plan.search.plans import CHOICES, Request
from parallel3d.plan.setting import DEVICES, Choices, Device, Flow, Order, Setting, ZeroState
from parallel3d.schedule import schedules
from parallel3d.schedule.sharding import Weights

UNEVEN = 4  # stages per rank; more only if all stages, or all but the ends, are equally long
MOST_STAGES = 64  # per rank; a search over hundreds takes minutes, and each stage adds messages
LEAST_TOKENS = 4096  # a cp rank's; with fewer, gathers outlast the products that a rank saves
WEIGHTS: tuple[Weights, ...] = ("per_step", "per_pass", "per_microbatch")  # fastest first


def meshes(request: Request) -> Iterator[MeshSizes]:
    """Yield every mesh of the request's devices, ordered by pp, tp and cp."""
    longest = max(1, request.workload.seq // LEAST_TOKENS, request.fixed.get("cp", 1))
    for pp in divisors_of(request.devices):
        for tp, cp in product(divisors_of(request.devices // pp), repeat=2):
            dp, rest = divmod(request.devices, pp * cp * tp)
            if rest or cp > longest:
                continue
            mesh = MeshSizes(pp=pp, dp=dp, cp=cp, tp=tp)
            if dp % request.fixed.get("dp_shards", 1):
                continue
            if _is_open(request, **mesh._asdict()) and _is_possible(request, mesh):
                yield mesh


def opens_recompute(request: Request) -> bool:
    """Return True if recomputation is the planner's choice."""
    return "recompute" not in request.fixed


@lru_cache(maxsize=1024)
def flows(request: Request, mesh: MeshSizes) -> tuple[Flow, ...]:
    """Return a mesh's flows: every micro batch, recomputation and sequence parallelism."""
    may_split = mesh.tp > 1 and not request.workload.seq % (mesh.cp * mesh.tp)
    if not opens_recompute(request):
        recomputes = [parse(request.fixed["recompute"])]
    elif request.workload.software.attention == "flash":
        # With a fused kernel, "selective" frees only 4 bytes a head and token.
        recomputes = [NONE, MLP, FULL]
    else:
        recomputes = [*MODES]
    can_recompute = request.workload.can_recompute
    recomputes = [mode for mode in recomputes if mode.parts.issubset(can_recompute)]
    splits = [False, True] if may_split else [False]
    micro_batches = divisors_of(request.common_batch // mesh.dp)
    allowed = []
    for ep, split, recompute, micro_batch in product(
        _divisions(request, mesh), splits, recomputes, micro_batches
    ):
        if _is_open(request, micro_batch=micro_batch, sequence_parallel=split):
            allowed.append(Flow(mesh, micro_batch, recompute, split, ep))
    return tuple(allowed)


def _divisions(request: Request, mesh: MeshSizes) -> list[int]:
    """Return the numbers of ranks that may divide the experts, from 1."""
    config = request.config
    experts = getattr(request.config.model, "num_experts", 0) or 1
    if config.train.noise_scale_every:
        experts = 1
    most = gcd(experts, request.fixed.get("dp_shards", mesh.dp))
    return [ep for ep in divisors_of(most) if _is_open(request, ep=ep)]


@lru_cache(maxsize=65536)
def orders(request: Request, flow: Flow) -> tuple[Order, ...]:
    """Return every schedule that can run the flow, fewest stages first."""
    allowed = []
    pp = flow.mesh.pp
    num_layers = len(request.workload.layers)
    sizes = request.batch_sizes or (request.global_batch_size,)
    counts = {size // flow.mesh.dp // flow.micro_batch for size in sizes}
    # One rank has one stage: more stages would run the same computes in the same order.
    for stages_per_rank in range(1, 1 + (1 if pp == 1 else min(num_layers // pp, MOST_STAGES))):
        # Either all layers, or all but embedding and head, must divide evenly.
        lengths = {num % (pp * stages_per_rank) for num in (num_layers, num_layers - 2)}
        if stages_per_rank > UNEVEN and 0 not in lengths:
            continue
        for name in request.schedules:
            if flow.recompute.full_layers and schedules.splits_backward(name):
                continue  # recomputation saves nothing: W's inputs stay until W
            order = Order(stages_per_rank, name)
            runs = not any(schedules.why_not(name, pp, n, stages_per_rank) for n in counts)
            if runs and _is_open(request, **order._asdict()):
                allowed.append(order)
    return tuple(allowed)


def go_together(flow: Flow, order: Order, state: ZeroState) -> bool:
    """Return True if a schedule can run with a ZeRO state's reductions, and its copies have ep."""
    can_reduce = state.reduces_once or not schedules.splits_backward(order.schedule)
    return can_reduce and flow.mesh.dp // state.copies % flow.ep == 0


@lru_cache(maxsize=1024)
def states(request: Request, mesh: MeshSizes) -> tuple[ZeroState, ...]:
    """Return every ZeRO stage, reduction and offload that the engine supports, simplest first.

    On one replica nothing is sharded. Stages 1 and 2 differ only in the reduction
    (docs/deepspeed.md). `weights` is the fastest choice. With copies of the shards, ZeRO-2 is
    ZeRO-1: both reduce once a step.
    """
    allowed = []
    once = request.fixed.get("gradient_reduction") != "per_microbatch"
    kinds = [(0, True), (3, once)]
    if mesh.dp * mesh.cp > 1:
        kinds = [(0, True), (1, True), (2, False), (3, True), (3, False)]
        if "zero_stage" in request.fixed:  # stages 1 and 2 with either reduction
            kinds += [(1, False), (2, True)]
    elif "zero_stage" in request.fixed:
        kinds = [(stage, once or not stage) for stage in range(4)]
    for copies, (stage, once), optimizer, param in product(
        _copies(request, mesh), kinds, DEVICES, DEVICES
    ):
        if copies > 1 and (stage, once) in ((0, True), (2, False)):
            continue
        if copies > 1 and stage < 3 and "dp_shards" not in request.fixed:
            continue  # with one gather a step, flat ZeRO moves fewer bytes
        if (
            _is_open(request, zero_stage=stage, offload_optimizer=optimizer, offload_param=param)
            and _reduces(request, stage, once)
            and _has_offload(request, stage, optimizer, param)
        ):
            way = ways(request, stage, param)[0]
            allowed.append(ZeroState.of(stage, once, optimizer, param, way, copies))
    return tuple(sorted(allowed, key=_simplest))


def _simplest(state: ZeroState) -> tuple[int, int, bool, int]:
    return state.num_offloads, state.zero_stage, not state.reduces_once, state.copies


def _copies(request: Request, mesh: MeshSizes) -> list[int]:
    """Return the numbers of copies of the shards to compare: groups of whole nodes, and of all.

    Inside a node copies save no time, and smaller groups than a node's need more memory and move
    larger shards between nodes.
    """
    fixed = request.fixed.get("dp_shards")
    if fixed is not None:
        return [mesh.dp // fixed]
    node = request.hardware.sharing(request.devices)
    copies = [1]
    for shards in divisors_of(mesh.dp)[:-1]:
        ranks = shards * mesh.cp * mesh.tp
        if node < request.devices and ranks > mesh.tp and ranks % node == 0:
            copies.append(mesh.dp // shards)
    return sorted(copies)


@lru_cache(maxsize=1024)
def fallbacks(request: Request, mesh: MeshSizes) -> Mapping[ZeroState | None, list[ZeroState]]:
    """Return for each state of a mesh those that count only if it does not fit.

    Under None are those that always count. An offload comes after none, and ZeRO-3 after the
    highest lower stage that reduces as often: none of them is faster, except an offload where host
    and device are the same cores.
    """
    after = defaultdict[ZeroState | None, list[ZeroState]](list)
    simplest: dict[tuple[int, bool, int], ZeroState] = {}
    lower: dict[bool, ZeroState] = {}
    for state in states(request, mesh):
        zero = state.zero_stage
        kind = zero, state.reduces_once, state.copies
        before = simplest.setdefault(kind, state)
        if before != state:
            after[before if request.hardware.cores is None else None].append(state)
        elif zero == 3:
            after[lower.get(state.reduces_once)].append(state)
        else:
            after[None].append(state)
            lower[state.reduces_once] = state
    return after


def ways(request: Request, zero_stage: int, offload_param: Device) -> tuple[Weights, ...]:
    """Return the choices for how long weights stay gathered, fastest first.

    Offloaded parameters have no "per_step", which would keep them on the device.
    """
    if zero_stage != 3:
        return ("per_microbatch",)
    fixed = request.fixed.get("weights", "auto")
    if fixed != "auto":
        return (fixed,)
    return gathered_longest(offload_param)


def gathered_longest(offload_param: Device) -> tuple[Weights, ...]:
    """Return the choices for how long ZeRO-3's weights stay gathered, if none is fixed."""
    return WEIGHTS if offload_param == "none" else WEIGHTS[1:]


def choices(request: Request, flows: Iterable[Flow]) -> Iterator[Choices]:
    """Yield all choices of some flows: with each schedule, ZeRO state and way to gather."""
    for flow in flows:
        for order, state in product(orders(request, flow), states(request, flow.mesh)):
            if go_together(flow, order, state):
                for way in ways(request, state.zero_stage, state.offload_param):
                    yield flow, order, state._replace(weights=way)


def setting_of(request: Request, flow: Flow, order: Order, state: ZeroState) -> Setting:
    """Return the setting of a request's workload with these choices."""
    num_microbatches = request.global_batch_size // flow.mesh.dp // flow.micro_batch
    return Setting(request.workload, num_microbatches, flow, order, state)


def _is_open(request: Request, **choices: object) -> bool:
    """Return True if none of these choices is fixed to another value."""
    fixed = request.fixed
    return all(fixed.get(name, value) == value for name, value in choices.items())


def _reduces(request: Request, zero_stage: int, once: bool) -> bool:
    """Return True if this reduction is allowed. "auto" leaves it to the ZeRO stage."""
    mode = request.fixed.get("gradient_reduction")
    if mode is None or zero_stage == 0:
        return True
    return once == PipelineConfig(gradient_reduction=mode).reduces_once(zero_stage)


def _has_offload(request: Request, zero_stage: int, optimizer: Device, param: Device) -> bool:
    """Return True if engine (parallel3d/config/checks.py) and hardware support an offload."""
    places = {optimizer, param} - {"none"}
    if not places:
        return True
    if zero_stage != 3 and (param != "none" or optimizer == "nvme"):
        return False
    host = request.hardware.host
    config = request.config
    usable = ("none", *optimizers.load(config.optimizer.type).OFFLOADS)
    if host is None or optimizer not in usable:
        return False
    # The planner does not choose a path on disk: NVMe offload needs the config's nvme_path.
    zero = config.zero_optimization
    paths = {"optimizer": zero.offload_optimizer.nvme_path, "param": zero.offload_param.nvme_path}
    has_speed = host.nvme_read is not None and host.nvme_write is not None
    return all(
        where != "nvme" or (has_speed and paths[what] is not None)
        for what, where in (("optimizer", optimizer), ("param", param))
    )


def _is_possible(request: Request, mesh: MeshSizes) -> bool:
    """Return True if model and batch can be divided over a mesh."""
    config = request.config
    sections = {"mesh": MeshConfig(**mesh._asdict()), "model": config.model, "data": config.data}
    return (
        mesh.pp <= len(request.workload.layers)
        and request.common_batch % mesh.dp == 0
        and not checks.find_problems(sections)
    )


def refuse_empty(request: Request) -> None:
    """Raise ConfigError if no mesh is possible, or no schedule can run on any mesh."""
    if any(orders(request, flow) for mesh in meshes(request) for flow in flows(request, mesh)):
        return
    choices = ", ".join(f"{name}={value}" for name, value in request.fixed.items())
    rule = (
        f"no mesh of {request.devices} devices divides the model's heads and layers and the "
        f"{request.common_batch} samples of a step in a schedule that runs"
        + (f" with {choices}" if choices else "")
    )
    remedy = "use another number of devices or another train_batch_size, or fix fewer choices"
    raise Problems([Problem("--devices", request.devices, rule, remedy)], "the plan")


def check_fixed(fixed: Mapping[str, object]) -> None:
    """Raise ConfigError for a fixed choice with an unknown name or value."""
    allowed: dict[str, tuple[object, ...]] = {
        "schedule": schedules.names(),
        "zero_stage": (0, 1, 2, 3),
        "gradient_reduction": ("auto", "per_step", "per_microbatch"),
        "weights": ("auto", *WEIGHTS),
        "offload_optimizer": DEVICES,
        "offload_param": DEVICES,
        "sequence_parallel": (True, False),
    }
    problems = []
    for name, value in fixed.items():
        path = f"--fix {name}"
        if name not in CHOICES:
            rule = "is not a choice of the planner"
            problems.append(Problem(path, value, rule, nearest(name, CHOICES)))
        elif name == "recompute":
            try:
                parse(value)
            except ValueError as error:
                problems.append(Problem(path, value, *str(error).split("; ", 1)))
        elif name in allowed and (type(value), value) not in (
            [(type(choice), choice) for choice in allowed[name]]  # 1, 1.0 and true are not the same
        ):
            words = ", ".join(str(choice).lower() for choice in allowed[name])
            problems.append(Problem(path, value, "is not an allowed value", f"use {words}"))
        elif name not in allowed and (type(value) is not int or value < 1):
            problems.append(Problem(path, value, "must be a whole number", "use 1 or more"))
    if problems:
        raise Problems(problems, "the plan")
