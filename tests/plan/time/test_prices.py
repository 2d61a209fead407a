"""What single operators, collectives, ZeRO and offload cost in a plan, beside figures by hand."""

from dataclasses import fields, replace
from functools import partial
from math import inf

import pytest

from benchmarks.published.run import PublishedSetting
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import Figure
from parallel3d.model.spec import Attention, MatMul, Shape, Work
from parallel3d.plan.layers.placement import stage_classes_of
from parallel3d.plan.layers.weight_counts import WeightSizes
from parallel3d.plan.memory.states import states
from parallel3d.plan.setting import Setting, Software, Workload, layers_of
from parallel3d.plan.time.network import (
    RankGroup,
    all_to_all_seconds,
    collective_seconds,
    crosses,
    group_of,
    send_seconds,
)
from parallel3d.plan.time.operators import (
    Curves,
    attention_seconds,
    machine_of,
    matmul_seconds,
    work_seconds,
)
from parallel3d.plan.time.sharding import Sharding, transfers_of
from parallel3d.plan.time.step import costs_of, step_time
from parallel3d.schedule.schedule import Action, Op
from tests.plan.settings import A100, GPT, IDEAL, changed, link, new_setting, shape_of
from tests.plan.toy_cluster import config

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("size", [108, 150, 450])
def test_sizes_off_tensor_core_tiles_are_slower(size: int) -> None:
    """Published: 27 % less at these head sizes than beside them."""

    def rates(head: int) -> list[float]:
        attention = Attention(8, 16, 16, 4096, head)
        product = MatMul(4096, 16 * 4096, head)
        plan = A100, Curves(), Software()
        return [
            attention.flops / attention_seconds(attention, "bf16", *plan),
            product.flops / matmul_seconds(product, "bf16", *plan[:2]),
        ]

    beside = size + -size % 8
    for slow, fast in zip(rates(size), rates(beside), strict=True):
        assert 0.70 < slow / fast < 0.75
    assert rates(beside)[1] > rates(beside - 8)[1]
    cores = A100.model_copy(update={"cores": 8})
    product = MatMul(4096, 4096, size)
    assert matmul_seconds(product, "bf16", cores, Curves()) < matmul_seconds(
        product, "bf16", A100, Curves()
    )


def test_large_products_are_efficient_and_small_ones_are_not() -> None:
    def rate(m: int, k: int, n: int) -> float:
        product = MatMul(m, k, n)
        return product.flops / matmul_seconds(product, "bf16", A100, Curves())

    whole = rate(16384, 16384, 16384)
    assert 0.7 * 2.712e14 < whole < 2.712e14
    assert rate(2048, 2048, 2048) < 0.95 * whole
    assert rate(2048, 64, 2048) < 0.6 * rate(2048, 2048, 2048)
    assert rate(1, 4096, 4096) < 0.01 * whole  # bound by memory


def test_attention_kernels() -> None:
    seconds = partial(attention_seconds, precision="bf16", hardware=A100, curves=Curves())
    long = Attention(1, 16, 16, 16384, 128)
    short = Attention(1, 16, 16, 1024, 128)
    for attention in (long, short):
        flash = seconds(attention, software=Software())
        full = seconds(attention, software=Software(causal_skips=False))
        classic = seconds(attention, software=Software(attention="classic"))
        assert flash < full < classic
        assert seconds(attention, software=Software(), backward=True) > 2 * flash
    # Sixteen times as long: 256 times the FLOPs, less than that while starting still counts.
    ratio = seconds(long, software=Software()) / seconds(short, software=Software())
    assert 150 < ratio < 256


