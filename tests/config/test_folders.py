"""Model families and schedules in folders of the user's own, named by a config or a variable."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from parallel3d import models
from parallel3d.base import user_folders
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.schedule import schedules
from tests.config.configs import MINIMAL

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
GPT = (ROOT / "models/gpt/spec.py").read_text()
ONE = (ROOT / "parallel3d/schedule/schedules/gpipe.py").read_text()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders with the family "tiny" and the schedule "mine", of which nothing is known yet."""
    for package in (models, schedules):
        monkeypatch.setattr(package, "__path__", list(package.__path__))
    for variable in (user_folders.MODELS, user_folders.SCHEDULES):
        monkeypatch.setenv(variable, "")
    families = tmp_path / "my models"
    orders = tmp_path / "my schedules"
    (families / "tiny").mkdir(parents=True)
    text = GPT.replace('"gpt"', '"tiny"').replace("parallel3d.models.gpt.", "models.tiny.")
    (families / "tiny/spec.py").write_text(text)
    orders.mkdir()
    (orders / "mine.py").write_text(ONE)
    yield families, orders
    for name in ("parallel3d.models.tiny", "parallel3d.models.tiny.spec"):
        sys.modules.pop(name, None)
    sys.modules.pop(f"{schedules.__name__}.mine", None)
    schedules.load.cache_clear()


def config(families, orders, **run):
    raw = deepcopy(MINIMAL)
    block = raw["parallel3d"]
    block["model"]["family"] = "tiny"
    block["pipeline"] = {"schedule": "mine"}
    block["run"] = {"model_folders": [str(families)], "schedule_folders": [str(orders)], **run}
    return raw


def test_config_with_user_folders_is_read(folders, monkeypatch):
    assert "mine" not in schedules.names()
    with pytest.raises(ConfigError, match="is not a known model family; use one of: gpt"):
        RunConfig.from_dict(config(*folders, model_folders=[]))
    monkeypatch.chdir(folders[0].parent)
    read = RunConfig.from_dict(config("my models", "my schedules"))
    assert type(read.model).__module__ == "parallel3d.models.tiny.spec"
    assert "tiny" in models.families() and "mine" in schedules.names()
    # What is written with the run is found from any folder.
    assert RunConfig.from_dict(read.to_dict()).run.model_folders == (str(folders[0]),)


def test_started_processes_use_the_user_folders(folders):
    RunConfig.from_dict(config(*folders))
    code = (
        "from parallel3d import models; from parallel3d.schedule.schedules import load\n"
        "print(models.config_class('tiny').__module__, load('mine').__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"parallel3d.models.tiny.spec {folders[1] / 'mine.py'}\n"


def test_wrong_user_folder_is_refused_by_name(folders, tmp_path):
    (folders[0] / "gpt").mkdir()
    (folders[0] / "gpt/spec.py").touch()
    with pytest.raises(
        ConfigError, match=r"run.model_folders.*contains .gpt., a name that"
    ) as refused:
        RunConfig.from_dict(config(*folders, schedule_folders=[str(tmp_path / "none")]))
    assert "run.schedule_folders" in str(refused.value)
    assert "is not a folder; create it, or name another one" in str(refused.value)
    with pytest.raises(ConfigError, match=r"run\.model_folders"):
        RunConfig.from_dict(config(*folders, model_folders="my models"))


def test_layers_and_programs_of_user_folders_are_used(folders):
    read = RunConfig.from_dict(config(*folders)).with_vocab_size(64)
    built = {layer.build.partition(":")[0] for layer in models.layers(read.model)}
    assert "parallel3d.models.tiny.blocks" in built
    mine = schedules.make_schedule("mine", 2, 4)
    assert mine.programs == schedules.make_schedule("gpipe", 2, 4).programs
    assert json.loads(json.dumps(read.to_dict()))["parallel3d"]["pipeline"]["schedule"] == "mine"


@pytest.mark.parametrize(
    "variable", [user_folders.MODELS, user_folders.SCHEDULES, user_folders.OPTIMIZERS]
)
def test_variable_that_lists_no_folder_is_refused(monkeypatch, tmp_path, variable):
    """It had no effect, and no word was said."""
    monkeypatch.setenv(variable, f"{tmp_path}{os.pathsep}{tmp_path}/mine")
    with pytest.raises(ConfigError, match=f"variable {variable} lists {tmp_path}/mine, which is"):
        RunConfig.from_dict(MINIMAL)
    (tmp_path / "mine").mkdir()
    RunConfig.from_dict(MINIMAL)
