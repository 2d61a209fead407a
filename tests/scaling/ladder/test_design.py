"""`plan --design` from the command: the ladder keeps the rules, and takes the hours asked for."""

import json
import sys
from math import sqrt

import numpy as np
import pytest

from launch import scale
from parallel3d.extras.scaling.ladder import design
from parallel3d.extras.scaling.ladder.plan import ladder_of

pytestmark = pytest.mark.pure

MUP = {"type": "mup", "base_width": 64}


def base(folder, model=None, **others):
    """A config of a llama of width 64 on the CPU, or of what `model` changes."""
    shape = {
        "family": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 160,
        "max_position_embeddings": 64,
    }
    block = {
        "model": shape | (model or {}),
        "data": {"source": "python-stdlib", "vocab_size": 512, "sequence_length": 64},
        "train": {"steps": 100, "lr_schedule": {"type": "cosine"}, "digest_every": 7},
    }
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": "run" in others},
        "parallel3d": block | others,
    }
    (folder / "base.json").write_text(json.dumps(raw))
    return folder / "base.json"


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """The exit code, the object of --json or None, and the messages."""

    monkeypatch.setattr(design, "LADDERS", 10)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["scale.py", "plan", *map(str, arguments), "--json"])
        try:
            code = scale.main()
        except SystemExit as error:
            code = error.code
        out, messages = capsys.readouterr()
        return code, json.loads(out) if out else None, " ".join(messages.split())

    return command


def by_budget(ladder):
    """Budget -> sizes N of its runs, of the ladder's file."""
    sizes = {}
    for rung in ladder.rungs:
        if rung.run.kind == "fit":
            sizes.setdefault(float(rung.run.name.split("-c")[1]), []).append(
                rung.run.counts.with_head
            )
    return sizes


def test_design_keeps_the_rules(plan, tmp_path):
    out = tmp_path / "mine.json"
    file = base(tmp_path, {"parametrization": MUP})
    code, printed, messages = plan(
        "--design", "--base", file, "--flops", 4e14, "--factor", 12, "--out", out, "--parallel", 2
    )
    assert code == 0, messages
    ladder = ladder_of(str(out))
    sizes = by_budget(ladder)
    budgets = sorted(sizes)
    assert len(budgets) == 6 and budgets[-1] / budgets[0] > 30
    assert budgets[-1] == pytest.approx(4e14 / 12, rel=0.02)
    for budget, params in sizes.items():
        ratios = np.array(params) / sqrt(budget / 6 / 20)
        assert (ratios < 1).sum() >= 2 <= (ratios > 1).sum()
        assert 1 / 4 < ratios.min() < 1 / 2 and 2 < ratios.max() < 4
    runs = [rung.run for rung in ladder.rungs]
    held, tune = ([run for run in runs if run.kind == kind] for kind in ("held-out", "tune"))
    assert held[0].flops == pytest.approx(4e14, rel=0.01) and held[0].devices == 2
    assert held[0].flops >= 12 * max(run.flops for run in runs if run.kind == "fit")
    assert held[0].counts.with_head == pytest.approx(sqrt(4e14 / 120), rel=0.2)
    assert {run.budget for run in tune} == set(budgets[:2]) and len(tune) == 14
    models = [run.config.model for run in runs]
    assert {model.num_hidden_layers for model in models} == {4}, "muP without base_depth"
    assert all(abs(model.intermediate_size / model.hidden_size - 2.5) < 0.1 for model in models)
    assert {run.config.optimizer.params.lr for run in runs if run.kind == "fit"} == {0.02}
    assert {run.config.train.digest_every for run in runs} == {7}
    assert printed["total"]["runs"] == len(runs) and printed["design"]["simulated"] == 10
    assert (
        "learning rate: 0.02 (muP), batch: step-law; 14 runs tune" in messages
        and "12.1 times the largest" in messages
    )


