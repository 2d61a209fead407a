"""A published run in the form that the planner's time and memory take."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from benchmarks.published import vocabulary
from benchmarks.published.architectures import Architecture
from benchmarks.published.cells import UnusableRow
from benchmarks.published.fill import Filled
from benchmarks.published.programs import cuts_sequence
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import model_of, stages_of
from parallel3d.plan.setting import Flow, Order, Precision, Setting, Software, Workload, ZeroState
from parallel3d.schedule.schedules import check_sizes

# Ten times what any published run asks of the planner; a row at either limit takes seconds.
ACTIONS = 1_000_000  # forwards and backwards of a step on all pipeline ranks
PLACEMENTS = 20_000_000  # stages x layers squared: what balancing the stages searches


@dataclass(frozen=True)
class PublishedSetting(Setting):
    """One way in which another program ran one model, with features that this engine lacks."""

    _: KW_ONLY
    recomputed_share: float = 1.0
    """The share of what `recompute` names that is recomputed."""
    sharding_ranks: int = 0
    """Ranks that share ZeRO's state; 0 for all."""

    @property
    def shards(self) -> int:
        """Number of ranks that share ZeRO's state."""
        return self.sharding_ranks or super().shards


def _schedule_of(pp: int, virtual: int) -> str:
    """Return the schedule that programs run with so many pipeline ranks, and stages on each."""
    if pp == 1:
        return "gpipe"
    return "interleaved" if virtual > 1 else "one_f_one_b"


