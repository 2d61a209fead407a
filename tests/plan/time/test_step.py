"""The planner's step time: its parts, its lower bound, its bubble, and what must be monotone."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel3d.config import hardware
from parallel3d.config.hardware import Cores, Figure, Hardware
from parallel3d.model.recompute import SELECTIVE
from parallel3d.model.spec import Attention, Shape, Work
from parallel3d.plan.setting import ActionOrder, RankShare, Setting, Software, layers_of
from parallel3d.plan.time import passes
from parallel3d.plan.time.makespan import counts, ends
from parallel3d.plan.time.operators import curves_for, machine_of
from parallel3d.plan.time.step import TIMES, lower_bound, step_spans, step_time
from parallel3d.schedule.schedule import Action, Op, bubble, simulate
from parallel3d.schedule.schedules import load, make_schedule, names, why_not
from tests.plan.settings import (
    A100,
    GPT,
    IDEAL,
    any_setting,
    changed,
    figure,
    link,
    new_setting,
    products,
)

pytestmark = pytest.mark.pure

DEVICES = st.sampled_from(("V100-SXM2-32GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "GB200-NVL72"))


@given(any_setting(), DEVICES)
@settings(max_examples=20)
def test_parts_sum_to_the_whole_and_exceed_the_bound(setting: Setting, name: str) -> None:
    time = step_time(setting, hardware.load(name))
    assert tuple(time.parts) == TIMES
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert min(time.parts.values()) >= 0 and time.parts["compute"] > 0
    assert lower_bound(setting, hardware.load(name)) <= time.seconds * (1 + 1e-9)
    if setting.mesh.pp == 1:
        assert time.parts["bubble"] == pytest.approx(0, abs=1e-9 * time.seconds)
    # What happens once a step comes on top of the list of actions.
    spans = step_spans(setting, hardware.load(name))
    assert max(s.end for rank in spans for s in rank) <= time.seconds * (1 + 1e-9)


def faster(described: Hardware, what: str, times: float) -> Hardware:
    """The hardware with one figure so many times as high."""

    def more(f: Figure) -> Figure:
        return f.model_copy(update={"value": f.value * times})

    change: dict[str, Any]
    match what:
        case "link" | "network":
            old = getattr(described, what)
            change = {what: old.model_copy(update={"bandwidth": more(old.bandwidth)})}
        case "peak_flops" | "matmul_flops":
            both = ("peak_flops", "matmul_flops")
            change = {k: {d: more(f) for d, f in getattr(described, k).items()} for k in both}
        case "memory_bandwidth":
            change = {what: more(getattr(described, what))}
        case _:
            host = described.host
            assert host is not None
            change = {"host": host.model_copy(update={what: more(getattr(host, what))})}
    return described.model_copy(update=change)


# The first rank waits between its last backwards, so that faster products shorten what a reduction
# hides behind and not the list: 1.7 % more on twice the FLOP/s, as long as waits hid nothing.
WAITS = new_setting(
    layers=layers_of(GPT),
    hidden_size=GPT.hidden_size,
    shape=Shape(4, 1024),
    num_microbatches=2,
    pp=2,
    dp=5,
    tp=2,
    sequence_parallel=True,
    schedule="v_shape",
    stages_per_rank=2,
    recompute=SELECTIVE,
    zero_stage=0,
    software=Software(overlaps_reduction=True, overlaps_tensor=True),
)


FIGURES = (
    "link",
    "network",
    "peak_flops",
    "memory_bandwidth",
    "device_bandwidth",
    "adam_params",
    "nvme_read",
    "nvme_write",
)


@given(any_setting(), st.sampled_from(FIGURES), st.floats(1.01, 1e3))
@example(WAITS, "peak_flops", 2.0)
@settings(max_examples=25)
def test_faster_hardware_never_makes_a_step_slower(
    setting: Setting, what: str, times: float
) -> None:
    better = faster(A100, what, times)
    assert step_time(setting, better).seconds <= step_time(setting, A100).seconds * (1 + 1e-9)
    assert lower_bound(setting, better) <= lower_bound(setting, A100) * (1 + 1e-9)


def of_products(name: str, pp: int, count: int, per_rank: int, *sizes: int) -> Setting:
    """A setting of a schedule whose every stage is one product."""
    return new_setting(
        products(pp * per_rank, *sizes),
        64,
        Shape(1, 64),
        count,
        pp=pp,
        schedule=name,
        stages_per_rank=per_rank,
        zero_stage=0,
    )


@pytest.mark.parametrize("name", names())
@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(1, 3),
    st.lists(st.integers(1, 4000), min_size=1, max_size=18),
    st.floats(1e6, 1e12),
)
@settings(max_examples=8)
def test_lower_bound_of_every_schedule_with_any_costs(
    name: str, pp: int, count: int, per_rank: int, sizes: list[int], bandwidth: float
) -> None:
    if why_not(name, pp, count, per_rank):
        return
    setting = of_products(name, pp, count, per_rank, *sizes)
    slow = A100.model_copy(update={"link": link(bandwidth), "devices_per_node": None})
    spans = step_spans(setting, slow, IDEAL)
    end = max(s.end for rank in spans for s in rank if s.action.is_compute)
    time = step_time(setting, slow, IDEAL)
    assert time.seconds == pytest.approx(end)
    assert time.bubble == pytest.approx(bubble(spans), abs=1e-9)
    assert lower_bound(setting, slow, IDEAL) <= end * (1 + 1e-9)


@pytest.mark.parametrize(
    "microbatches", [(1, 3, 4, 9), pytest.param((1, 3, 4, 9, 150), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", names())
def test_bubble_of_equal_stages_is_that_of_the_schedule(
    name: str, microbatches: tuple[int, ...]
) -> None:
    at_once = A100.model_copy(update={"link": link(1e30), "devices_per_node": None})
    for pp in (1, 2, 4):
        for count in microbatches:
            for per_rank in (1, 2):
                if why_not(name, pp, count, per_rank):
                    continue
                setting = of_products(name, pp, count, per_rank, 512)
                time = step_time(setting, at_once, IDEAL)
                expected = load(name).bubble(pp, count, per_rank)
                assert time.parts["bubble"] / time.seconds == pytest.approx(expected, abs=0.002)
                bound = lower_bound(setting, at_once, IDEAL)
                assert bound == pytest.approx(time.seconds, rel=0.002), (pp, count, per_rank)


@pytest.mark.parametrize(("count", "shares"), [(1, 1.0), (4, 16 / 14), (64, 128 / 67)])
def test_idle_ranks_leave_their_cores_to_others(count: int, shares: float) -> None:
    """Four stages on two cores: a microbatch passes them one by one, many keep both busy.

    With a core each, count + 3 passes of a stage follow one another; two cores compute 4 count / 2.
    """
    setting = new_setting(products(4, 256), 64, Shape(1, 64), count, pp=4, zero_stage=0)
    base = replace(IDEAL, overhead_per_operator=0.0)
    described = A100.model_copy(update={"link": link(1e30), "network": link(1e30)})

    def seconds(num_cores: int) -> float:
        cores = Cores(count=figure(num_cores), alone={})
        return step_time(setting, described.model_copy(update={"cores": cores}), base).seconds

    assert seconds(2) / seconds(4) == pytest.approx(shares, rel=0.02)
    assert lower_bound(setting, described, base) > 0


def test_step_of_one_rank_is_three_forwards_per_microbatch() -> None:
    setting = new_setting(products(3, 1 << 12), 64, Shape(1, 64), 5, zero_stage=0)
    rate = A100.matmul_flops["bf16"].value
    flops = 5 * 3 * 3 * 2 * 64 * 4096 * 64
    fast = A100.model_copy(update={"memory_bandwidth": figure(1e30)})
    time = step_time(setting, fast, IDEAL)
    assert time.seconds == pytest.approx(flops / rate)
    assert time.parts["compute"] == pytest.approx(time.seconds)
    # Bound by memory instead: three matrices of each product, for three products.
    slow = A100.model_copy(update={"memory_bandwidth": figure(1e6)})
    moved = 5 * 3 * 3 * 2 * (64 * 4096 * 2 + 64 * 64)
    assert step_time(setting, slow, IDEAL).seconds == pytest.approx(moved / 1e6)


@pytest.mark.parametrize("name", names())
@given(
    st.integers(1, 8), st.integers(1, 150), st.integers(1, 2), st.floats(0, 0.5), st.floats(0, 0.3)
)
@settings(max_examples=3)
def test_short_program_predicts_the_length_of_a_long_one(
    name: str, pp: int, count: int, per_rank: int, spread: float, send: float
) -> None:
    if why_not(name, pp, count, per_rank):
        return

    def cost(action: Action) -> float:
        seconds = 1 + spread * (action.stage % 3)
        match action.op:
            case Op.F | Op.B:
                return seconds if action.op == Op.F else 2 * seconds
            case _:
                return send if action.is_send else 0.0

    whole = simulate(make_schedule(name, pp, count, per_rank), cost)
    expected = [max(s.end for s in rank if s.action.is_compute) for rank in whole]
    exact = counts(pp, count)[1] == count
    seconds = [end.seconds for end in ends(ActionOrder(name, pp, count, per_rank), cost)]
    assert seconds == pytest.approx(expected, rel=1e-9 if exact else 0.03)


@given(any_setting())
@settings(max_examples=20)
def test_longer_gathered_weights_never_take_longer(setting: Setting) -> None:
    """And never less than ZeRO-1 or 2 reducing as often. The search goes by both, of this engine,
    whose gathers hide behind nothing."""
    setting = changed(setting, zero_stage=3, offload_optimizer="none", software=Software())
    seconds = [
        step_time(changed(setting, weights=weights), A100).seconds
        for weights in ("per_step", "per_pass", "per_microbatch")
    ]
    below = changed(
        setting, zero_stage=1 if setting.state.reduces_once else 2, offload_param="none"
    )
    seconds.insert(0, step_time(below, A100).seconds)
    for less, more in pairwise(seconds):
        assert less <= more * (1 + 1e-9)


def test_later_gathers_are_hidden_by_the_stage_before() -> None:
    """What a device of its own does; on the program's own cores nothing hides."""
    setting = new_setting(
        layers_of(GPT),
        GPT.hidden_size,
        Shape(4, 1024),
        8,
        pp=2,
        dp=8,
        stages_per_rank=4,
        schedule="breadth_first",
        weights="per_pass",
    )
    slow = A100.model_copy(update={"link": link(1e10)})

    def data(setting: Setting, machine: Hardware, overlap: float) -> float:
        curves = replace(curves_for(A100), overlap=overlap)
        return step_time(setting, machine, curves).parts["data"]

    seen, half, hidden = (data(setting, slow, overlap) for overlap in (0.0, 0.5, 1.0))
    assert hidden <= half < 0.95 * seen
    zero1 = changed(setting, zero_stage=1)
    assert hidden >= data(zero1, slow, 1.0) * (1 - 1e-9)  # which the search goes by
    once = changed(setting, stages_per_rank=1, schedule="gpipe")
    assert data(once, slow, 1.0) == data(once, slow, 0.0)  # the first gather hides nowhere
    cores = Cores(count=figure(2), alone={})
    shared = slow.model_copy(update={"cores": cores})
    assert data(setting, shared, 1.0) == data(setting, shared, 0.0)