def test_collectives_by_hand() -> None:
    curves = replace(Curves(), link=1.0, network=1.0, congestion=0.0, latency=1.0)
    curves = replace(curves, **{n: 0.0 for n in vars(curves) if n.startswith("overhead")})
    machine = A100.model_copy(update={"link": link(3e11, 3e-6), "network": link(25e9, 1e-5)})
    seconds = partial(collective_seconds, hardware=machine, curves=curves)
    inside = seconds("all_gather", 8e9, 8, 8)
    assert inside == pytest.approx(7e9 / 3e11 + 7 * 3e-6)
    assert seconds("reduce_scatter", 8e9, 8, 8) == inside
    assert seconds("all_reduce", 8e9, 8, 8) == pytest.approx(2 * inside)
    # Two nodes: eight rings leave each by eight network interfaces.
    assert seconds("all_gather", 16e9, 16, 8) == pytest.approx(
        15e9 / (8 * 25e9) + 14 * 3e-6 + 2 * 1e-5
    )
    # One rank a node: one interface.
    assert seconds("all_gather", 16e9, 2, 1) == pytest.approx(8e9 / 25e9 + 1e-5)
    assert seconds("all_gather", 16e9, 1, 1) == 0
    assert send_seconds(25e9, True, machine, curves) == pytest.approx(1 + 1e-5)
    assert send_seconds(3e11, False, machine, curves) == pytest.approx(1 + 3e-6)


def test_collectives_start_later_across_nodes() -> None:
    curves = replace(IDEAL, overhead_per_collective=2.0, overhead_per_crossing=5.0)
    started = partial(collective_seconds, "all_reduce", 8.0, hardware=A100, curves=curves)
    assert started(8, 8) == pytest.approx(2) and started(16, 8) == pytest.approx(5)
    exchanged = partial(all_to_all_seconds, 8.0, hardware=A100, curves=curves)
    assert exchanged(RankGroup(8, 8)) == pytest.approx(2)
    assert exchanged(RankGroup(16, 8)) == pytest.approx(5)


def test_host_launches_each_collective_of_a_layer() -> None:
    """Two all-reduces in a forward and two in a backward, where the host alone takes time."""
    curves = replace(IDEAL, overhead_per_launch=1.0)
    base = new_setting(layers_of(GPT), GPT.hidden_size, Shape(1, 128), 1, tp=2, zero_stage=0)
    launches = 4 * GPT.num_hidden_layers + 2  # and the embedding's sum, and the head's
    seconds = step_time(base, A100, curves).seconds
    assert seconds == pytest.approx(launches, rel=0.1)
    alone = changed(base, tp=1)
    assert step_time(alone, A100, curves).seconds < 1


def test_inputs_of_fp8_products_are_turned_into_it_first() -> None:
    """Two bytes of each input are read and two of one byte written; of gradients as well."""
    h100 = hardware.load("h100")
    work = Work((MatMul(4096, 1024, 2048),))
    curves = Curves()
    rate = h100.memory_bandwidth.value * curves.traffic
    for backward, width in ((False, 1024), (True, 2048)):
        one = work_seconds(work, "fp8", h100, curves, Software(), backward=backward)
        assert one.traffic == pytest.approx(4 * 4096 * width / rate)
        assert work_seconds(work, "bf16", h100, curves, Software(), backward=backward).traffic == 0


def test_fused_accumulation_leaves_a_part_of_its_traffic() -> None:
    setting = new_setting(layers_of(GPT), GPT.hidden_size, Shape(1, 128), 2, zero_stage=0)
    layout = stage_classes_of(setting)
    added = []
    for fuses in (False, True):
        machine = machine_of(A100, Software(fuses_accumulation=fuses), Curves(fused=0.4))
        ((stage,), _) = transfers_of(layout, Sharding.of(setting), machine)
        added.append(stage.accumulate_seconds)
    assert added[1] == pytest.approx(0.4 * added[0]) and added[1] > 0


