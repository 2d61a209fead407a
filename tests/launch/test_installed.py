"""The wheel in an environment and a folder of their own: its commands, under each launcher."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launch.launching import Place, deepspeed, environment, torchrun
from tests.test_wheel import build

pytestmark = [pytest.mark.drill, pytest.mark.slow]

STEPS = 12


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of commands of an environment with the wheel; what it needs is this one's.

    A path file does not bring the path files of the folder that it names: so an editable install
    of the checkout, whose finder is started by one, is not there.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, build(tmp_path_factory.mktemp("built"))], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    needed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "needed.pth").write_text("\n".join(sorted(needed)))
    for name in ("deepspeed", "torchrun"):  # with this environment's interpreter
        lines = Path(sysconfig.get_path("scripts"), name).read_text().splitlines()
        (folder / "bin" / name).write_text("\n".join([f"#!{python}", *lines[1:], ""]))
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with a space in its path, and packages of the user's own."""
    place = Place(tmp_path_factory.mktemp("not the checkout"))
    for name in ("models", "launch", "configs"):
        (place.root / name).mkdir()
        (place.root / name / "__init__.py").write_text("raise ImportError('this is the user\\'s')")
    return place


@pytest.fixture
def run(installed, place):
    def run(*command, code=0):
        variables = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
        variables["PATH"] = f"{installed}{os.pathsep}{variables['PATH']}"
        variables["XDG_CONFIG_HOME"] = str(place.root / "config")
        done = subprocess.run(
            [installed / command[0], *command[1:]],
            cwd=place.root,
            env=variables,
            capture_output=True,
            text=True,
            timeout=800,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    return run


def test_installed_wheel_is_imported(run, installed):
    code = "import parallel3d, parallel3d.models as m; print(parallel3d.__file__, m.families())"
    folder, families = run("python", "-c", code).stdout.split(maxsplit=1)
    assert Path(folder).is_relative_to(installed.parent) and "gpt" in families
    code = "import sys; sys.path.remove(''); import models"
    assert "No module named 'models'" in run("python", "-c", code, code=1).stderr


@pytest.mark.parametrize(
    "launcher",
    [
        ("parallel3d",),
        ("python", "-m", "parallel3d"),
        (*torchrun(2), "-m", "parallel3d"),
        (*deepspeed(2), "--module", "parallel3d"),
    ],
    ids=["program", "python", "torchrun", "deepspeed"],
)
@pytest.mark.timeout(900)
def test_train(run, place, launcher):
    name = launcher[0]
    words = place.command((), "--parallel3d.run.name", name, steps=STEPS)
    done = run(*launcher, "train", *words[1:])
    assert [line["step"] for line in place.lines(name)] == list(range(1, STEPS + 1)), done.stderr
    assert f"parallel3d checkpoint inspect runs/{name}" in done.stderr
    report = json.loads(run("parallel3d", "checkpoint", "verify", f"runs/{name}", "--json").stdout)
    assert report["ok"]


@pytest.mark.timeout(900)
def test_plan_verify_draw_scale_and_prepare(run, place):
    gpus = ("--config", "gpt2-124m.json", "--devices", "8", "--hardware", "h100", "--json")
    assert json.loads(run("parallel3d", "plan", *gpus).stdout)["plans"][0]["fits"]
    verify = ("verify", "--config", "ds.json", "--meshes", "1x1x1,2x1x1", "--json")
    assert json.loads(run("parallel3d", *verify).stdout)["passed"]
    assert "peak in flight" in run("parallel3d", "draw", "--pp", "2").stdout
    ladder = ("scale", "plan", "--ladder", "configs/ladders/cpu.json", "--json")
    assert json.loads(run("parallel3d", *ladder).stdout)["runs"]
    words = place.command((), "--json")[1:]
    assert json.loads(run("parallel3d", "prepare", *words).stdout)["num_documents"]
    assert not run("parallel3d", "plan", "--config", "none.json", code=2).stdout
