"""`parallel3d quick`: what is chosen for a machine of known speed, and what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest

from launch import quick, train
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.hardware import Hardware, Link
from parallel3d.extras.calibrate import describe, dial
from parallel3d.extras.calibrate.dial import Wishes
from parallel3d.extras.scaling.runs import count
from parallel3d.plan.report import plan_rows
from tests.calibrate.test_calibrate import planted

pytestmark = pytest.mark.gloo

# seconds
AGE = 10.0
START = 5.0
STEP = 0.5
BAD_INPUT = 2


@pytest.fixture(scope="module")
def machine():
    """A machine of two processes."""
    together = planted(2)
    alone = planted(1)
    for row in together:
        row.pop("links", None)
    figure = describe._figure
    link = Link(bandwidth=figure(1e9), latency=figure(1e-4))
    described = describe._describe(together, alone, on_gpu=False)
    return described.model_copy(update={"link": link})


@pytest.fixture
def place(machine, monkeypatch, tmp_path):
    """Where a machine, a text and the pace of steps are known without measuring."""
    monkeypatch.chdir(tmp_path)
    corpus = SimpleNamespace(train=range(1_000_000))
    monkeypatch.setattr(dial, "prepare", lambda data: corpus)
    monkeypatch.setattr(dial, "machine_of", lambda config, say: machine)
    monkeypatch.setattr(dial, "pace", lambda config: (STEP, START))
    monkeypatch.setattr(dial, "age", lambda: AGE)
    return tmp_path


@pytest.fixture
def narrow(monkeypatch):
    """The planner searches the size of microbatches alone; all choices are its own tests'."""
    fixed = {"pp": 1, "tp": 1, "schedule": "gpipe", "zero_stage": 1, "recompute": "none"}
    fixed |= {"offload_optimizer": "none", "offload_param": "none"}
    monkeypatch.setattr(plan_rows, "fixed_by", lambda config: fixed)


def chosen(*overrides, **wishes):
    """Return the written config, the number of ranks, and the messages by their first words."""
    messages = []
    base = RunConfig.from_json("ds.json", list(overrides))
    path, ranks = dial.dial(base, Wishes(**wishes), messages.append)
    config = RunConfig.from_json(str(path)).resolve(ranks).completed()
    names = dict(line.split(maxsplit=1) for line in messages)
    return config, ranks, names


def test_run_length_follows_from_measured_step_time(place):
    config, ranks, messages = chosen(minutes=20)
    evaluations = 5 * config.train.evaluate_samples / config.global_batch_size / 3
    training = config.num_steps + evaluations
    assert AGE + START + training * STEP == pytest.approx(20 * 60, abs=2 * STEP)
    assert ranks == 2 and config.mesh.sizes.ranks == 2
    # Whatever the config sets is in its file, and a second run has a name of its own.
    assert config.train.evaluate_every == config.num_steps // 5
    assert "auto" not in (config.run.name, config.model.vocab_size)
    assert " ".join(messages) == "machine model tokens data batch rate mesh pace config"
    assert "0.5 s a step, measured" in messages["pace"]
    assert messages["config"].startswith("runs/20-minutes.json")
    assert chosen(minutes=20)[0].run.name == "20-minutes-2"


@pytest.mark.usefixtures("narrow")
def test_slower_machine_trains_a_smaller_model(place, monkeypatch):
    def size(slowness):
        monkeypatch.setattr(dial, "pace", lambda config: (slowness * planned(config), START))
        return count(chosen(minutes=30)[0].model).with_head

    def planned(config):
        base = RunConfig.from_json("ds.json", [])
        chooser = dial.Chooser(base, Wishes(30), dial.machine_of(base, print))
        return chooser.candidate(config.model.num_attention_heads).plan.time.seconds

    assert size(4.0) < size(1.0) < size(0.25)


@pytest.mark.usefixtures("narrow")
def test_model_size_and_tokens_determine_each_other(place):
    config, _, _ = chosen(params=2e6)
    params = count(config.model).with_head
    assert 1e6 < params <= 2e6
    assert config.num_steps * config.tokens_per_step == pytest.approx(20 * params, rel=0.01)
    other, _, _ = chosen(tokens=20.0 * params)
    assert other.model == config.model and other.num_steps == config.num_steps
    both, _, _ = chosen(params=2e6, tokens=1e6)
    assert both.model == config.model
    assert both.num_steps * both.tokens_per_step == pytest.approx(1e6, rel=0.02)
    timed, _, messages = chosen(params=2e6, minutes=60)
    assert timed.model == config.model and timed.num_steps > 6000
    assert "use more text" in messages["data"]  # a million tokens, many times
    # The rate falls with the size, and the batch grows with the tokens.
    small, _, _ = chosen(params=3e5)
    assert small.optimizer.params.lr > config.optimizer.params.lr
    assert small.global_batch_size < config.global_batch_size


