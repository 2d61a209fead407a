"""A schedule whose backward is split is drawn; config and planner leave it alone."""

import runpy
import sys
from pathlib import Path

import pytest

from parallel3d.config import RunConfig
from parallel3d.errors import ConfigError
from parallel3d.plan.search import candidates
from parallel3d.plan.search.best_first import search
from parallel3d.plan.search.plans import request_of
from parallel3d.schedule import schedules
from parallel3d.schedule.action import RUNNABLE, Op
from tests.plan.toy_cluster import config, machine
from tests.schedule.conftest import forget

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("added")]

DRAW = Path(__file__).parents[2] / "launch" / "draw.py"


def on_two_ranks(schedule: str, microbatches: int) -> RunConfig:
    raw = config().to_dict()
    raw |= {"train_batch_size": 16, "gradient_accumulation_steps": microbatches}
    raw["parallel3d"] |= {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}
    return RunConfig.from_dict(raw).resolve(2)


def ordered(request) -> set[str]:
    """The schedules that the planner has for any flow."""
    flows = (f for mesh in candidates.meshes(request) for f in candidates.flows(request, mesh))
    return {order.schedule for flow in flows for order in candidates.orders(request, flow)}


def test_the_config_refuses_it_with_one_message() -> None:
    assert on_two_ranks("one_by_one", 4).pipeline.schedule == "one_by_one"
    with pytest.raises(ConfigError) as refusal:
        on_two_ranks("zb_h1", 4)
    assert str(refusal.value).endswith(
        'parallel3d.pipeline.schedule = "zb_h1": cannot run: its ops I and W can only be drawn and '
        "simulated; use gpipe or one_by_one or one_f_one_b"
    )
    with pytest.raises(ConfigError, match="num_microbatches=1 on pp=2; use 2 or more"):
        on_two_ranks("zb_h1", 1)


def test_the_planner_has_what_can_be_run_and_nothing_else(monkeypatch) -> None:
    request = request_of(config(), machine(), 4)
    runnable = set(schedules.names()) - {"zb_h1"}
    assert ordered(request) == runnable
    with pytest.raises(ConfigError, match="no schedule can be run with schedule=zb_h1; fix less"):
        search(request_of(config(), machine(), 4, {"schedule": "zb_h1"}))
    found = search(request_of(config(), machine(), 4, {"schedule": "one_by_one"}), rows=2)
    assert {plan.setting.schedule for plan in found.plans} == {"one_by_one"}
    # It is the ops that keep it out.
    monkeypatch.setattr(schedules, "RUNNABLE", RUNNABLE | {Op.I, Op.W})
    forget()
    assert ordered(request_of(config(), machine(), 4)) == runnable | {"zb_h1"}


def test_the_planner_knows_from_a_short_list_what_the_whole_one_says() -> None:
    """Also where a schedule is not valid for so few microbatches."""
    for name in schedules.names():
        for pp, count, per_rank in ((1, 1, 1), (4, 3, 1), (4, 40, 1), (4, 40, 2), (8, 8, 2)):
            sizes = pp, count, per_rank
            expected = schedules.why_not(name, *sizes) is None
            assert candidates.runs(name, *sizes) == expected, (name, sizes)


def test_it_is_drawn(monkeypatch, capsys) -> None:
    arguments = ["--schedule", "zb_h1", "--pp", "3", "--microbatches", "3"]
    monkeypatch.setattr(sys, "argv", [str(DRAW), *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(DRAW), run_name="__main__")
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "rank 1  ····1F0 1F1 ····1I0 1F2 1I1 1W0 1I2 1W1 1W2" in out
    assert "bubble          18.2%" in out
