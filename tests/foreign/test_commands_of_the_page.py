"""The commands of docs/coming-from.md for each origin of a run, run as they stand there."""

import re
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from launch import convert
from parallel3d.checkpoint.describe import describe, find_checkpoints
from parallel3d.verify.local_ranks import run_locally
from tests.foreign import sources
from tests.foreign.plain import Run

pytestmark = pytest.mark.gloo

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
COMMANDS = {}
for line in PAGE.read_text().splitlines():
    match = re.fullmatch(r"    python launch/convert\.py (checkpoint .+?)\s+# (.+)", line)
    if match:
        COMMANDS[match[2]] = shlex.split(match[1])


def test_page_has_a_command_for_each_origin():
    assert list(COMMANDS) == ["DeepSpeed", "torch (DCP)", "Trainer"]


def make(origin, folder):
    """Make the source of a command where it looks for it."""
    if origin == "DeepSpeed":
        windows = sources.samples(folder.parent / "ds.json")
        run_locally(sources.by_deepspeed, 1, folder, windows, 1)
    elif origin == "Trainer":
        Run().save_as_trainer(folder)
    else:
        Run().save(folder)


@pytest.mark.parametrize("origin", COMMANDS)
def test_command_of_the_page_converts(tmp_path, monkeypatch, origin):
    words = COMMANDS[origin]
    sources.write_config(tmp_path, warmup=None if origin == "DeepSpeed" else 0)
    make(origin, tmp_path / words[1])
    monkeypatch.chdir(tmp_path)
    with patch.object(sys, "argv", ["convert.py", *words]):
        assert convert.main() == 0
    (checkpoint,) = find_checkpoints(Path("runs/moved"))
    shown = describe(checkpoint)
    assert (shown["step"], shown["next_sample"], shown["optimizer_steps"]) == (3, 12, 3)