@pytest.mark.usefixtures("narrow")
def test_settings_of_the_user_are_kept(place):
    config, _, _ = chosen("--run.name", "mine", "--data.vocab_size", "512", minutes=10)
    assert config.run.name == "mine" and config.model.vocab_size == 512
    assert (place / "runs/mine.json").exists()


@pytest.mark.usefixtures("narrow")
def test_too_little_time_is_refused_with_remedy(place):
    with pytest.raises(ConfigError, match=r"--minutes = 0.5: leaves time for \d+ steps of 0.5 s"):
        chosen(minutes=0.5)
    with pytest.raises(ConfigError, match=r"use --minutes 1, or a smaller --params"):
        chosen(minutes=0.5, params=1e6)
    assert not list(place.rglob("*.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--minutes: is missing; add it, or --params 5M or --tokens 100M"),
        (["--minutes", "no"], "--minutes = no: must be a number above 0; write one such as 20"),
        (["--minutes", "0"], "--minutes = 0: must be a number above 0"),
        (["--params", "5M", "--config", "ds.json"], "--params: cannot be combined with --config"),
        (["--data", "stories"], "--minutes: is missing"),
        (["--data", "stories", "--config", "ds.json"], "--minutes: is missing"),
        (["--minutes", "1", "--config=ds.json"], "--minutes: cannot be combined with --config"),
        (["--minutes", "1", "--dry-run"], "--minutes: cannot be combined with --dry-run"),
        (["--minutes", "1", "--params", "1M", "--tokens", "1M"], "remove one"),
    ],
)
def test_contradicting_flags_are_refused(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["quick.py", *words])
    with pytest.raises(SystemExit) as ended:
        quick.main()
    assert ended.value.code == BAD_INPUT and message in capsys.readouterr().err


def test_train_without_a_config_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == BAD_INPUT
    message = "train: --config: is missing; add it, or let `parallel3d quick --minutes 20` choose"
    assert message in capsys.readouterr().err


def test_stories_are_written_as_one_file_per_book(place, monkeypatch, capsys):
    """With a stand-in for the package's program, and without it."""
    seen = []
    monkeypatch.setattr(quick.os, "execv", lambda program, words: seen.append(words))
    monkeypatch.setattr(sys, "argv", ["quick.py", "--minutes", "5", "--data", "stories"])
    monkeypatch.setenv("PATH", str(place))
    assert quick.main() == BAD_INPUT and not seen
    assert "run `apt-get install bible-kjv`" in capsys.readouterr().err
    program = place / "bible"
    program.write_text("#!/bin/sh\necho 'Ge1:1 In the beginning'\necho '1Sm12:3 Behold, here'\n")
    program.chmod(0o755)
    quick.main()
    texts = {path.name: path.read_text() for path in (place / "stories").iterdir()}
    assert texts == {"Ge.txt": "In the beginning\n", "1Sm.txt": "Behold, here\n"}
    (words,) = seen
    assert words[-2:] == ["--data.source=text", "--data.paths=stories/*.txt"]


def test_minutes_are_refused_under_a_launcher(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["quick.py", "--minutes", "5"])
    assert quick.main() == BAD_INPUT
    assert "WORLD_SIZE = 2" in capsys.readouterr().err


def test_ranks_are_started_with_the_written_config(place, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(quick.os, "execv", lambda program, words: seen.append(words))
    monkeypatch.setattr(sys, "argv", ["quick.py", "--minutes", "5", "--json", "--train.seed", "7"])
    quick.main()
    (words,) = seen
    assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = "-m parallel3d train --config runs/5-minutes.json --json --train.seed 7"
    assert " ".join(words[5:]) == command
    output = capsys.readouterr().err
    assert f"to resume the run: python {' '.join(words[1:])}" in output, "with all of its ranks"
    written = json.loads((place / "runs/5-minutes.json").read_text())
    assert written["parallel3d"]["run"]["name"] == "5-minutes"
    assert isinstance(dial.machine_of(None, print), Hardware)


def test_train_by_minutes_names_the_new_command_and_runs_it(place, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(quick.os, "execv", lambda program, words: seen.append(words))
    monkeypatch.setattr(sys, "argv", ["train.py", "--minutes", "5", "--run.name", "my run"])
    with pytest.raises(SystemExit):
        train.main()
    line, *_ = capsys.readouterr().err.splitlines()
    assert line.endswith("parallel3d quick --minutes 5 --run.name 'my run'")
    assert seen[0][-2:] == ["--run.name", "my run"]