def test_forecast_run_takes_the_hours_asked_for():
    """Of a machine that does 1e15 FLOPs an hour."""
    flops = design.flops_for(5.0, lambda flops: ({}, [], flops / 1e15))
    assert flops == pytest.approx(5e15, rel=0.03) and flops <= 5e15


@pytest.mark.slow  # the ladder is expanded for each of many budgets
def test_hours_on_known_hardware_set_the_budgets(plan, tmp_path):
    model = {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 2560,
    }
    data = {"source": "python-stdlib", "vocab_size": 512, "sequence_length": 64 * 16}
    model["max_position_embeddings"] = 64 * 16
    file = base(tmp_path, model, data=data, run={"hardware": "A100-SXM4-80GB"})
    code, printed, messages = plan(
        "--design",
        "--base",
        file,
        "--hours",
        5,
        "--parallel",
        4,
        "--out",
        tmp_path / "gpu.json",
        "--budgets",
        7,
    )
    assert code == 0, messages
    hours = sum(
        (run["hours"] + 10 / 3600) / (1 if run["kind"] == "held-out" else 4)
        for run in printed["runs"]
    )
    # A prime number of samples in a batch is trained one by one, so the hours go in steps.
    assert 3.5 < hours < 5.1 and printed["design"]["hours"] == pytest.approx(hours)
    ladder = ladder_of(str(tmp_path / "gpu.json"))
    assert len(by_budget(ladder)) == 7
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["hyperparameters"]["learning_rate"] == "step-law"
    for run in (rung.run for rung in ladder.rungs):
        model = run.config.model
        assert model.num_hidden_layers == max(1, round(model.hidden_size / 64))
        assert model.num_attention_heads == 4 * model.num_key_value_heads


@pytest.mark.slow  # by default ten ladders are simulated in the test of the rules
def test_simulated_interval_holds_and_grows_with_noise(plan, tmp_path, monkeypatch):
    out = tmp_path / "mine.json"
    plan("--design", "--base", base(tmp_path), "--flops", 1e15, "--out", out)
    runs = [rung.run for rung in ladder_of(str(out)).rungs]
    fitted, target = ([run for run in runs if run.kind == kind] for kind in ("fit", "held-out"))
    widths = {}
    for noise, ladders in ((0.001, 50), (0.003, 200)):
        monkeypatch.setattr(design, "LADDERS", ladders)
        halves, held = zip(*design.simulate(fitted, target[0], noise), strict=True)
        widths[noise] = np.median(halves)
        assert len(held) > 0.85 * ladders and (ladders < 200 or 0.92 <= np.mean(held) <= 0.99)
    assert 1.8 < widths[0.003] / widths[0.001] < 4


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ({}, ["--flops", 4e11], "FLOPs has 1 and 2 sizes below and above its best one, about 2,9"),
        ({}, [], "--design: needs --base FILE, --out FILE and one of --hours and --flops"),
        ({}, ["--flops", 1e14, "--hours", 1], "one of --hours and --flops, without --ladder"),
        ({"hidden_size": None}, ["--flops", 1e14], "are [4, 0, 4], whose proportions"),
        ({"hidden_size": 66}, ["--flops", 1e14], "the width as a multiple of the heads"),
        ({}, ["--hours", 1], "the speed of this machine is not known; run `parallel3d plan"),
        ({}, ["--flops", 1e14, "--budgets", 5], "--budgets = 5: is too small; use 6 or more"),
    ],
)
def test_impossible_design_is_refused(model, flags, words, plan, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # without a calibrated machine
    flags = ["--design", "--base", base(tmp_path, model), "--out", tmp_path / "out.json", *flags]
    code, _, messages = plan(*flags)
    assert code == 2 and words in messages, messages
    assert not (tmp_path / "out.json").exists()


def test_existing_ladder_is_not_overwritten(plan, tmp_path):
    file = base(tmp_path)
    code, _, messages = plan("--design", "--base", file, "--flops", 1e14, "--out", file)
    assert code == 2 and "exists; name a new file" in messages
    assert "needs --base FILE" in plan()[2]
