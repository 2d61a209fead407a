"""A schedule whose backward is split: what config and planner make of it."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.plan.request import request_of
from parallel3d.plan.search import candidates
from parallel3d.plan.search.best_first import search
from parallel3d.schedule import schedules
from tests.plan.toy_cluster import config, machine

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("added")]


def on_two_ranks(schedule: str, microbatches: int, stage: int = 3, **pipeline) -> RunConfig:
    raw = config().to_dict()
    raw["zero_optimization"]["stage"] = stage
    raw |= {"train_batch_size": 16, "gradient_accumulation_steps": microbatches}
    raw["parallel3d"] |= {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule} | pipeline}
    return RunConfig.from_dict(raw).resolve(2)


def ordered(request) -> set[str]:
    """The schedules that the planner has for any flow."""
    flows = (
        f for mesh in candidates.meshes_in_turn(request)[0] for f in candidates.flows(request, mesh)
    )
    return {order.schedule for flow in flows for order in candidates.orders(request, flow)}


def test_split_backward_requires_one_reduction_per_step() -> None:
    """Asked of the file, by its ops: of one that was added, too."""
    split = {name for name in schedules.names() if schedules.splits_backward(name)}
    assert split == {"zb_h1", "zero_bubble", "zb_v"}
    assert on_two_ranks("zb_h1", 4).pipeline.schedule == "zb_h1"
    with pytest.raises(ConfigError) as refusal:
        on_two_ranks("zb_h1", 4, gradient_reduction="per_microbatch")
    problem = """gradient_reduction = "per_microbatch": does not work with schedule 'zb_h1'"""
    assert f"parallel3d.pipeline.{problem}" in str(refusal.value)
    with pytest.raises(
        ConfigError, match='= "auto": means per_microbatch at ZeRO-2, which does not'
    ):
        on_two_ranks("zb_h1", 4, stage=2)
    with pytest.raises(ConfigError, match="num_microbatches=1 on pp=2; use 2 or more"):
        on_two_ranks("zb_h1", 1)


def test_planner_knows_every_schedule_and_splits_only_with_one_reduction() -> None:
    request = request_of(config(), machine(), 4)
    assert ordered(request) == set(schedules.names())
    for name in ("one_by_one", "zb_h1"):
        ranking = search(request_of(config(), machine(), 4, {"schedule": name}), rows=8)
        assert {plan.setting.order.schedule for plan in ranking.plans} == {name}
        once = {plan.setting.state.reduces_once for plan in ranking.plans}
        assert once == ({True} if name == "zb_h1" else {True, False})


def test_independent_implementation_of_the_paper_equals_the_shipped_schedule() -> None:
    second = schedules.load("zb_h1")
    shipped = schedules.load("zero_bubble")
    for pp, count in ((1, 1), (2, 2), (3, 7), (4, 4), (8, 11)):
        assert second.schedule(pp, count, 1).programs == shipped.schedule(pp, count, 1).programs
