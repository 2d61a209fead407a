"""Each remedy about a run's folder, its attempts and evaluations is applied as it is written."""

import inspect
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.train import claim as claims
from parallel3d.train.claim import Attempts
from parallel3d.train.digests import compare_runs
from parallel3d.train.evaluate_checkpoint import evaluation_config
from tests.remedies import refused
from tests.train.test_claim import ELASTIC, KEPT, NAME, RESUME, claim, leave, place, read  # noqa: F401
from tests.train.test_evaluation_config import block_of

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from parallel3d.base.lock import Lock
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.train import claim
asked = RunConfig.from_json("ds.json", [])
held = claim.claim(asked, asked.resolve(1), Launch(0, 1, 0), print)
print("held", flush=True)
time.sleep(100)
"""


def test_folder_of_runs_is_a_writable_one(place):  # noqa: F811
    place.write_text("a file")
    with refused("use a writable folder"):
        claim()
    assert claim("--parallel3d.run.directory", place.with_name("elsewhere"))


def test_folder_of_a_run_is_mended_or_elsewhere(place):  # noqa: F811
    place.mkdir()
    (place / "mine").write_text("a file")
    named = ("--parallel3d.run.name", "mine")
    with refused("mend it, or set parallel3d.run.directory to another folder"):
        claim(*named)
    assert claim(*named, "--parallel3d.run.directory", place.with_name("elsewhere"))
    (place / "mine").unlink()
    assert claim(*named)


def test_existing_name_is_changed_or_resumed(place):  # noqa: F811
    named = ("--parallel3d.run.name", "mine")
    leave(claim(*named), *named)
    with refused('use another name, or resume "auto"'):
        claim(*named, RESUME, "none")
    assert claim(*named, RESUME, "auto").folder == Path("runs/mine")
    assert claim("--parallel3d.run.name", "other", RESUME, "none").folder == Path("runs/other")


def test_step_of_an_existing_run_is_named(place):  # noqa: F811
    named = ("--parallel3d.run.name", "mine")
    with refused("set parallel3d.run.name to that run, or use the path of a checkpoint"):
        claim(RESUME, 3)
    leave(claim(*named), *named, stopped=False)
    claimed = claim(*named, RESUME, 3)
    assert claimed.folder == Path("runs/mine")
    claimed.lock.release()
    assert claim(RESUME, "runs/mine/checkpoints/step-3").folder.name == NAME


def test_other_launch_is_stopped_or_left_alone(place):  # noqa: F811
    """By the command that the message shows, while the other one is still starting."""
    code = ["-c", HOLD]
    other = subprocess.Popen([sys.executable, *code], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with refused("For a second run of the same config add --parallel3d.run.name NAME") as caught:
        claim()
    assert claim("--parallel3d.run.name", "NAME").folder == Path("runs/NAME")
    pid = re.search(r"stop it \(`kill (\d+)`", caught.text)
    assert int(pid[1]) == other.pid
    other.send_signal(signal.SIGTERM)
    other.wait()
    assert claim().folder.name == NAME


def test_restarts_have_a_run_to_find(place):  # noqa: F811
    launch = Launch(0, 1, 0, restarts_left=1)
    path = "runs/other/checkpoints/step-4"
    for resume in ("none", path):
        with refused('use "auto", or the path of a checkpoint together with parallel3d.run.name'):
            claims.check_restarts(read(RESUME, resume), launch)
    claims.check_restarts(read(RESUME, "auto"), launch)
    for own in (launch, ELASTIC):
        mended = read(
            RESUME, path, "--run.name", "mine", *KEPT, "--gradient_accumulation_steps", "null"
        )
        claims.check_restarts(mended, own)


def test_elastic_launch_has_a_batch(place):  # noqa: F811
    accumulation = "--gradient_accumulation_steps"
    micro = "--train_micro_batch_size_per_gpu"
    with refused("set it together with one of"):
        claims.check_restarts(read("--train_batch_size", "null"), ELASTIC)
    for name, other in ((micro, accumulation), (accumulation, micro)):
        mended = read("--train_batch_size", 16, name, 2, other, "null")
        claims.check_restarts(mended, ELASTIC)
        assert claims.resolve_config(mended, ELASTIC).global_batch_size == 16


def test_variable_of_torchrun_is_one_that_it_reads():
    """The message says to set it; the agents then say that ranks use a store of their own."""
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in inspect.getsource(dynamic_rendezvous)
    assert "TORCHELASTIC_USE_AGENT_STORE" in inspect.getsource(
        sys.modules["torch.distributed.elastic.agent.server.local_elastic_agent"]
    ) + inspect.getsource(api)


def test_run_that_failed_three_times_is_tried_again(tmp_path):
    file = tmp_path / "attempts.json"

    def start(settings):
        """Begin an attempt, and return the number of failed ones that it records."""
        Attempts(tmp_path, settings).begin(7)
        return len(json.loads(file.read_text())["deaths"])

    assert [start({}) for _ in range(3)] == [0, 1, 2]
    with refused(f"change the config, or remove {file} to try again"):
        start({})
    assert start({"lr": 1.0}) == 0
    file.unlink()
    assert start({}) == 0


def test_runs_that_overlap_are_compared(tmp_path):
    for name, steps in {"a": (1, 2), "b": (3,), "c": (2, 3), "d": ()}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 2.0, "grad_norm": 1.0}) for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    with refused("use the folder of a run"):
        compare_runs(tmp_path / "a", tmp_path / "d")
    with refused("use two runs that overlap"):
        compare_runs(tmp_path / "a", tmp_path / "b")
    assert compare_runs(tmp_path / "a", tmp_path / "c")["steps"] == 1


def test_evaluated_model_is_the_trained_one(tmp_path):
    from parallel3d.checkpoint.manifest import STATE
    from tests.config.configs import raw

    trained = raw(**{"parallel3d.model": block_of("gpt", {})})
    (tmp_path / STATE).write_text(json.dumps({"config": RunConfig.from_dict(trained).to_dict()}))
    other = raw(**{"parallel3d.model": block_of("gpt", {"max_position_embeddings": 512})})
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(other))
    alone = Launch(0, 1, 0)
    with refused("use the model as it was trained, or leave out --config"):
        evaluation_config(tmp_path, alone, file=str(file))
    evaluation_config(tmp_path, alone)
    file.write_text(json.dumps(trained))
    evaluation_config(tmp_path, alone, file=str(file))
