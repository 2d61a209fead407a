"""The planner's search against looking at everything, and what it says of what does not fit."""

import gc
import time
from itertools import product

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig, hardware
from parallel3d.model.recompute import FULL, NONE, SELECTIVE, Recompute, parse
from parallel3d.plan.layers.placement import blocks_in_stages
from parallel3d.plan.memory.peak import least_in_flight, peak_of, per_rank
from parallel3d.plan.memory.room import reason_of, worst
from parallel3d.plan.report.plan_rows import apply, checkpoint_bytes, choose
from parallel3d.plan.report.row_json import plan_json
from parallel3d.plan.request import request_of
from parallel3d.plan.search import best_first, candidates
from parallel3d.plan.search.best_first import _Search, search
from parallel3d.plan.search.candidates import setting_of
from parallel3d.plan.search.remedy import evaluate, smallest_change
from parallel3d.plan.setting import Flow, Setting
from parallel3d.plan.time.step import lower_bound, step_time
from parallel3d.schedule.schedules import names, splits_backward
from tests.plan.settings import changed
from tests.plan.toy_cluster import GIB, config, machine

pytestmark = pytest.mark.pure


def fits(memory, hardware):
    return not reason_of(memory, hardware)


def everything(request):
    """Every combination of choices."""
    for mesh in candidates.meshes_in_turn(request)[0]:
        for flow in candidates.flows(request, mesh):
            orders = candidates.orders(request, flow)
            states = candidates.states(request, mesh)
            for order, state in product(orders, states):
                whole_copies = mesh.dp // state.copies % flow.ep == 0
                reduces = state.reduces_once or not splits_backward(order.schedule)
                if reduces and whole_copies:
                    yield flow, order, state


def best_of_each_mesh(request, rows):
    """By simulating all that fits."""
    fitting = []
    best = {}
    for flow, order, state in everything(request):
        # Of the times that weights may stay gathered the longest that fits; the next are slower.
        for way in candidates.ways(request, state.zero_stage, state.offload_param):
            kept = state._replace(weights=way)
            setting = setting_of(request, flow, order, kept)
            if fits(worst(setting, request.hardware), request.hardware):
                if flow.recompute == FULL:  # in as few layers as fit
                    for count in range(1, max(blocks_in_stages(setting))):
                        fewer = changed(setting, recompute=Recompute(full_layers=count))
                        if fits(worst(fewer, request.hardware), request.hardware):
                            flow = fewer.flow
                            break
                fitting.append((flow, order, kept))
                break

    def kind(flow, order, state):
        return flow, order, state.zero_stage, state.reduces_once, state.copies

    bare = {kind(*choices) for choices in fitting if not choices[-1].num_offloads}
    for flow, order, state in fitting:
        is_bare = kind(flow, order, state) in bare
        if not request.hardware.cores and state.num_offloads and is_bare:
            continue  # it fits without
        seconds = step_time(setting_of(request, flow, order, state), request.hardware).seconds
        rank = seconds * (1.1 if state.num_offloads and not request.hardware.cores else 1)
        rank *= 1.03 if flow.mesh.cp > 1 else 1
        rank *= 1.03 if state.copies > 1 else 1
        best[flow.mesh] = min(best.get(flow.mesh, (1e9, 1e9)), (rank, seconds))
    ranked = sorted(best.items(), key=lambda item: item[1])[:rows]
    return [(mesh, seconds) for mesh, (_, seconds) in ranked]


# From plenty to so little that only recomputation, ZeRO-3 and offload are left.
@pytest.mark.parametrize(
    ("devices", "batch", "layers", "memory", "cores"),
    [
        (2, 4, 6, 2.5, 0),
        (2, 4, 2, 80, 4),
        pytest.param(4, 4, 2, 80, 4, marks=pytest.mark.slow),
        pytest.param(4, 4, 4, 80, 0, marks=pytest.mark.slow),
        *(pytest.param(4, 4, 6, memory, 0, marks=pytest.mark.slow) for memory in (3, 4)),
        *(pytest.param(8, 16, 6, memory, 0, marks=pytest.mark.slow) for memory in (80, 8, 6, 5)),
    ],
)
def test_rows_equal_those_of_an_exhaustive_search(devices, batch, layers, memory, cores):
    request = request_of(config(batch, layers), machine(memory * GIB, cores=cores), devices)
    expected = best_of_each_mesh(request, 6)
    simulated = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            best_first, "step_time", lambda *words: simulated.append(1) or step_time(*words)
        )
        ranking = search(request, rows=6, per_mesh=1)
    assert len(expected) > 0
    assert [plan.time.seconds for plan in ranking.plans] == pytest.approx(
        [seconds for _, seconds in expected], rel=1e-8
    )
    meshes = [plan.setting.mesh for plan in ranking.plans]
    assert meshes == [mesh for mesh, _ in expected]
    if cores:  # the host's Adam may be the faster one, so that offload is looked at
        assert ranking.plans[0].setting.state.offload_optimizer == "cpu"
    else:
        assert len(simulated) < 0.5 * sum(1 for _ in everything(request))


