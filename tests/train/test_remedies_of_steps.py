"""Remedies about steps, trackers and evaluations; each is done as it is written, and helps."""

import inspect
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import tracking

from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import RunConfig
from parallel3d.config.normalise import apply_overrides
from parallel3d.config.parallel3d_block import TrainConfig
from parallel3d.data.split import SPLIT_FORMAT
from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer
from parallel3d.mesh.launch import Launch
from parallel3d.plan.report.explain_run import measured_parts
from parallel3d.train import evaluate_checkpoint
from parallel3d.train.bad_steps import BadSteps
from parallel3d.train.dry_run import dry_run
from parallel3d.train.ending import DONE
from parallel3d.train.evaluate_checkpoint import refuse_other_text
from parallel3d.train.inputs import missing_inputs
from tests.checkpoint.drill import changed, prepared_config
from tests.config.configs import raw
from tests.remedies import refused
from tests.train.running import folder_of, start, start_all
from tests.train.test_lost_folders import replace
from tests.train.test_trackers import ONE, installed, started  # noqa: F401

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]


def test_fp32_is_a_remedy_of_half_precision_only():
    """The config is another one then, which the run can go on with."""
    for precision, is_named in (("fp32", False), ("bf16", True), ("fp16", True)):
        judge = BadSteps(TrainConfig(steps=1), precision=precision).judge
        remedy = judge({"loss": [1.0]}, 1.0, math.nan).remedy
        assert remedy.startswith("The losses are finite. Lower optimizer.params.lr")
        assert ("or try fp32" in remedy) == is_named
    fp32 = raw(**{"bf16": {"enabled": True}}) | {"bf16": {"enabled": False}}
    assert RunConfig.from_dict(fp32).precision == "fp32"


