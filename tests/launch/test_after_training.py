"""A run with an average of its weights: what it saves, says and exports, computed by numpy."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch import checkpoint, convert
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.huggingface.source import CheckpointSource
from tests.checkpoint.drill import LENGTH, changed, prepared_config
from tests.launch.pages import ROOT
from tests.train.held_out import held_out_loss
from tests.train.running import folder_of, start_all

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

STEPS = 4
DECAY = 0.7
BEGINS = 2  # in the run that has an average from its third step on
CHANGES = {
    "parallel3d.train.steps": STEPS,
    "parallel3d.checkpoint.at": [1, 2, 3, 4],
    "parallel3d.checkpoint.asynchronous": False,
    "parallel3d.pipeline.activation_checkpointing": "none",
    "gradient_accumulation_steps": 1,
    "zero_optimization.stage": 1,
}
EMA = {"parallel3d.train.ema": {"decay": DECAY, "every": 1}}


@dataclass
class Trained:
    """A run's config, and its masters and averages after each step by name."""

    raw: dict
    masters: list
    averages: list

    @property
    def folder(self):
        return folder_of(self.raw)


def read(folder, is_ema):
    source = CheckpointSource(folder, is_ema)
    names = source.state["parameters"]
    return {name: source.read(name).numpy().copy() for name in names}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run with an average from the start, and one that is given it when it goes on."""
    root = tmp_path_factory.mktemp("after-training")
    raw = changed(prepared_config(root), CHANGES)
    whole, later = (changed(raw, {"parallel3d.run.name": name}) for name in ("whole", "later"))
    first = changed(later, {"parallel3d.train.stop_after": BEGINS})
    launches = [(changed(whole, EMA),), (first,), (changed(later, EMA),)]
    for (ended,) in start_all(launches, (1, 1, 1)):
        assert not ended.error, ended.error
    runs = []
    for name, named in (("whole", whole), ("later", later)):
        steps = [folder_of(named) / f"checkpoints/step-{n}" for n in range(1, STEPS + 1)]
        has_average = steps if name == "whole" else steps[BEGINS:]
        runs.append(
            Trained(
                changed(named, EMA),
                [read(step, False) for step in steps],
                [read(step, True) for step in has_average],
            )
        )
    return runs


def test_average_follows_the_weights_of_the_checkpoints(trained):
    whole, later = trained
    for run, first in ((whole, 1), (later, BEGINS)):
        # The weights before the first step are not saved: of a whole run begin after step 1.
        own = dict(run.averages[0] if run is whole else run.masters[BEGINS - 1])
        rest = run.averages[1:] if run is whole else run.averages
        for masters, averages in zip(run.masters[first:], rest, strict=True):
            for name, master in masters.items():
                own[name] = DECAY * own[name].astype(np.float64) + (1 - DECAY) * master
                assert np.abs(own[name] - averages[name]).max() < 1e-6
                assert np.abs(master - averages[name]).max() > 1e-5
                own[name] = averages[name]


def test_save_costs_the_bytes_of_the_average(trained, called):
    whole, later = trained
    sizes = []
    for run in (whole, later):
        folder = run.folder / f"checkpoints/step-{BEGINS}"
        code, printed, _ = called(checkpoint.main, "checkpoint", "inspect", folder, "--json")
        assert code == 0
        sizes.append(json.loads(printed)["bytes"])
    with_average, without = sizes
    assert with_average["ema"] == with_average["master"] > 0 and "ema" not in without
    header = with_average["other"] - without["other"]
    assert with_average["total"] - without["total"] == with_average["ema"] + header
    assert header < 120 * len(whole.masters[0]) + 200
    code, printed, _ = called(checkpoint.main, "checkpoint", "verify", whole.folder)
    assert code == 0 and printed.count(" ok ") == STEPS


def test_export_of_the_average_has_the_logged_loss(trained, called, tmp_path):
    whole, later = trained
    out = tmp_path / "weights"
    code, printed, _ = called(convert.main, "convert", "export", whole.folder, "--ema", "--to", out)
    assert code == 0, printed
    (tmp_path / "config.json").write_text((whole.folder / "config.json").read_text())
    corpus = prepare(RunConfig.from_dict(whole.raw).data)
    mean, error = held_out_loss(tmp_path, corpus, samples=8, length=LENGTH)
    line = json.loads((whole.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["held_out_loss_ema"] == pytest.approx(mean, rel=1e-5)
    assert line["validation"]["held_out_ema"]["standard_error"] == pytest.approx(error, rel=1e-4)
    assert abs(line["held_out_loss"] - mean) > 1e-4
    card = (out / "README.md").read_text()
    assert f"decay {DECAY}" in card and f"held-out loss | {mean:.4f}" in card
    step = later.folder / "checkpoints/step-1"
    code, _, error = called(
        convert.main, "convert", "export", step, "--ema", "--to", tmp_path / "no"
    )
    assert code == 2 and "has no average of the weights" in error and "leave out --ema" in error
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("words", "steps", "weights"),
    [
        pytest.param(["--last", "3"], [2, 3, 4], None, marks=pytest.mark.slow),
        (["--steps", "4", "1", "--weights", "1", "3"], [4, 1], [1, 3]),
    ],
)
def test_average_of_checkpoints_equals_numpy_on_their_exports(
    words, steps, weights, trained, called, tmp_path
):
    run = trained[0].folder
    exports = []
    for step in steps:
        out = tmp_path / str(step)
        folder = run / f"checkpoints/step-{step}"
        assert called(convert.main, "convert", "export", folder, "--to", out)[0] == 0
        exports.append(load_file(out / "model.safetensors"))
    code, printed, _ = called(
        checkpoint.main, "c", "average", run, *words, "--to", tmp_path / "mean"
    )
    assert code == 0, printed
    mean = load_file(tmp_path / "mean/model.safetensors")
    assert mean.keys() == exports[0].keys()
    for name, value in mean.items():
        stack = np.stack([export[name] for export in exports]).astype(np.float64)
        wanted = np.average(stack, axis=0, weights=weights).astype(np.float32)
        assert np.array_equal(value, wanted), name
    card = (tmp_path / "mean/README.md").read_text()
    assert all(f"{step} ({w})" in card for step, w in zip(steps, weights or [1, 1, 1], strict=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--last", "9"], "--last = 9"),
        (["--steps", "1", "7"], "no checkpoint of step 7; use those of 1, 2, 3, 4"),
        (["--last", "2", "--weights", "1"], "for each of the 2 checkpoints"),
        (["--last", "2", "--weights", "1", "inf"], "--weights = "),
    ],
)
def test_bad_average_gets_one_message_and_writes_nothing(words, message, trained, called, tmp_path):
    run = trained[0].folder
    code, _, error = called(checkpoint.main, "c", "average", run, *words, "--to", tmp_path / "out")
    assert code == 2 and message in error and len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_average_of_different_models_is_refused(trained, called, tmp_path, monkeypatch):
    """A run's folder into which a checkpoint of another model was copied."""
    run = trained[0].folder
    made = CheckpointSource.__init__

    def other(self, path, is_ema=False):
        made(self, path, is_ema)
        if path.name == "step-3":
            model = self.config.model.model_copy(update={"embd_pdrop": 0.5})
            block = self.config.parallel3d.model_copy(update={"model": model})
            self.config = self.config.model_copy(update={"parallel3d": block})

    monkeypatch.setattr(CheckpointSource, "__init__", other)
    code, _, error = called(
        checkpoint.main, "c", "average", run, "--last", "2", "--to", tmp_path / "out"
    )
    assert code == 2 and "average checkpoints of one model" in error


def commands_of(*chapters):
    """Return the commands that the chapters of docs/after-training.md tell a reader to type."""
    page = (ROOT / "docs/after-training.md").read_text()
    texts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    lines = [line for chapter in chapters for line in texts[chapter].splitlines()]
    return [line.strip() for line in lines if line.startswith("    parallel3d ")]


@pytest.mark.slow
def test_commands_of_the_page_run_one_after_another(tmp_path):
    """On a small model in place of ds.json's; its own runs are in a folder beside it."""
    raw = prepared_config(tmp_path)
    raw = changed(raw, {"parallel3d.train.steps": 100, "parallel3d.run.directory": "runs"})
    (tmp_path / "ds.json").write_text(json.dumps(raw))
    commands = commands_of("Averaged weights", "Why did the loss jump?")
    assert len(commands) == 5
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    for name in ("averaged-weights", "average", "weighted-average"):
        assert (tmp_path / name / "model.safetensors").is_file()
    assert (tmp_path / "runs/averaged/report.html").is_file()
