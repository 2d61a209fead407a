"""The wheel: it holds the package, whole, and nothing else at top level."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[1]
SOURCES = ("parallel3d", "models", "launch", "configs")


def build(folder):
    """The wheel, from a copy in `folder`: setuptools leaves files beside what it builds.

    The copy has the links of the checkout, and a calibration of the machine's.
    """
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "configs/hardware/this-machine.json").write_text("{}")
    # As pip calls it, which takes seconds longer.
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, folder]
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_exactly_the_package(tmp_path):
    with zipfile.ZipFile(build(tmp_path)) as file:
        every = set(file.namelist())
        names = {name for name in every if ".dist-info/" not in name}
        metadata = {name.partition("/")[2]: file.read(name).decode() for name in every - names}
    expected = set()
    for folder in SOURCES:
        prefix = "" if folder == "parallel3d" else "parallel3d/"
        for path in (ROOT / folder).rglob("*"):
            is_packed = path.suffix in (".py", ".json", ".csv", ".typed")
            if is_packed and path.stem != "this-machine":
                expected.add(f"{prefix}{path.relative_to(ROOT)}")
    assert names == expected
    assert "parallel3d = parallel3d.__main__:main" in metadata["entry_points.txt"]
    assert metadata["top_level.txt"] == "parallel3d\n" and "licenses/LICENSE" in metadata