def test_groups_are_placed_on_nodes_like_the_mesh() -> None:
    # 64 devices, eight a node; tp innermost, then dp, then pp.
    group = partial(group_of, devices=64, hardware=A100)
    assert group(8, 1) == (8, 8) and group(8, 1).nodes == 1
    assert group(8, 8) == (8, 1) and group(8, 8).nodes == 8
    assert group(16, 2) == (16, 4) and group(16, 2).nodes == 4
    assert group(16, 1) == (16, 8)
    assert group(4, 2).nodes == 1
    assert group_of(6, 1, 6, A100).nodes == 1
    assert group_of(6, 1, 48, A100).per_node == 2  # devices 6..11: two in a node, four in the next
    # Twelve devices are six in each of two nodes.
    assert group_of(6, 1, 12, A100).nodes == 1 and group_of(12, 1, 12, A100).per_node == 6
    rack = hardware.load("gb200")
    assert group_of(128, 1, 128, rack) == (128, 64)
    assert not crosses(2, 0, 1, 64, A100) and crosses(2, 3, 4, 64, A100)
    assert crosses(16, 0, 1, 64, A100) and not crosses(4, 0, 1, 8, A100)
    everything = A100.model_copy(update={"devices_per_node": None})
    assert group_of(512, 8, 4096, everything).nodes == 1


def test_missing_figures_of_hardware_are_named() -> None:
    setting = new_setting(layers_of(GPT), 1024, Shape(1, 1024), 4, dp=16)
    bare = A100.model_copy(update={"network": None, "host": None})
    step_time(changed(setting, dp=8), bare)
    with pytest.raises(
        ConfigError, match=r"network is not known; add .*plan for the devices of one node"
    ):
        step_time(setting, bare)
    with pytest.raises(ConfigError, match=r"host is not known; add .* or plan without offload"):
        step_time(changed(setting, dp=8, offload_optimizer="cpu"), bare)
    with pytest.raises(ConfigError, match="no FLOP/s is known for fp8; use one of bf16, or add"):
        step_time(changed(setting, dp=8, precision="fp8"), bare)
    with pytest.raises(ConfigError, match="no FLOP/s is known for fp32; use one of bf16, or add"):
        step_time(changed(setting, dp=8, precision="fp32"), hardware.load("h100-sxm5-80gb"))
    with pytest.raises(ConfigError, match="schedule 'gpipe': stages_per_rank=2"):
        step_time(changed(setting, dp=8, stages_per_rank=2), A100)


def test_zero_and_offload_cost_the_bytes_they_move() -> None:
    base = new_setting(layers_of(GPT), 1024, Shape(2, 1024), 8, dp=64, reduces_once=True)
    parts = {z: step_time(changed(base, zero_stage=z), A100).parts for z in range(4)}
    # An all-reduce is a reduce-scatter and a gather; ZeRO-3 gathers twice for each microbatch.
    assert 0.5 * parts[0]["data"] < parts[1]["data"] < parts[0]["data"]
    assert parts[3]["data"] > 5 * parts[1]["data"]
    assert parts[0]["optimizer"] > 1.5 * parts[1]["optimizer"]  # updates it all
    assert parts[2]["data"] == parts[1]["data"]  # both gather the new weights
    each = step_time(changed(base, reduces_once=False), A100).parts["data"]
    assert each > 1.3 * parts[3]["data"]
    cpu = step_time(changed(base, offload_optimizer="cpu"), A100).parts
    nvme = step_time(changed(base, offload_optimizer="nvme"), A100).parts
    assert parts[3]["offload"] == 0 < cpu["offload"] < nvme["offload"]
    both = step_time(changed(base, offload_optimizer="cpu", offload_param="cpu"), A100).parts
    assert both["offload"] > 2 * cpu["offload"]
    disk = step_time(changed(base, offload_optimizer="cpu", offload_param="nvme"), A100).parts
    assert disk["offload"] > 1.5 * both["offload"]
    overlapped = Software(overlaps_gather=True, overlaps_reduction=True)
    hidden = step_time(changed(base, software=overlapped), A100).parts
    assert hidden["data"] < 0.9 * parts[3]["data"]