def test_package_of_a_tracker_is_installed(tmp_path, installed, monkeypatch):  # noqa: F811
    """Also accelerate, if it is too old for the tracker."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    messages: list[str] = []
    wanted = {"parallel3d.run.trackers": ["wandb"]}
    started(tmp_path, messages, **wanted).finish()
    assert "pip install wandb, or remove it" in messages.pop()
    known = tracking.LOGGER_TYPE_TO_CLASS.pop("wandb")
    try:
        started(tmp_path, messages, **wanted).finish()
        assert "pip install --upgrade accelerate, or remove it" in messages.pop()
    finally:
        tracking.LOGGER_TYPE_TO_CLASS["wandb"] = known
    installed("wandb")
    running = started(tmp_path, messages, **wanted)
    running.log(ONE, 1)
    running.finish()
    started(tmp_path, messages, **{"parallel3d.run.trackers": []}).finish()
    assert not messages


def test_hardware_is_named_for_the_time_of_a_dry_run(capsys):
    launch = Launch(rank=0, world_size=4, local_rank=0)
    for named, is_timed in ({}, False), ({"parallel3d.run.hardware": "A100-SXM4-80GB"}, True):
        config = RunConfig.from_dict(raw(**named | {"bf16": {"enabled": True}}))
        assert dry_run(config, launch, devices=0, as_json=False) == 0
        words = " ".join(capsys.readouterr().out.split())
        remedy = "or name its hardware with --parallel3d.run.hardware"
        assert (remedy not in words) == is_timed, words


def test_evaluated_text_has_the_tokenizer_and_the_split_of_the_run(tmp_path):
    trained = train_tokenizer(["the cat sat on the mat"], 270)
    other = train_tokenizer(["a dog ran"], 262)
    for name, tokenizer in {"own": trained, "other": other}.items():
        save_tokenizer(tokenizer, tmp_path / name)
    state = {"tokenizer": tokenizer_digest(tmp_path / "own"), "corpus": "key"}
    source = SimpleNamespace(folder=tmp_path / "step-1", state=state | {"split": SPLIT_FORMAT})

    def read(tokenizer: str, held_out: str = "x") -> str:
        """Return what is said of a text that is not refused."""
        notes: list[str] = []
        corpus = SimpleNamespace(
            tokenizer_directory=tmp_path / tokenizer, key="key", held_out=held_out
        )
        refuse_other_text(source, corpus, notes.append)
        return " ".join(notes)

    with refused("use its data.tokenizer"):
        read("other")
    assert not read("own")
    shutil.copytree(tmp_path / "own", tmp_path / "step-1/tokenizer")
    with refused(f"add --data.tokenizer {tmp_path}/step-1/tokenizer"):
        read("other")
    assert not read("step-1/tokenizer")
    # The first versions did not say how they split.
    source.state = state
    with refused("add --data.held_out_fraction 0, and evaluate validation sets"):
        read("own")
    assert not read("own", held_out="")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return prepared_config(tmp_path_factory.mktemp("remedies of steps"))


@pytest.mark.slow  # four runs
def test_finished_run_is_made_longer_or_has_another_name(config):
    def named(name, steps):
        return changed(config, {"parallel3d.run.name": name, "parallel3d.train.steps": steps})

    runs = [named("done", 2), named("done", 2), named("done", 3), named("new", 2)]
    first, again, longer, new = (ended for (ended,) in start_all([(x,) for x in runs], (1, 1, 1)))
    assert [ended.code for ended in (first, again, longer, new)] == [DONE] * 4
    assert len(first.samples) == 2 * len(longer.samples) == len(new.samples)
    assert not again.samples


@pytest.mark.slow  # four starts of a process
@pytest.mark.parametrize("is_put_back", [True, False])
def test_replaced_folder_is_put_back_or_begun_anew(config, is_put_back):
    raw = changed(config, {"parallel3d.run.name": f"replaced-{is_put_back}"})
    folder = folder_of(raw)
    raw["parallel3d"]["checkpoint"]["every"] = 1
    (ended,) = start(raw, (1, 1, 1), replace, str(folder))
    assert "put it back, or start the same command again to begin anew" in ended.error
    if is_put_back:
        shutil.rmtree(folder)
        shutil.move(f"{folder}-old", folder)
    (again,) = start(raw, (1, 1, 1))
    assert (again.code, again.error) == (DONE, "")
    assert Path(folder, "config.json").is_file()


def test_inputs_that_a_dry_run_misses_are_named_as_it_says(tmp_path, monkeypatch):
    """By the dry run, before a run is stopped by them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    text = {"sequence_length": 128, "source": "text"}

    def missing(**changes):
        return " ".join(missing_inputs(RunConfig.from_dict(raw(**changes))))

    rows = [
        ("parallel3d.checkpoint.resume", "none/step-1", "name a checkpoint", "folder"),
        ("parallel3d.run.directory", "file/runs", "use a writable folder", "folder/runs"),
        ("parallel3d.data", text | {"paths": ["b.txt"]}, "use the path", text | {"paths": "a.txt"}),
        (
            "parallel3d.data",
            text | {"paths": "a.txt", "tokenizer": "./none"},
            "or for text 'train'",
            text | {"paths": "a.txt", "tokenizer": "train"},
        ),
        (
            "parallel3d.data",
            text | {"paths": "a.txt", "cache": "file"},
            "name a folder",
            text | {"paths": "a.txt", "cache": "folder"},
        ),
    ]
    for path, wrong, remedy, right in rows:
        assert remedy in missing(**{path: wrong})
        assert not missing(**{path: right})


@pytest.mark.slow  # two runs
def test_step_is_measured_by_the_flags_that_the_message_names(config):
    bare = changed(config, {"parallel3d.run.name": "bare"})
    start(bare, (1, 1, 1))
    with refused("run it with --wall_clock_breakdown true --steps_per_print 5") as refusal:
        measured_parts(folder_of(bare))
    named = changed(config, {"parallel3d.run.name": "named", "parallel3d.train.steps": 10})
    words = re.search(r"run it with (.*) for ten steps", refusal.text)[1]
    apply_overrides(named, words.split())
    start(named, (1, 1, 1))
    (rank,) = measured_parts(folder_of(named))
    assert rank["forward"] > 0


def test_set_to_evaluate_is_added_as_the_message_writes_it():
    source = inspect.getsource(evaluate_checkpoint.evaluate)
    shown = "".join(re.findall(r"'(.*)'\n", source.partition("add one: ")[2])).replace("\\'", "'")
    words = shlex.split(shown)
    assert words[0] == "--data.validation"
    changed_config = raw()
    apply_overrides(changed_config, words)
    assert RunConfig.from_dict(changed_config).data.validation["mine"].paths == ("mine/*.txt",)
