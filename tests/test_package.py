"""What a contributor is told about the repository is so: checks, interpreters, names, licence."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.test_floors import FILES, TESTS, imports_of, tree_of

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pre_commit_runs_the_checks_of_ci():
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    lines = (ROOT / ".ci/run").read_text().splitlines()
    *static, pure = hooks
    assert static == ["ruff check .", "ruff format --check .", "mypy"]
    assert set(static) <= set(lines) and "-m pure" in pure


def test_ci_runs_on_the_interpreters_of_the_package():
    text = (ROOT / ".github/workflows/checks.yml").read_text()
    ran = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", text)[1])
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert ran == named and PROJECT["requires-python"] == f">={named[0]}"
    assert "run: .ci/run" in text and "PYTHON: python${{ matrix.python }}" in text


def test_ci_refuses_an_old_interpreter(tmp_path):
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")  # the answer to the question for the version
    old.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci/run"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "name one, as in PYTHON=python3.12" in done.stderr, done


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_named_for_contributors_exist(page):
    prose = (ROOT / page).read_text()
    for path in re.findall(r"`((?:parallel3d|tests|docs|models|launch)/[\w/.]+)`", prose):
        assert (ROOT / path).exists() or "NAME" in path, path


def test_models_have_one_import_name():
    """`import models` would be a second copy of it, and none where the wheel is installed."""
    # The few files whose text could say so are parsed: all would take seconds.
    import_of_models = re.compile(r"^\s*(import|from)\s+models\b", re.MULTILINE)
    for path in filter(
        lambda path: import_of_models.search((ROOT / path).read_text()), [*FILES, *TESTS]
    ):
        names = {name.partition(".")[0] for name in imports_of(tree_of(path))}
        assert "models" not in names, f"{path}: write `from parallel3d import models`"
    for name in ("models", "launch", "configs"):
        assert (ROOT / "parallel3d" / name).samefile(ROOT / name), "a link into the package"


def test_licence_matches_the_package():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Version 2.0, January 2004" in text and len(text.splitlines()) == 202
