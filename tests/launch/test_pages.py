"""The commands of README.md and of the first pages of docs/ are right, without being run.

test_pages_run.py runs them (`-m slow`); here their scripts exist and their settings make a config
for the processes that they start.
"""

import re

import pytest

from parallel3d.config import RunConfig
from parallel3d.config.document import settings
from tests.launch.pages import NOT_RUN, PAGES, ROOT, commands, every_command, ranks_of, script_of

pytestmark = pytest.mark.pure

TRAINING = [
    command
    for command in every_command()
    if script_of(command)[0] == "launch/train.py" and "--help" not in command
]


def test_commands_are_found():
    assert len(every_command()) > 20 and len(TRAINING) > 8
    assert commands("README.md")[0] == "deepspeed launch/train.py --config ds.json"
    assert any("--run.name first" in command for command in commands("README.md"))
    assert set(NOT_RUN) <= set(every_command()), "a command that no page has any more"


@pytest.mark.parametrize("command", every_command())
def test_script_of_a_command_exists(command):
    script, _ = script_of(command)
    if script is None:
        assert command in NOT_RUN or command.startswith("touch ")
    else:
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("command", [c for c in TRAINING if "folder-or-hub" not in c])
def test_settings_of_a_command_make_a_config(command):
    _, words = script_of(command)
    words = [word for word in words if word != "--dry-run"]
    assert words[0] == "--config"
    file = "ds.json" if words[1] in ("mine.json", "runs/first/config.json") else words[1]
    config = RunConfig.from_json(file, words[2:])
    config = config.resolve(ranks_of(command))
    assert config.mesh.pp * config.mesh.dp * config.mesh.tp == ranks_of(command)


@pytest.mark.parametrize("page", [*PAGES, "docs/from-pytorch.md"])
def test_settings_named_by_a_page_exist(page):
    known = {setting.path for setting in settings()}
    named = re.findall(r"`(parallel3d\.[a-z_]+\.[a-z_]+)", (ROOT / page).read_text())
    blocks = {path.rpartition(".")[0] for path in known}
    assert [name for name in named if name not in known | blocks] == []


def test_tests_named_by_the_readme_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "README.md").read_text())
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).is_file()] == []
