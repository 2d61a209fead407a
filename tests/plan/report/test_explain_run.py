"""`parallel3d plan --explain-run`: the part of a measured step that is slower than planned."""

import json
import sys

import pytest

from launch import plan as command
from parallel3d.base.errors import ConfigError
from parallel3d.base.journal import COMPUTE_KINDS
from parallel3d.config import RunConfig
from parallel3d.plan.report.explain_run import (
    OTHERS,
    explain_run,
    measured_parts,
    planned_kinds,
    planned_parts,
)
from parallel3d.plan.report.plan_rows import as_written
from parallel3d.plan.request import request_of
from tests.plan.toy_cluster import config, machine

pytestmark = pytest.mark.pure


def plan_of(cores=0, micro_batch=4, offload="none", mesh=(2, 2), read_ahead=2):
    raw = config(batch=64).to_dict()
    raw["parallel3d"]["data"]["read_ahead"] = read_ahead
    raw["train_micro_batch_size_per_gpu"] = micro_batch
    raw["zero_optimization"]["offload_optimizer"] = {"device": offload}
    raw["parallel3d"]["mesh"] = dict(zip(("pp", "dp"), mesh, strict=True))
    ranks = mesh[0] * mesh[1]
    resolved = RunConfig.from_dict(raw).resolve(ranks)
    return as_written(resolved, request_of(resolved, machine(cores=cores), ranks))


def as_planned(plan):
    """The parts of each rank of a run that is as fast as its plan, two ranks a coordinate."""
    ranks = []
    for pp, parts in enumerate(planned_parts(plan)):
        compute = parts.pop("compute")
        own = {"pp_coord": pp, "forward": compute / 3, "backward": compute * 2 / 3, **parts}
        ranks += [dict(own), dict(own)]
    return ranks


def test_planned_parts_add_up_to_the_planned_step():
    plan = plan_of()
    for parts in planned_parts(plan):
        assert sum(parts.values()) == pytest.approx(plan.time.seconds, rel=1e-6)
    explained = explain_run(plan, as_planned(plan))
    assert explained.part == "" and explained.excess == 0 and explained.rank is None
    measured, planned = map(sum, zip(*explained.seconds.values(), strict=True))
    assert measured == pytest.approx(planned) == pytest.approx(plan.time.seconds)


@pytest.mark.parametrize(
    ("name", "part", "setting"),
    [
        ("slow rank", "slow rank", "this rank's host"),
        ("fewer threads", "compute", "OMP_NUM_THREADS"),
        ("slow loader", "data", "parallel3d.data.cache"),
        ("slow link of the pipeline", "waiting", ""),
        ("slow link of the replicas", "reduction", ""),
        ("slow update", "optimizer", ""),
    ],
)
def test_part_with_a_planted_excess_is_named(name, part, setting):
    """A rank waits for a slow one at the next collective: its time is in the others' waits."""
    plan = plan_of(cores=4)
    ranks = as_planned(plan)
    lost = 0.3 * plan.time.seconds
    for place, rank in enumerate(ranks):
        if name == "slow rank" and place == 2:
            rank["backward"] += lost
        elif name == "slow rank":
            rank["reduction"] += lost
        elif name == "fewer threads":
            rank["forward"] *= 1.5
            rank["backward"] *= 1.5
        elif name == "slow loader" and place != 1:
            rank["waiting"] += lost
        else:
            rank[part] += lost
    explained = explain_run(plan, ranks)
    assert explained.part == part and setting in explained.setting
    assert explained.rank == (2 if name == "slow rank" else None)
    if name != "fewer threads":
        assert explained.excess == pytest.approx(lost)


def test_link_is_named_where_no_setting_saves_much():
    plan = plan_of()
    ranks = as_planned(plan)
    for rank in ranks:
        rank["reduction"] += 3 * plan.time.seconds
    explained = explain_run(plan, ranks)
    assert explained.setting.startswith("the link between its ranks")
    assert explained.gain == pytest.approx(explained.excess)


def test_run_that_is_as_slow_as_planned_is_told_the_best_setting():
    small = explain_run(plan_of(micro_batch=1), as_planned(plan_of(micro_batch=1)))
    assert small.setting.startswith("micro batch ") and small.gain > 0
    offloaded = plan_of(offload="cpu")
    told = explain_run(offloaded, as_planned(offloaded))
    assert told.setting == "optimizer on none"
    without = plan_of()
    assert told.gain == pytest.approx(offloaded.time.seconds - without.time.seconds, rel=1e-6)


def test_time_without_a_core_is_neither_compute_nor_wait():
    """Another program has half of one rank's core; the other ranks wait for it."""
    plan = plan_of(cores=4)
    ranks = as_planned(plan)
    lost = 0.5 * plan.time.seconds
    for place, rank in enumerate(ranks):
        if place == 2:
            rank["backward"] += lost
            rank["without core"] = lost
        else:
            rank["reduction"] += lost
    explained = explain_run(plan, ranks)
    assert explained.part == ""
    assert explained.seconds[OTHERS] == (lost, 0.0)
    for rank in ranks:
        rank.pop("without core", None)
    assert explain_run(plan, ranks).part == "slow rank"


