"""The core alone: with parallel3d/extras removed, a run trains, saves, resumes and is exported."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.launch.launching import PYTHON, Place, become, environment, fork

pytestmark = pytest.mark.drill

ROOT = Path(__file__).parents[2]
STOPPED = 3


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with a copy of the package, as a wheel has it, without extras."""
    folder = tmp_path_factory.mktemp("core")

    def left_out(path, names):
        return ["extras"] if Path(path) == ROOT / "parallel3d" else []

    shutil.copytree(ROOT / "parallel3d", folder / "parallel3d", ignore=left_out)
    return folder


def run_command(package, words, folder, log):
    """Run `parallel3d` of the package in this process, which was forked with torch loaded."""
    become(["parallel3d", *words], folder, log, environment())
    for name in list(sys.modules):
        if name.partition(".")[0] in ("parallel3d", "launch"):
            del sys.modules[name]
    # An editable install would find the checkout's.
    sys.modules["parallel3d.extras"] = None
    sys.path.insert(0, str(package))
    from parallel3d import __main__ as program

    assert Path(program.__file__).is_relative_to(package)
    os._exit(program.main())


# A resumption imports nothing above its floor: tests/test_floors.py.
@pytest.mark.parametrize("is_resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_run_is_trained_resumed_and_exported(package, tmp_path, is_resumed):
    place = Place(tmp_path)
    log = tmp_path / "log.txt"

    def code_of(*words):
        process = fork(run_command, package, words, tmp_path, log)
        process.join(200)
        process.kill()
        return process.exitcode

    steps = [1, 2, 3] if is_resumed else [1]
    _, _, *settings = place.command(PYTHON, steps=len(steps))
    for name in ("num_hidden_layers", "num_attention_heads"):
        settings += [f"--model.{name}", "2"]
    settings += ["--model.hidden_size", "32", "--data.sequence_length", "32", "--run.name", "core"]
    settings += ["--train.evaluate_samples", "8", "--zero_optimization.stage", "1"]
    settings += ["--zero_optimization.offload_optimizer.device", "none"]
    if is_resumed:
        assert code_of("train", *settings, "--train.stop_after", "2") == STOPPED, log.read_text()
    assert code_of("train", *settings) == 0, log.read_text()
    assert [line["step"] for line in place.lines("core")] == steps
    assert code_of("convert", "export", "runs/core", "--to", "exported") == 0, log.read_text()
    weights = load_file(tmp_path / "runs/core/weights/model.safetensors")
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert weights.keys() == exported.keys()
    assert all((weights[name] == exported[name]).all() for name in weights)
