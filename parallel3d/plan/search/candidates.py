"""The choices of mesh, microbatch, schedule, ZeRO stage and offload that a request allows.

The config's own checks rule out what the config would refuse. The schedules are the files of
parallel3d/schedule/schedules.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby, product
from math import gcd

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.section import Problem, Problems
from parallel3d.config import MeshConfig, checks
from parallel3d.config.model_checks import divisors_of
from parallel3d.config.parallel3d_block import PipelineConfig
from parallel3d.model import optimizers
from parallel3d.model.recompute import FULL, MLP, MODES, NONE, parse
from parallel3d.plan.request import Request
from parallel3d.plan.setting import DEVICES, Choices, Device, Flow, Order, Setting, ZeroState
from parallel3d.schedule import schedules
from parallel3d.schedule.sharding import Weights

UNEVEN = 4  # stages per rank; more only if all stages, or all but the ends, are equally long
MOST_STAGES = 64  # per rank; a search over hundreds takes minutes, and each stage adds messages
# Tokens of a cp rank; with fewer, gathers outlast the products that a rank saves.
LEAST_TOKENS = 4096
WEIGHTS: tuple[Weights, ...] = ("per_step", "per_pass", "per_microbatch")  # fastest first


def meshes_in_turn(request: Request) -> list[list[MeshSizes]]:
    """Return the request's meshes in groups; one counts only if nothing fits of those before it.

    The second has tp across nodes, the third cp with fewer than LEAST_TOKENS a rank. Raises
    ConfigError if no schedule can run on any mesh.
    """
    node = request.hardware.sharing(request.devices)
    most_cp = max(1, request.workload.seq // LEAST_TOKENS, request.fixed.get("cp", 1))

    def turn(mesh: MeshSizes) -> int:
        if mesh.cp > most_cp:
            return 2
        return int(mesh.tp > node)

    in_turn = sorted(meshes(request), key=turn)
    refuse_empty(request, in_turn)
    return [[*group] for _, group in groupby(in_turn, turn)]


def meshes(request: Request) -> Iterator[MeshSizes]:
    """Yield every mesh of the request's devices, ordered by pp, tp and cp."""
    for pp, tp, cp in product(divisors_of(request.devices), repeat=3):
        dp, rest = divmod(request.devices, pp * cp * tp)
        mesh = MeshSizes(pp=pp, dp=dp, cp=cp, tp=tp)
        if not rest and _is_open(request, **mesh._asdict()) and _is_possible(request, mesh):
            yield mesh


