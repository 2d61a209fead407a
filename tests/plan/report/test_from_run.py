"""`parallel3d plan --from-run`: one measured mesh corrects the plans of the others."""

import json
import sys

import pytest

from launch import plan as command
from parallel3d.plan.report import from_run
from parallel3d.plan.report.explain_run import explain_run, planned_parts
from parallel3d.plan.report.from_run import Correction, correction_of
from parallel3d.plan.report.plan_rows import as_written
from parallel3d.plan.request import request_of
from parallel3d.plan.search.best_first import search
from parallel3d.plan.time.step import step_time
from tests.plan.report.test_explain_run import as_planned, plan_of
from tests.plan.toy_cluster import config, machine

pytestmark = pytest.mark.pure


def on(plan, hardware):
    """The plan of the same setting on other hardware."""
    request = request_of(plan.request.config, hardware, plan.request.devices)
    return as_written(plan.request.config, request)


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)])
def test_run_of_a_slower_machine_corrects_all_other_meshes(mesh, monkeypatch):
    """From one mesh's parts alone every mesh is planned half as much slower as that one."""
    monkeypatch.setattr(from_run, "LEAST_SHARE", 0.01)
    plan = plan_of(mesh=mesh)
    slower = Correction({"compute": 1.6, "reduction": 2.5}, 0.002).applied(machine())
    measured = Correction({"compute": 1.6**2, "reduction": 2.5**2}, 0.002).applied(machine())
    ranks = as_planned(on(plan, measured))
    for rank in ranks:  # a run's host time is in "rest", where no plan has any
        rank["optimizer"] -= 0.002
        rank["rest"] += 0.002
    correction = correction_of(plan, explain_run(plan, ranks))
    corrected = correction.applied(machine())
    compared = 0
    for other in search(request_of(config(batch=64), machine(), 4), rows=8).plans:
        before, after, true = (
            step_time(other.setting, hardware).seconds
            for hardware in (machine(), corrected, slower)
        )
        assert after == pytest.approx(true, rel=0.03)
        compared += abs(before / true - 1) > 0.2
    assert compared >= 5


def test_run_as_fast_as_planned_corrects_nothing():
    plan = plan_of()
    correction = correction_of(plan, explain_run(plan, as_planned(plan)))
    assert all(factor == pytest.approx(1) for factor in correction.factors.values())
    again = on(plan, correction.applied(plan.request.hardware))
    assert again.time.seconds == pytest.approx(plan.time.seconds)


def test_parts_that_are_short_in_the_plan_correct_nothing():
    """A wait for another rank would be taken for a slow link, which other meshes depend on."""
    plan = plan_of(mesh=(1, 4))
    assert 0 < planned_parts(plan)[0]["reduction"] < 0.1 * plan.time.seconds
    ranks = as_planned(plan)
    for rank in ranks:
        rank["reduction"] *= 5
    assert "reduction" not in correction_of(plan, explain_run(plan, ranks)).factors


def test_command_plans_with_the_run(tmp_path, monkeypatch, capsys):
    plan = plan_of(mesh=(1, 4))
    ranks = as_planned(plan)
    for rank in ranks:
        rank["forward"] *= 2
        rank["backward"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(plan.request.config.to_public_dict()))
    parts = {"event": "step_parts", "step": 5, "steps": 5, "ranks": ranks}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(parts)}\n")
    toy = tmp_path / "toy.json"
    toy.write_text(plan.request.hardware.model_dump_json(exclude_none=True))
    words = ["plan", "--from-run", str(tmp_path), "--hardware", str(toy), "--json", "--fix", "pp=1"]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 0
    printed = capsys.readouterr()
    (first, *_) = json.loads(printed.out)["plans"]
    assert f"corrected by {tmp_path}: compute 1.41 times" in printed.err.replace("\n", " ")
    uncorrected = search(request_of(config(batch=64), machine(), 4, {"pp": 1}), rows=1).plans[0]
    assert first["step_seconds"] > 1.2 * uncorrected.time.seconds