LEAN = {"stage": 3, "reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 0}
LEAN |= {"stage3_max_reuse_distance": 0}


def test_fewest_layers_in_full_are_those_of_the_shortest_gathers():
    """Longer gathers, which do not fit, would need more layers in full."""
    wanted = config(4, 6, zero_optimization=LEAN)
    request = request_of(wanted, machine(2.6 * GIB), 4, {"pp": 1, "dp": 2, "tp": 2})
    ((mesh, seconds),) = best_of_each_mesh(request, 6)
    (plan,) = search(request, 6, 1).plans
    assert plan.setting.state.num_offloads and plan.setting.flow.recompute.full_layers == 1
    assert (plan.setting.mesh, plan.time.seconds) == (mesh, pytest.approx(seconds, rel=1e-8))


def test_cp_is_searched_for_long_samples(monkeypatch):
    assert all(
        mesh.cp == 1 for mesh in candidates.meshes_in_turn(request_of(config(), machine(), 8))[0]
    )
    monkeypatch.setattr(candidates, "LEAST_TOKENS", config().data.sequence_length // 4)
    on_four = request_of(config(4, 2), machine(), 4)
    assert {mesh.cp for mesh in candidates.meshes_in_turn(on_four)[0]} == {1, 2, 4}
    request = request_of(config(4, 2), machine(2 * GIB), 2)
    pairs = [(p.setting.mesh, p.time.seconds) for p in search(request, 9, 1).plans]
    assert {mesh.cp for mesh, _ in pairs} == {1, 2}
    expected = best_of_each_mesh(request, 9)
    assert [mesh for mesh, _ in pairs] == [mesh for mesh, _ in expected]
    assert [s for _, s in pairs] == pytest.approx([s for _, s in expected], rel=1e-8)
    fixed = request_of(config(4, 6), machine(), 4, {"cp": 2})
    assert all(plan_json(plan)["cp"] == 2 for plan in search(fixed, 3).plans)


def test_bounds_never_exceed_the_values(monkeypatch):
    """On what the search orders by and discards by: time from below, memory from below."""
    monkeypatch.setattr(candidates, "LEAST_TOKENS", config().data.sequence_length // 2)
    request = request_of(config(), machine(), 8)
    work = _Search(request, tuple(candidates.meshes_in_turn(request)[0]))
    longer = 0
    for flow, order, state in [*everything(request)][::97]:
        setting = setting_of(request, flow, order, state)
        seconds = step_time(setting, request.hardware).seconds
        floor = work.floor(flow)
        of_passes = work.bound_of_passes(setting) / work.handicap(setting)
        bound = lower_bound(setting, request.hardware)
        assert floor <= of_passes * (1 + 1e-9) and of_passes <= bound * (1 + 1e-9)
        assert bound <= seconds * (1 + 1e-9)
        longer += flow.mesh.pp > setting.num_microbatches and floor > 0.5 * of_passes
        first = peak_of(setting, 0, request.hardware)
        assert least_in_flight(setting, request.hardware) <= first.total
        assert setting.choices == (flow, order, state)
    assert longer


def test_bf16_is_not_planned_on_hardware_without_it():
    with pytest.raises(ConfigError, match="V100-SXM2-32GB supports fp16, but not bf16"):
        request_of(config(), hardware.load("v100-32gb"), 8)
    half = config(fp16={"enabled": True}, bf16={"enabled": False})
    assert request_of(half, hardware.load("v100-32gb"), 8).devices == 8


def test_search_is_deterministic_and_prefers_simple_plans():
    request = request_of(config(batch=4), machine(), 4)
    rankings = [search(request_of(config(batch=4), machine(), 4)) for _ in range(2)]
    one, two = ([plan_json(plan) for plan in ranking.rows] for ranking in rankings)
    assert one == two
    rows = rankings[0].plans
    times = [float(f"{plan.time.seconds:.9g}") for plan in rows]
    assert times == sorted(times)
    assert len({plan.setting.choices for plan in rows}) == len(rows)
    assert all(plan.fits and plan.setting.mesh.ranks == 4 for plan in rows)
    one_each = search(request, per_mesh=1).plans
    assert len(one_each) == sum(1 for _ in candidates.meshes_in_turn(request)[0]) > 5


def test_full_recomputation_is_not_proposed_with_split_backwards():
    """It would save nothing (tests/plan/memory/test_peak.py)."""
    seen = {
        (flow.recompute, splits_backward(order.schedule))
        for flow, order, _ in everything(request_of(config(), machine(), 4))
    }
    assert (FULL, True) not in seen and {(NONE, True), (FULL, False)} <= seen


def test_fixed_settings_are_kept():
    fixed = {"zero_stage": 3, "tp": 2, "recompute": "full", "gradient_reduction": "per_microbatch"}
    ranking = search(request_of(config(), machine(), 8, fixed))
    assert ranking.plans
    for plan in ranking.plans:
        row = plan_json(plan)
        assert {name: row[name] for name in fixed} == fixed
    whole = search(request_of(config(), machine(), 8, {"pp": 2, "tp": 2, "dp": 2}), rows=5)
    assert len(whole.plans) == 5 and len({p.setting.mesh for p in whole.plans}) == 1


@pytest.mark.parametrize(
    ("devices", "memory", "batch", "every"),
    [
        (1, 6, 4, 5),
        (4, 3, 4, 199),
        pytest.param(1, 6, 16, 3, marks=pytest.mark.slow),
        pytest.param(8, 3, 16, 24, marks=pytest.mark.slow),
    ],
)
def test_smallest_change_makes_a_plan_fit(devices, memory, batch, every):
    """For settings that are too large by little and by much; the proposed change makes them fit."""
    request = request_of(config(batch), machine(memory * GIB), devices)
    changed = 0
    for choices in [*everything(request)][::every]:
        plan = evaluate(request, setting_of(request, *choices))
        assert plan.fits == fits(plan.memory, request.hardware) == (plan.remedy == "")
        if plan.fits:
            continue
        assert "bytes over" in plan.reason
        change = smallest_change(request, choices)
        if change is None:
            continue
        words, near = change
        assert near != choices and words == plan.remedy
        held = worst(setting_of(request, *near), request.hardware)
        assert fits(held, request.hardware), words
        changed += 1
    assert changed >= 5


def test_tensor_parallelism_stays_inside_a_node_unless_nothing_else_fits():
    """Two nodes of two: tp 4 would be between them."""
    fixed = {"pp": 1, "zero_stage": 0, "recompute": "full"}
    roomy = request_of(config(batch=4), machine(per_node=2), 4, fixed)
    rows = search(roomy).plans
    assert {plan.setting.mesh.tp for plan in rows} == {1, 2}
    assert {
        p.setting.mesh.tp
        for p in search(request_of(config(batch=4), machine(per_node=4), 4, fixed)).plans
    } == {1, 2, 4}
    # Room for what tp 4 needs, and no more.
    only = request_of(config(batch=4), machine(per_node=2), 4, fixed | {"tp": 4})
    least = min(plan.memory.total for plan in search(only).plans)
    tight = request_of(config(batch=4), machine(least, host_memory=0.0, per_node=2), 4, fixed)
    assert {plan.setting.mesh.tp for plan in search(tight).plans} == {4}


def test_short_parts_of_samples_are_searched_if_nothing_else_fits(monkeypatch):
    """Else "nothing fits" and "the smallest plan" are said of fewer plans than --fix cp=4 has."""
    monkeypatch.setattr(candidates, "LEAST_TOKENS", config().data.sequence_length)
    fixed = {"pp": 1, "tp": 1, "recompute": "full", "micro_batch": 1}
    wanted = config(batch=1, layers=2)
    long = request_of(wanted, machine(host_memory=0.0), 4, fixed | {"cp": 4})
    least = min(plan.memory.total for plan in search(long).plans)
    tight = request_of(wanted, machine(least, host_memory=0.0), 4, fixed)
    assert {plan.setting.mesh.cp for plan in search(tight).plans} == {4}
    small = search(request_of(wanted, machine(least // 2, host_memory=0.0), 4, fixed))
    assert not small.plans and small.too_large[0].setting.mesh.cp == 4


def test_faster_plans_that_do_not_fit_name_a_change():
    memory = 5 * GIB // 2
    ranking = search(request_of(config(batch=4), machine(memory), 2))
    assert ranking.plans and ranking.too_large
    for plan in ranking.too_large:
        assert not plan.fits and plan.remedy
        assert plan.time.seconds < ranking.plans[0].time.seconds
        largest = max(m.total for m in per_rank(plan.setting, plan.request.hardware))
        over = largest - memory
        assert f"device memory: {over:,} bytes over" in plan.reason


def test_smallest_change_is_named_if_nothing_fits():
    wanted = config(batch=2, layers=1)
    ranking = search(request_of(wanted, machine(GIB // 8), 2))
    assert not ranking.plans
    # What the first one needs suffices.
    enough = machine(ranking.too_large[0].memory.total, 10**12)
    assert search(request_of(wanted, enough, 2), rows=1).plans
    with pytest.raises(ConfigError, match=r'mesh = "plan": NOTHING FITS on 2 x toy: the smallest'):
        choose(wanted, 2, machine(GIB // 8))


def test_chosen_config_is_the_first_row():
    wanted = config()
    chosen, plan = choose(wanted, 4, machine(5 * GIB))
    assert plan == plan and plan.fits and not chosen.is_planned
    again = RunConfig.from_dict(chosen.to_dict()).resolve(4)
    row = plan_json(search(request_of(wanted, machine(5 * GIB), 4), rows=1).plans[0])
    mesh = again.mesh
    zero = again.zero_optimization
    assert (mesh.pp, mesh.dp, mesh.tp) == (row["pp"], row["dp"], row["tp"])
    assert mesh.sequence_parallel == row["sequence_parallel"]
    assert (zero.stage, again.micro_batch_size) == (row["zero_stage"], row["micro_batch"])
    assert again.num_microbatches == row["num_microbatches"] and again.global_batch_size == 16
    assert again.pipeline.schedule == row["schedule"]
    assert str(again.pipeline.activation_checkpointing) == row["recompute"]
    assert again.pipeline.gradient_reduction == row["gradient_reduction"]
    assert again.pipeline.weights == (row["weights"] or "auto")
    assert any('"plan" for 4 x toy' in note for note in chosen.notes)
    # The same Setting as the engine will be planned with.
    assert apply(wanted, plan).to_dict() == chosen.to_dict()
    assert checkpoint_bytes(plan.setting) >= 12 * plan.setting.workload.num_params


def test_other_settings_of_the_config_are_kept():
    raw = config().to_dict()
    raw["zero_optimization"]["stage"] = 3
    raw["parallel3d"]["plan"] = {"fix": ["zero_stage", "recompute", "gradient_reduction"]}
    raw["parallel3d"]["pipeline"]["activation_checkpointing"] = "selective"
    chosen, plan = choose(RunConfig.from_dict(raw), 8, machine())
    assert chosen.zero_optimization.stage == 3 and plan.setting.flow.recompute == SELECTIVE
    assert plan.setting.state.reduces_once  # "auto" means that at ZeRO-3


def test_fixed_weights_stay_gathered_as_the_config_says():
    raw = config().to_dict()
    raw["zero_optimization"]["stage"] = 3
    raw["parallel3d"]["plan"] = {"fix": ["zero_stage", "weights"]}
    raw["parallel3d"]["pipeline"]["weights"] = "per_microbatch"
    kept, plan = choose(RunConfig.from_dict(raw), 4, machine())
    assert plan.setting.state.weights == kept.pipeline.weights == "per_microbatch"
    raw["parallel3d"]["pipeline"]["weights"] = "auto"
    free, plan = choose(RunConfig.from_dict(raw), 4, machine())
    assert plan.setting.state.weights == free.pipeline.weights == "per_step"


def test_parts_sum_and_flops_agree():
    request = request_of(config(), machine(), 4)
    for plan in search(request).rows:
        row = plan_json(plan)
        total = row["memory_bytes"].pop("total")
        assert sum(row["memory_bytes"].values()) == total
        assert sum(row["time"].values()) == pytest.approx(row["step_seconds"])
        assert row["mfu_causal"] < row["mfu_full"]
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(16 * 512)
        assert row["device_hours"] == pytest.approx(row["step_seconds"] * 100 / 3600 * 4)
        peak = 3e14 * row["mfu_full"]
        assert row["model_tflops_per_device"] * 1e12 == pytest.approx(peak)
    # By hand: 6 N D and attention's 12 L s h, of forward and backward (arXiv:2104.04473, eq. 3).
    tokens = 16 * 512
    h = 2048
    seq = 512
    layers = 6
    vocab = 8192
    full = tokens * (72 * layers * h * h + 12 * layers * seq * h + 6 * h * vocab)
    assert request.flops.full == pytest.approx(full)
    assert request.flops.causal == pytest.approx(full - tokens * 6 * layers * seq * h)
    again = tokens * (24 * layers * h * h + 4 * layers * seq * h)
    setting = Setting(request.workload, 16, Flow(MeshSizes(pp=2)))  # stages of 3 blocks
    first = tokens * 8 * layers * h * h  # an MLP's first product
    for mode, added in {"none": 0, "full": again, "full:2": again * 2 / 3, "mlp": first}.items():
        plan = evaluate(request, changed(setting, recompute=parse(mode)))
        assert plan.recomputed_flops == pytest.approx(added), mode


def test_bad_requests_are_refused():
    with pytest.raises(ConfigError, match=r"--devices = 7: no mesh of 7 devices .* 16 samples"):
        search(request_of(config(layers=1), machine(), 7))
    for tp in (3, 8):
        with pytest.raises(ConfigError, match=rf"no mesh of 8 .* with tp={tp}; .*fix fewer"):
            search(request_of(config(), machine(), 8, {"tp": tp}))
    for fixed, message in (
        ({"zero": 1}, "--fix:\n  zero = 1: is not a setting"),
        ({"schedule": "zigzag"}, f"choose from {', '.join(names())}"),
        ({"pp": "two"}, "must be an integer"),
        ({"zero_stage": True}, "zero_stage = true: must be an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            search(request_of(config(), machine(), 8, fixed))
    raw = config().to_dict()
    raw["parallel3d"]["model"]["vocab_size"] = "auto"
    raw["parallel3d"]["data"]["tokenizer"] = "gpt2"
    published = request_of(RunConfig.from_dict(raw), machine(), 8).config
    assert published.model.vocab_size == 50257


@pytest.mark.parametrize("collects", [True, False])
def test_search_restores_garbage_collection(collects, monkeypatch):
    seen = []
    room_of = best_first.room_of
    monkeypatch.setattr(
        best_first, "room_of", lambda *words: seen.append(gc.isenabled()) or room_of(*words)
    )
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        search(request_of(config(batch=4, layers=1), machine(), 2), rows=1)
        assert gc.isenabled() == collects and seen and not any(seen)
        monkeypatch.setattr(best_first, "room_of", None)
        with pytest.raises(TypeError):
            search(request_of(config(batch=4, layers=1), machine(), 2), rows=1)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.slow
def test_search_of_a_trillion_parameters_on_3072_devices():
    """It takes 8 to 20 s of CPU on small virtual machines; 40 s leave room for a busy one."""
    wanted = config(batch=3072, layers=128, hidden=25600, heads=160, seq=2048)
    start = time.process_time()
    ranking = search(request_of(wanted, hardware.load("a100-80gb"), 3072))
    assert time.process_time() - start < 40
    assert len(ranking.plans) == 20 and all(plan.fits for plan in ranking.plans)
    assert all(plan.setting.mesh.ranks == 3072 for plan in ranking.rows)
    # Its authors took tp 8 and pp 64 (arXiv:2205.05198, table 3).
    assert any((p.setting.mesh.pp, p.setting.mesh.tp) == (64, 8) for p in ranking.plans[:5])


def test_free_search_is_not_slower_than_one_with_a_fixed_recomputation():
    """A bound on the layers in full was too high where the optimizer's states are offloaded."""
    llama = RunConfig.from_json("llama-8b.json")
    mesh = {"pp": 1, "dp": 1, "cp": 1, "tp": 4, "sequence_parallel": True}
    seconds = []
    for fixed in ({}, {"recompute": parse("full:9"), "micro_batch": 1}):
        (plan, *_) = search(request_of(llama, hardware.load("rtx4090"), 4, mesh | fixed), 1).plans
        seconds.append(plan.time.seconds)
    assert seconds[0] <= seconds[1]


def test_smallest_plan_of_a_schedule_without_full_recomputation_is_named():
    """Its flows begin with one that this schedule cannot run."""
    fixed = {"schedule": "zero_bubble", "pp": 2}
    ranking = search(request_of(config(batch=4), machine(GIB // 4, host_memory=0.0), 2, fixed))
    assert not ranking.plans and ranking.too_large[0].setting.order.schedule == "zero_bubble"