@pytest.mark.parametrize("stage", range(4))
def test_gradients_reduced_in_bf16_move_half_the_bytes(stage) -> None:
    raw = config(layers=14).to_dict() | {"bf16": {"enabled": True}}
    raw["zero_optimization"]["stage"] = stage
    raw["parallel3d"]["mesh"] = {"pp": 1, "dp": 8, "tp": 1}
    seconds = []
    buckets = []
    for kind in (None, "bf16"):
        given = type(config()).from_dict(raw | {"communication_data_type": kind}).resolve(8)
        setting = Setting.from_config(given)
        machine = machine_of(A100, setting.workload.software, Curves())
        stages, coords = transfers_of(stage_classes_of(setting), Sharding.of(setting), machine)
        seconds.append([c.reduce_seconds for c in (*stages, *coords)])
        buckets.append(
            states(
                setting, WeightSizes(10**6, 10, 0, 0, 0, 0, 10**5, 10**5, 0, 10**5), False
            ).buffers
        )
    half = [s / 2 for s in seconds[0]]
    assert seconds[1] == pytest.approx(half, rel=0.05) and max(half) > 0
    assert buckets[1] == buckets[0] / (2 if stage == 3 else 1)


def test_hierarchical_zero_gathers_inside_a_node_and_reduces_shards_between_nodes() -> None:
    """Closed form for 16 replicas on two nodes of 8, which share the state among 8 or among all."""
    curves = replace(Curves(), link=1.0, network=1.0, congestion=0.0, latency=1.0)
    curves = replace(curves, **{n: 0.0 for n in vars(curves) if n.startswith("overhead")})
    machine = A100.model_copy(update={"link": link(3e11, 3e-6), "network": link(25e9, 1e-5)})
    moves = partial(collective_seconds, hardware=machine, curves=curves)
    base = new_setting(layers_of(GPT), GPT.hidden_size, Shape(1, 128), 1, dp=16, zero_stage=3)
    whole = base.workload.buffers.model_copy(update={"stage3_param_persistence_threshold": 0})
    base = changed(base, buffers=whole)
    own = {f.name: getattr(base, f.name) for f in fields(Setting)}
    for shards, inside in ((8, 8), (0, 16)):
        setting = PublishedSetting(**own, sharding_ranks=shards)
        assert setting.shards == inside
        layout = stage_classes_of(setting)
        ((stage,), (once,)) = transfers_of(
            layout, Sharding.of(setting), machine_of(machine, Software(), curves)
        )
        sizes = [layer.num_params for layer in setting.workload.layers]
        gathers = sum(moves("all_gather", 2 * size, inside, 8) for size in sizes if size)
        assert stage.gather_seconds == pytest.approx(gathers)
        total = 4 * sum(sizes)
        reduction = moves("reduce_scatter", total, inside, 8)
        if shards:
            reduction += moves("all_reduce", total / 8, 2, 1)
        assert once.reduce_seconds == pytest.approx(reduction)


def test_buckets_wait_once_each() -> None:
    """DDP's many small reductions between 64 nodes, and one of all gradients."""
    setting = new_setting(layers_of(GPT), GPT.hidden_size, Shape(1, 128), 1, dp=512, zero_stage=1)
    layout = stage_classes_of(setting)
    params = setting.workload.num_params

    def reduction(bucket: float) -> float:
        machine = machine_of(A100, Software(bucket=bucket), Curves())
        return transfers_of(layout, Sharding.of(setting), machine)[1][0].reduce_seconds

    whole = reduction(inf)
    moves = partial(collective_seconds, hardware=A100, curves=Curves())
    assert whole == reduction(2 * params) == moves("reduce_scatter", 4 * params, 512, 8)
    ten = reduction(params / 10)
    assert ten == pytest.approx(10 * moves("reduce_scatter", 4 * params / 10, 512, 8))
    waits = Curves().overhead_per_crossing + (448 * 3.4e-6 + 64 * 1.4e-5)
    assert ten - whole == pytest.approx(9 * waits, rel=0.2)