def setting_of(
    cells: Mapping[str, str],
    filled: Filled,
    model: Architecture,
    program: Software,
    machine: Hardware,
) -> PublishedSetting:
    """The setting of a row; raises UnusableRow or ConfigError where it cannot have run so.

    A row that states no number format, or only 16 bits, ran in the chip's own.
    """
    pp, dp, tp, cp = _mesh(cells, filled)
    ep = _divided(filled, model, dp)
    micro, count = _batch(filled, dp)
    numbers = filled.numbers
    virtual = filled.or_else("virtual_pp", numbers.get("virtual_pp"), 1) if pp > 1 else 1
    recompute, share = vocabulary.recompute_of(
        filled.or_else("recompute", cells["recompute"], "none")
    )
    sharded = program.name.startswith(("FSDP", "DeepSpeed ZeRO-3"))
    stage = filled.or_else("zero_stage", cells["zero_stage"], 3 if sharded else 0)
    zero = vocabulary.zero_stage_of(str(stage))
    sixteen: Precision = "bf16" if machine.peak("bf16") else "fp16"
    node = machine.devices_per_node
    in_node = max(1, int(node.value) // (tp * cp)) * cp if node else dp * cp
    optimizer, params = vocabulary.offload_of(filled.or_else("offload", cells["offload"], "none"))
    assert model.heads and model.hidden and model.seq
    if model.heads % tp:
        raise UnusableRow(
            f"tp = {tp} does not divide {model.heads} attention heads",
            "tp does not divide the attention heads",
        )
    workload = Workload(
        model.specs(),
        model.hidden,
        model.seq,
        precision=vocabulary.precision_of(
            filled.or_else("precision", cells["precision"], sixteen), sixteen
        ),
        software=vocabulary.with_kernels(program, cells),
    )
    mesh = MeshSizes(pp=pp, dp=dp, cp=cp, tp=tp)
    stated = cells["seq_parallel"]
    cuts = vocabulary.is_yes("seq_parallel", stated) if stated else cuts_sequence(program)
    weights = vocabulary.weights_of(f"{stage}; {cells['program']}")
    setting = PublishedSetting(
        workload,
        count,
        Flow(mesh, micro, recompute, tp > 1 and cuts, ep),
        Order(virtual, _schedule_of(pp, virtual)),
        ZeroState.of(zero, zero < 2, optimizer, params, weights),
        recomputed_share=share,
        sharding_ranks=vocabulary.shards_of(str(stage), min(in_node, dp * cp)) if zero else 0,
    )
    _check(setting)
    return setting


def _mesh(cells: Mapping[str, str], filled: Filled) -> tuple[int, int, int, int]:
    """(pp, dp, tp, cp); dp is what the others leave of the devices."""
    numbers = filled.numbers
    devices = numbers.get("n_gpus")
    if devices is None:
        raise UnusableRow("the number of devices is not stated; fill n_gpus", asks=["n_gpus"])
    stated = [numbers.get(name) for name in ("tp", "pp", "dp", "zero_stage")]
    if not any(stated) and not cells["zero_stage"]:
        columns = ["tp", "pp", "dp", "zero_stage"]
        raise UnusableRow("no mesh is stated; fill tp, pp, dp or zero_stage", asks=columns)
    pp, tp, cp = (filled.or_else(name, numbers.get(name), 1) for name in ("pp", "tp", "cp"))
    dp = numbers.get("dp") or max(1, devices // (tp * pp * cp))
    if tp * pp * cp * dp != devices:
        raise UnusableRow(
            f"tp x pp x cp x dp = {tp * pp * cp * dp}, but there are {devices} devices",
            "tp x pp x cp x dp is not the number of devices",
        )
    return pp, dp, tp, cp


def _divided(filled: Filled, model: Architecture, dp: int) -> int:
    """Ranks that divide the experts; raises UnusableRow where they cannot."""
    ep: int = filled.numbers.get("ep", 1)
    experts: int = dict(model.experts).get("num_experts", 8) if model.family == "moe" else 1
    if experts % ep or dp % ep:
        raise UnusableRow(
            f"ep = {ep} does not divide dp = {dp} and {experts} experts; correct the cell (a mesh "
            "whose ep ranks are tp ranks, too, as Megatron allows, is not modelled)",
            "ep does not divide dp and the experts",
        )
    return ep


def _batch(filled: Filled, dp: int) -> tuple[int, int]:
    """Sequences of a microbatch, and microbatches of a data-parallel rank."""
    blanks = {"global_batch_seqs": "global batch", "micro_batch": "microbatch"}
    if columns := [column for column in blanks if filled.numbers.get(column) is None]:
        words = " and the ".join(blanks[column] for column in columns)
        verb = "is" if len(columns) == 1 else "are"
        rule = f"the {words} {verb} not stated; fill {' and '.join(columns)}"
        raise UnusableRow(rule, asks=columns)
    batch, micro = (filled.numbers[column] for column in blanks)
    count, rest = divmod(batch, micro * dp)
    if rest:
        raise UnusableRow(
            f"a batch of {batch} is not microbatches of {micro} on dp = {dp}",
            "the batch is not microbatches on all data-parallel ranks",
        )
    return micro, count


def _check(setting: PublishedSetting) -> None:
    """Raises where the pipeline cannot be built, or would be simulated for minutes."""
    stages = setting.num_stages
    layers = setting.workload.layers
    if setting.mesh.pp == 1:
        return
    if stages > len(layers):
        raise UnusableRow(
            f"{len(layers)} layers (embedding and head counted) cannot fill {stages} "
            "pipeline stages (pp x virtual_pp)",
            "the layers cannot fill the pipeline stages (pp x virtual_pp)",
        )
    for what, size, most in (
        ("forwards and backwards", 2 * stages * setting.num_microbatches, ACTIONS),
        ("placements of layers", stages * len(layers) ** 2, PLACEMENTS),
    ):
        if size > most:
            raise UnusableRow(
                f"{setting.num_microbatches:,} microbatches of {len(layers)} layers on "
                f"{stages} stages are {size:,} {what}, more than the {most:,} that the planner "
                "looks at; correct pp, virtual_pp, n_layers or the batch",
                f"more than {most:,} {what}",
            )
    check_sizes(*setting.actions)
    stages_of(model_of(layers), stages, setting.workload.seq)