def test_reading_ahead_is_named_where_it_hides_reads():
    """It hides reads that are long now and then, and never more than the rest of the step."""
    plan = plan_of(read_ahead=0)
    ranks = as_planned(plan)
    for rank in ranks:
        rank["data"] = 2 * plan.time.seconds
    told = explain_run(plan, ranks)
    assert told.setting == "parallel3d.data.read_ahead: 2 instead of 0"
    assert told.gain == pytest.approx(plan.time.seconds)
    assert told.excess == pytest.approx(2 * plan.time.seconds)
    plan = plan_of()
    for rank in ranks:
        rank["data spread"] = 4 * plan.time.seconds
        rank["steps"] = 100
    told = explain_run(plan, ranks)
    assert told.setting.startswith("parallel3d.data.read_ahead: more than 2")


def test_excess_within_its_spread_is_not_named():
    plan = plan_of()
    ranks = as_planned(plan)
    lost = 0.3 * plan.time.seconds
    for rank in ranks:
        rank["data"] += lost
        rank["steps"] = 4
        rank["data spread"] = 1.1 * lost
    assert explain_run(plan, ranks).part == "", "two standard errors are all of it"
    for rank in ranks:
        rank["data spread"] = lost / 2
    told = explain_run(plan, ranks)
    assert told.part == "data" and told.errors["data"] == pytest.approx(lost / 4)


def test_slow_rank_is_named_beyond_the_spread_of_both_ranks():
    """The others' passes are measured, too, so that a difference has the errors of both."""
    plan = plan_of()
    ranks = as_planned(plan)
    lost = 0.3 * plan.time.seconds
    ranks[2]["forward"] += lost
    for rank in ranks:
        rank["steps"] = 4
        rank["forward spread"] = 0.8 * lost
    told = explain_run(plan, ranks)
    assert told.part == "" and told.errors["slow rank"] == pytest.approx(0.4 * 2**0.5 * lost)
    for rank in ranks:
        rank["forward spread"] = 0.6 * lost
    assert explain_run(plan, ranks).part == "slow rank"


@pytest.mark.parametrize("name", [*COMPUTE_KINDS])
def test_kind_of_operation_with_the_largest_excess_is_named(name):
    plan = plan_of(cores=4)
    ranks = as_planned(plan)
    for rank in ranks:
        kinds = planned_kinds(plan, rank["pp_coord"])
        compute = sum(kinds.values())
        assert compute == pytest.approx(rank["forward"] + rank["backward"])
        rank["forward"] += compute
        rank |= kinds
        rank[name] += compute
    told = explain_run(plan, ranks)
    assert (told.part, told.kind) == ("compute", name)
    measured, planned = told.kinds[name]
    assert measured - planned == pytest.approx(told.excess)


def test_threads_are_compared_with_the_cores_of_a_rank():
    plan = plan_of(cores=4, mesh=(1, 2))
    ranks = as_planned(plan)
    for rank in ranks:
        rank["forward"] *= 3
        rank["threads"] = 1
    told = explain_run(plan, ranks)
    assert told.setting == "OMP_NUM_THREADS: 2 for each rank instead of 1"
    for rank in ranks:
        rank["threads"] = 2
    assert "OMP_NUM_THREADS" not in explain_run(plan, ranks).setting


def test_command_reads_a_run_and_refuses_one_without_parts(tmp_path, monkeypatch, capsys):
    plan = plan_of(mesh=(1, 1))
    own = plan.request.config
    (tmp_path / "config.json").write_text(json.dumps(own.to_public_dict()))
    (ranks,) = planned_parts(plan)
    compute = ranks.pop("compute")
    rank = {"pp_coord": 0, "forward": compute, "backward": 0.0, **ranks, "data": plan.time.seconds}
    launch = {"event": "launch", "step": 0}
    parts = {"event": "step_parts", "step": 5, "steps": 5, "ranks": [rank]}
    journal = tmp_path / "events.jsonl"
    journal.write_text(f"{json.dumps(launch)}\n")
    with pytest.raises(ConfigError, match="has no parts of a step; run it with --wall_clock_bre"):
        measured_parts(tmp_path)
    with pytest.raises(ConfigError, match="name the folder of a run"):
        measured_parts(tmp_path / "other")
    journal.write_text(f"{json.dumps(launch)}\n{json.dumps(parts)}\n")
    toy = tmp_path / "toy.json"
    toy.write_text(plan.request.hardware.model_dump_json(exclude_none=True))
    words = ["plan", "--explain-run", str(tmp_path), "--hardware", str(toy), "--json"]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["part"] == "data" and answer["parts"]["data"]["measured"] == plan.time.seconds
    assert "largest excess: data" in printed.err and "data.cache" in printed.err