def test_class_of_a_program_sets_the_rate_of_its_products() -> None:
    curves = Curves(eager=0.9, compiled=0.95)
    work = layers_of(GPT)[1].cost(Shape(1, 128)).forward
    times = {
        kernels: work_seconds(work, "bf16", A100, curves, Software(kernels=kernels))
        for kernels in ("eager", "compiled", "tuned")
    }
    assert times["eager"].matmuls == pytest.approx(times["tuned"].matmuls / 0.9)
    assert times["compiled"].matmuls == pytest.approx(times["tuned"].matmuls / 0.95)
    assert times["eager"].traffic > times["compiled"].traffic == times["tuned"].traffic
    # A figure that was measured on the device counts instead of the fitted one.
    measured = A100.model_copy(update={"kernels": {"eager": Figure(value=0.5, source="measured")}})
    eager = work_seconds(work, "bf16", measured, curves, Software())
    assert eager.matmuls == pytest.approx(times["tuned"].matmuls / 0.5)
    own = {name: Workload.of(compiled(name)).software.kernels for name in ("auto", "none", "block")}
    assert own == {"auto": "eager", "none": "eager", "block": "compiled"}


def compiled(mode: str) -> RunConfig:
    """Return a config of one device that compiles its blocks, or not."""
    raw = config(batch=4).to_dict()
    raw["parallel3d"] |= {"mesh": {"pp": 1, "dp": 1, "tp": 1}, "plan": {}}
    raw["parallel3d"]["train"]["compile"] = mode
    return RunConfig.from_dict(raw).resolve(1)


def test_overlap_of_host_and_device_depends_on_their_difference() -> None:
    """(host^p + device^p)^(1/p): 1 adds, infinity takes the longer."""
    setting = new_setting(layers_of(GPT), GPT.hidden_size, Shape(1, 128), 1, zero_stage=0)
    ideal = replace(Curves(), **{n: 0.0 for n in vars(Curves()) if n.startswith("overhead")})
    host = replace(ideal, overhead_per_layer=1e-3)

    def compute(curves: Curves) -> float:
        return step_time(setting, A100, curves).parts["compute"]

    device = compute(ideal)
    both = compute(replace(host, host_overlap=1.0))
    alone = both - device
    longer = compute(replace(host, host_overlap=50.0))
    assert max(device, alone) * 0.99 < longer < compute(host) < both


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("tp", [2, 8])
def test_one_tp_th_of_an_activation_crosses_nodes(tp, scatters, sequence_parallel) -> None:
    """Scattered, the other side gathers it by the links; under sequence parallelism it is cut."""
    machine = A100.model_copy(update={"link": link(3e11), "network": link(25e9)})
    raw = config(batch=8, heads=16).to_dict()
    raw["parallel3d"] |= {
        "mesh": {"pp": 2, "dp": 8 // tp, "tp": tp, "sequence_parallel": sequence_parallel},
    }
    setting = Setting.from_config(type(config()).from_dict(raw).resolve(16))
    setting = changed(setting, software=replace(setting.workload.software, scatters_sends=scatters))
    whole = shape_of(setting).tokens * 2048 * 2  # bytes in bf16
    cut = tp if scatters or sequence_parallel else 1
    gathered = whole * (tp - 1) / tp / 3e11 if scatters and not sequence_parallel else 0.0
    curves = replace(IDEAL, link=1.0, network=1.0)
    costs = costs_of(setting, machine, curves)
    for send in (Action(Op.SEND_F, 0, 0), Action(Op.SEND_B, 1, 0)):
        assert costs.seconds(send) == pytest.approx(whole / cut / 25e9 + gathered, rel=1e-6)


def test_parameters_too_small_to_shard_cost_this_engine_time() -> None:
    """DeepSpeed's hooks handle them, too: 0.70 s a step for 0.84 with none that small."""
    curves = replace(Curves(), overhead_per_gather=1e-3)
    zero3 = new_setting(layers_of(GPT), 1024, Shape(1, 1024), 4, dp=2, zero_stage=3)
    others = changed(zero3, software=Software(handles_small=False))
    mine, other = (step_time(s, A100, curves).seconds for s in (zero3, others))
    small = sum(p.numel <= 100_000 for layer in zero3.workload.layers for p in layer.params)
    assert mine - other == pytest.approx(2 * 4 * small * 1e-3, rel=1e-6)
