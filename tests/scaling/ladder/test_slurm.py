"""The job arrays of a ladder, run by bash with stand-ins for Slurm's commands and for python."""

import os
import subprocess
from pathlib import Path

import pytest

from parallel3d.extras.scaling.ladder import runner, slurm
from parallel3d.extras.scaling.ladder.plan import ladder_of
from tests.scaling.ladder.cases import write

pytestmark = pytest.mark.gloo  # it tests processes


def stand_in(folder, name, does):
    """A command of that name in front of others: gives the environment that finds it."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)
    return os.environ | {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


def calls_of(folder, script, task):
    """The commands that a task of an array comes to, each its words."""
    calls = folder / "calls"
    calls.write_text("")
    for name in ("srun", "python"):
        env = stand_in(folder, name, f'echo "$@" >> {calls}')
    stand_in(folder, "scontrol", "echo here")
    env |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    subprocess.run(["bash", script], env=env, check=True)
    return [line.split() for line in calls.read_text().splitlines()]


def test_slurm_arrays_have_every_run_once_in_order(tmp_path):
    held = [{"size": {"model": {"hidden_size": 64, "num_hidden_layers": 1}}, "tokens": 64000}]
    sizes = [
        {"model": {"hidden_size": 16, "num_hidden_layers": 1}},
        {"model": {"hidden_size": 32, "num_hidden_layers": 1}, "mesh": {"dp": 2}},
    ]
    file = write(tmp_path, sizes=sizes, held_out=held, schedule={"type": "forks"})
    ladder = ladder_of(str(file))
    *files, submit = slurm.write(ladder)
    names = ["trunk-1", "trunk-2", "fit-1", "fit-2", "held-out-1"]
    assert [path.stem for path in files] == names
    texts = {path.stem: path.read_text() for path in files}
    for rung in ladder.rungs:
        config = str(ladder.config_file(rung.run))
        (only,) = [stem for stem, text in texts.items() if config in text]
        assert only == f"{rung.run.kind}-{rung.run.devices}"
        assert f"#SBATCH --ntasks={rung.run.devices}\n" in texts[only]
    assert "#SBATCH --array=0-1\n" in texts["fit-1"]
    assert "step-" in texts["fit-1"] and "--register" in texts["held-out-1"]
    for path in (*files, submit):
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    # With a stand-in for sbatch: what is submitted, and after what.
    calls = tmp_path / "calls"
    env = stand_in(tmp_path, "sbatch", f'echo "$@" >> {calls}\nwc -l < {calls}')
    subprocess.run([submit], env=env, check=True)
    submitted = [line.split() for line in calls.read_text().splitlines()]
    assert [Path(call[-1]).stem for call in submitted] == names
    after = [next((w for w in call if w.startswith("--dep")), "") for call in submitted]
    one = "--dependency=afterok:1:2"
    two = "--dependency=afterok:3:4"
    assert after == ["", "", one, one, two]


def test_tuning_runs_are_submitted_alone(tmp_path):
    """The configs of the others depend on their losses."""
    hyperparameters = {"learning_rate": 0.01, "batch_tokens": 64, "tune": {}}
    ladder = ladder_of(str(write(tmp_path, hyperparameters=hyperparameters)))
    job, submit = slurm.write(ladder)
    assert job.stem == "tune-1" and "#SBATCH --array=0-13\n" in job.read_text()
    assert submit.read_text().count("sbatch --parsable") == 1
    assert f"{ladder.directory.absolute() / 'tuning'}/" in job.read_text()


def test_restarted_job_resumes_its_run(tmp_path):
    """A fork by the number of its newest checkpoint: "auto" may start afresh, without its trunk."""
    budgets = {"tokens": [3200, 6400]}
    ladder = ladder_of(str(write(tmp_path, schedule={"type": "forks"}, budgets=budgets)))
    slurm.write(ladder)
    runs = [rung.run for rung in ladder.rungs]
    for kind in ("trunk", "fit"):
        script = ladder.directory / f"{kind}-1.sbatch"
        for task, run in enumerate(run for run in runs if run.kind == kind):
            (call,) = calls_of(tmp_path, script, task)
            assert call[-1] == str(run.config.checkpoint.resume)
            for name in ("step-9", "step-20", "step-30.rejected", "step-40.partial"):
                (run.folder / "checkpoints" / name).mkdir(parents=True)
                if not name.endswith(".partial"):
                    (run.folder / "checkpoints" / name / "manifest.json").touch()
            (call,) = calls_of(tmp_path, script, task)
            assert call[call.index("--config") + 1] == str(ladder.config_file(run))
            assert call[-1] == ("20" if run.trunk else "auto")


def test_forecast_skips_other_held_out_runs(tmp_path):
    held = [
        {"size": {"model": {"hidden_size": 64, "num_hidden_layers": n}}, "tokens": 64000}
        for n in (1, 2, 3)
    ]
    ladder = ladder_of(str(write(tmp_path, held_out=held)))
    slurm.write(ladder)
    script = ladder.directory / "held-out-1.sbatch"
    runs = [rung.run for rung in ladder.rungs if rung.run.kind == "held-out"]
    own, *others = [ladder.forecast_file(run) for run in runs]
    outs = set()
    for task in range(3):
        fit, predict, _ = calls_of(tmp_path, script, task)
        assert fit[:3] == [str(runner.TRAIN.with_name("scale.py")), "fit", str(ladder.directory)]
        assert not [word for word in fit if word.startswith("--forecasts")]  # there are none
        folder = fit[fit.index("--out") + 1]
        assert predict[predict.index("--fit") + 1] == f"{folder}/fit.json"
        outs.add(folder)
    assert len(outs) == 3  # they may run at once
    for file in others:
        file.touch()
    fit, predict, _ = calls_of(tmp_path, script, 0)
    assert fit[-2:] == [f"--forecasts={file}" for file in others]
    assert predict[predict.index("--register") + 1] == str(own)
    assert len(calls_of(tmp_path, script, 1)) == 1  # the forecast is there: it trains