@lru_cache(maxsize=1024)
def flows(request: Request, mesh: MeshSizes) -> tuple[Flow, ...]:
    """Return a mesh's flows: every micro batch, recomputation and sequence parallelism."""
    if "recompute" in request.fixed:
        recomputes = [parse(request.fixed["recompute"])]
    elif request.workload.software.attention == "flash":
        # With a fused kernel, "selective" frees only 4 bytes a head and token.
        recomputes = [NONE, MLP, FULL]
    else:
        recomputes = [*MODES]
    can_recompute = request.workload.can_recompute
    recomputes = [mode for mode in recomputes if mode.parts.issubset(can_recompute)]
    splits = [False]
    if mesh.tp > 1 and not request.workload.seq % (mesh.cp * mesh.tp):
        splits.append(True)
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
    experts = getattr(config.model, "num_experts", 0) or 1
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

    `weights` is the fastest choice.
    """
    allowed = []
    for copies, stage, once in product(_copies(request, mesh), range(4), (True, False)):
        if not _is_useful(request, mesh, stage, once, copies):
            continue
        for optimizer, param in product(DEVICES, DEVICES):
            if _is_open(
                request, zero_stage=stage, offload_optimizer=optimizer, offload_param=param
            ) and _has_offload(request, stage, optimizer, param):
                way = ways(request, stage, param)[0]
                allowed.append(ZeroState.of(stage, once, optimizer, param, way, copies))
    return tuple(sorted(allowed, key=_simplest))


def _simplest(state: ZeroState) -> tuple[int, int, bool, int]:
    return state.num_offloads, state.zero_stage, not state.reduces_once, state.copies


def _is_useful(request: Request, mesh: MeshSizes, stage: int, once: bool, copies: int) -> bool:
    """Return True if no other stage and reduction does the same, and the reduction is open.

    On one replica nothing is sharded. Stages 1 and 2 differ only in the reduction
    (docs/deepspeed.md), and with copies of the shards both reduce once a step. Below ZeRO-3, with
    one gather a step, flat ZeRO moves fewer bytes than copies.
    """
    is_fixed = "zero_stage" in request.fixed
    mode = request.fixed.get("gradient_reduction")
    if stage == 0:
        return once and copies == 1
    if copies > 1 and stage < 3 and "dp_shards" not in request.fixed:
        return False
    if copies > 1 and stage == 2 and not once:
        return False
    if mode is not None and once != PipelineConfig(gradient_reduction=mode).reduces_once(stage):
        return False
    if mesh.dp * mesh.cp == 1:
        return (stage == 3 or is_fixed) and once == (mode != "per_microbatch")
    return stage == 3 or is_fixed or once == (stage == 1)


def _copies(request: Request, mesh: MeshSizes) -> list[int]:
    """Return the numbers of copies of the shards to compare: groups of whole nodes, and of all.

    Inside a node copies save no time, and smaller groups than a node's need more memory and move
    larger shards between nodes.
    """
    fixed = request.fixed.get("dp_shards")
    if fixed is not None:
        return [mesh.dp // fixed]
    node = request.hardware.sharing(request.devices)
    useful = [1]
    for copies in divisors_of(mesh.dp)[1:]:
        ranks = mesh.dp // copies * mesh.cp * mesh.tp
        if node < request.devices and ranks > mesh.tp and ranks % node == 0:
            useful.append(copies)
    return useful


@lru_cache(maxsize=1024)
def states_in_turn(
    request: Request, mesh: MeshSizes
) -> tuple[tuple[ZeroState, ZeroState | None], ...]:
    """Return a mesh's states, each with a simpler one; it counts only if that one does not fit.

    An offload comes after none, and ZeRO-3 after the highest lower stage that reduces as often:
    none of them is faster, except an offload where host and device are the same cores.
    """
    bare: dict[tuple[int, bool, int], ZeroState] = {}
    lower: dict[bool, ZeroState] = {}
    pairs = []
    for state in states(request, mesh):
        simpler = bare.setdefault((state.zero_stage, state.reduces_once, state.copies), state)
        if simpler is not state:
            pairs.append((state, simpler if request.hardware.cores is None else None))
        elif state.zero_stage == 3:
            pairs.append((state, lower.get(state.reduces_once)))
        else:
            pairs.append((state, None))
            lower[state.reduces_once] = state
    return tuple(pairs)


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


def _has_offload(request: Request, zero_stage: int, optimizer: Device, param: Device) -> bool:
    """Return True if engine (parallel3d/config/checks.py) and hardware support an offload."""
    if optimizer == param == "none":
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
    for place, section in ((optimizer, zero.offload_optimizer), (param, zero.offload_param)):
        needed = (host.nvme_read, host.nvme_write, section.nvme_path)
        if place == "nvme" and None in needed:
            return False
    return True


def _is_possible(request: Request, mesh: MeshSizes) -> bool:
    """Return True if model and batch can be divided over a mesh."""
    config = request.config
    sections = {"mesh": MeshConfig(**mesh._asdict()), "model": config.model, "data": config.data}
    return (
        mesh.pp <= len(request.workload.layers)
        and request.common_batch % mesh.dp == 0
        and mesh.dp % request.fixed.get("dp_shards", 1) == 0
        and not checks.find_problems(sections)
    )


def refuse_empty(request: Request, meshes: Iterable[MeshSizes]) -> None:
    """Raise ConfigError if no schedule can run on any of the request's meshes."""
    for mesh in meshes:
        if any(orders(request, flow) for flow in flows(request, mesh)):
            return
    rule = (
        f"no mesh of {request.devices} devices divides the model's heads and layers and the "
        f"{request.common_batch} samples of a step in a schedule that runs"
    )
    if request.fixed:
        choices = ", ".join(f"{name}={value}" for name, value in request.fixed.items())
        rule += f" with {choices}"
    remedy = "use another number of devices or another train_batch_size, or fix fewer choices"
    raise Problems([Problem("--devices", request.devices, rule, remedy)], "the plan")
