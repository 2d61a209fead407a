"""GATHER, RELEASE and REDUCE in the programs of every schedule file found."""

from dataclasses import replace
from itertools import product

import pytest

from parallel3d.schedule.schedule import (
    Op,
    add_sharding,
    bubble,
    needs,
    simulate,
    unit_cost,
)
from parallel3d.schedule.schedules import load, make_evaluation, make_schedule, names
from parallel3d.schedule.sharding import SHARDING
from tests.schedule.blocking import most_gathered

pytestmark = pytest.mark.pure

SIZES = list(product((1, 3), (1, 2, 5), (1, 2, 3)))  # ranks, microbatches, stages per rank
USES = (Op.F, Op.B, Op.I)


def of(name):
    return [make_schedule(name, *size) for size in SIZES if not load(name).invalid(*size)]


@pytest.mark.parametrize("weights", ["per_microbatch", "per_pass", "per_step"])
@pytest.mark.parametrize("name", names())
def test_sharding_keeps_order_and_bubble_of_every_schedule(name, weights):
    for plain in of(name):
        whole = add_sharding(plain, weights, reduces_once=True)
        for before, after in zip(plain.programs, whole.programs, strict=True):
            assert tuple(a for a in after if a.op not in SHARDING) == before
        free = simulate(whole, unit_cost)  # gathers that take no time hold up nothing
        assert bubble(free) == pytest.approx(bubble(simulate(plain, unit_cost)), abs=1e-12)


@pytest.mark.parametrize("weights", ["per_pass", "per_step"])
@pytest.mark.parametrize("name", names())
def test_stage_is_gathered_before_each_use_and_reduced_once(name, weights):
    """By a walk of its own through the programs."""
    for plain in of(name):
        for whole in (
            add_sharding(plain, weights, True),
            add_sharding(make_evaluation(plain), weights, False),
        ):
            for program in whole.programs:
                held = set()
                gathers = {}
                reduced = []
                for index, (op, stage, _) in enumerate(program):
                    if op is Op.GATHER:
                        assert stage not in held
                        held.add(stage)
                        gathers[stage] = gathers.get(stage, 0) + 1
                    elif op is Op.RELEASE:
                        held.remove(stage)
                    elif op is Op.REDUCE:
                        rest = program[index:]
                        assert not any(a.op in (Op.B, Op.W) and a.stage == stage for a in rest)
                        reduced.append(stage)
                    elif op in USES:
                        assert stage in held
                assert not held
                stages = {a.stage for a in program}
                assert sorted(reduced) == (sorted(stages) if whole.has_backward else [])
                assert gathers.keys() == stages
                assert max(gathers.values()) <= (2 if weights == "per_pass" else 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_breadth_first_holds_two_stages_at_most(stages):
    schedule = make_schedule("breadth_first", 2, 3, stages)
    passes = add_sharding(schedule, "per_pass", True)
    assert [len(most_gathered(program)) for program in passes.programs] == [2, 2]
    steps = add_sharding(schedule, "per_step", True)
    assert [len(most_gathered(program)) for program in steps.programs] == [stages, stages]


def test_weights_of_the_next_stage_are_gathered_during_compute():
    schedule = add_sharding(make_schedule("breadth_first", 1, 4, 4), "per_pass", True)

    def cost(action):
        return {Op.GATHER: 3.0, Op.REDUCE: 3.0}.get(action.op, unit_cost(action))

    (spans,) = simulate(schedule, cost)
    computes = [span for span in spans if span.action.is_compute]
    first, *others = [span for span in spans if span.action.op is Op.GATHER]
    assert computes[0].start == first.end == 3.0
    # All others are there before they are needed.
    assert len(others) == 5
    busy = sum(unit_cost(span.action) for span in computes)
    assert computes[-1].end - computes[0].start == pytest.approx(busy)
    reductions = [span for span in spans if span.action.op is Op.REDUCE]
    assert [s.start < computes[-1].end for s in reductions] == [True, True, True, False]


def test_needs_of_a_compute_include_its_gather():
    schedule = add_sharding(make_schedule("gpipe", 2, 2), "per_step", True)
    first = next(a for a in schedule.programs[1] if a.op is Op.F)
    assert [a.op for a in needs(first, schedule)] == [Op.RECV_F, Op.GATHER]


def test_reduction_per_step_leaves_gathering_to_each_compute():
    plain = make_schedule("one_f_one_b", 2, 3)
    whole = add_sharding(plain, "per_microbatch", True)
    assert {a.op for p in whole.programs for a in p} & SHARDING == {Op.REDUCE}
    assert replace(whole, programs=plain.programs) == plain
    assert add_sharding(plain, "per_microbatch", False) == plain
