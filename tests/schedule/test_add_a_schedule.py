"""docs/add-a-schedule.md: one file, and no other is edited."""

import os
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from parallel3d.schedule import schedules
from tests.plan.memory import test_peak
from tests.plan.time import test_step
from tests.schedule import test_schedules
from tests.schedule.conftest import ADDED, add_files

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
PROPERTIES = [
    test
    for name, test in vars(test_schedules).items()
    if name.startswith("test_") and "name" in signature(test).parameters
]


@pytest.mark.parametrize("name", ADDED)
def test_added_schedule_passes_the_tests_of_shipped_ones(added, name) -> None:
    assert name in schedules.names() and len(PROPERTIES) >= 5
    for test in PROPERTIES:
        others = {"full": False, "backward": 0.75}
        test(name, **{k: v for k, v in others.items() if k in signature(test).parameters})
    test_step.test_bubble_of_equal_stages_is_that_of_the_schedule(name, (1, 3, 4))
    test_peak.test_in_flight_equals_that_of_the_program(name, (1, 2, 3), (1, 2, 3, 5))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_other_file_is_edited(tmp_path) -> None:
    """The tests that look at every schedule pass in a copy of the project with two more files."""
    for name in ("parallel3d", "models", "launch", "tests", "configs", "docs", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    add_files(tmp_path / "parallel3d" / "schedule" / "schedules")
    floors = ["tests/test_floors.py", "tests/test_docs.py"]
    pure = ["tests/schedule", "tests/plan", "tests/config", "tests/published", *floors]
    raised = ["--deselect", "tests/test_floors.py::test_rooms_keep_to_their_budget"]
    for arguments in (
        ["-m", "pure and not slow", *raised, *pure],
        ["-k", "one_by_one or zb_h1", "tests/pipeline/test_every_schedule.py"],
        ["-k", "test_every_setting_appears", "tests/verify/test_parity.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n0", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