def test_gather_costs_one_collective_per_layer() -> None:
    setting = new_setting(
        layers_of(GPT), GPT.hidden_size, Shape(1, 1024), 4, dp=8, weights="per_step"
    )
    curves = curves_for(A100)
    more = replace(curves, overhead_per_gather=curves.overhead_per_gather + 1e-3)
    costly, usual = (step_time(setting, A100, c).seconds for c in (more, curves))
    # The head's weight is the embedding's, but it has a norm of its own.
    assert costly - usual == pytest.approx(1e-3 * len(setting.workload.layers), rel=1e-6)


def test_gathers_of_a_step_do_not_grow_with_its_microbatches() -> None:
    few = new_setting(
        layers_of(GPT),
        GPT.hidden_size,
        Shape(1, 1024),
        4,
        pp=2,
        dp=8,
        stages_per_rank=4,
        schedule="breadth_first",
    )

    def data(weights: str, count: int) -> float:
        setting = changed(few, weights=weights, num_microbatches=count)
        return step_time(setting, A100, replace(curves_for(A100), overlap=0.0)).parts["data"]

    gather = (data("per_microbatch", 16) - data("per_microbatch", 4)) / (2 * 12)
    reduction = data("per_microbatch", 4) - 2 * 4 * gather
    for count in (4, 16):
        # Norms and biases, which per_microbatch keeps whole, come along once a step.
        assert data("per_step", count) == pytest.approx(reduction + gather, rel=0.005)
        # The first two of a rank's four stages are gathered twice.
        again = (data("per_pass", count) - reduction - gather) / gather
        assert 0.3 < again < 0.7


@pytest.mark.parametrize("window", [None, 64, 3000, 8192, 40_000])
@pytest.mark.parametrize("seq", [8192, 131_072])
def test_attention_of_a_cp_rank_is_its_share(seq: int, window: int | None) -> None:
    """Also where a window reaches further than the tokens of a rank are many."""
    machine = machine_of(hardware.load("H100-SXM5-80GB"), Software(), IDEAL)

    def seconds(cp: int) -> float:
        work = Work((), Attention(1, 8, 8, seq // cp, 64, window), 0, ())
        share = RankShare.of(new_setting((), 64, Shape(1, seq), 1, cp=cp))
        return passes._priced(work, (), share, 8, machine, ()).compute

    assert 4 * seconds(4) == pytest.approx(seconds(1), rel=0.02)
