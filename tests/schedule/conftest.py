"""Schedule files in a scratch folder, found beside the shipped ones for as long as a test runs."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from parallel3d.schedule import schedules

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "add-a-schedule.md"
ADDED = ("one_by_one", "zb_h1")  # the guide's example, and one with a split backward


def add_files(folder: Path) -> None:
    """Write the files of the schedules of ADDED."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    (folder / "one_by_one.py").write_text(code)
    shutil.copy(HERE / "zb_h1.py", folder)


def forget() -> None:
    """Let nothing be known of schedules that were looked at before."""
    for cached in (schedules.load, schedules.why_not, schedules.splits_backward):
        cached.cache_clear()
    for name in ADDED:
        sys.modules.pop(f"{schedules.__name__}.{name}", None)


@pytest.fixture
def added(tmp_path, monkeypatch):
    """The names of schedules that were added as files, and by nothing else."""
    add_files(tmp_path)
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    forget()
    yield ADDED
    forget()
