"""What a contributor is told about the repository is so: checks, interpreters, names, licence."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_floors import FILES, TESTS, imports_of

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pre_commit_runs_the_checks_of_ci():
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = {line.partition(" >")[0] for line in lines}
    *static, pure = hooks
    assert static == ["ruff check .", "ruff format --check .", "mypy"]
    assert set(static) <= commands and "-m pure" in pure


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
        names = {name.partition(".")[0] for name in imports_of(path)}
        assert "models" not in names, f"{path}: write `from parallel3d import models`"
    for name in ("models", "launch", "configs"):
        assert (ROOT / "parallel3d" / name).samefile(ROOT / name), "a link into the package"


# Packages that come with a dependency which imports them itself, and those of an extra.
COMES_WITH = {"cpuinfo": "deepspeed", "fsspec": "datasets", "pydantic_core": "pydantic"}
OF_EXTRAS = {
    "lm_eval": ("parallel3d/extras/tasks",),
    "scipy": ("parallel3d/extras/scaling",),
}
DISTRIBUTION = {"yaml": "pyyaml"}


def requirements(extra=None):
    """Return name -> requirement of the plain dependencies, or of an extra."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {x.name: x for x in map(Requirement, lines)}


def test_commands_of_a_plain_install_import_only_plain_dependencies():
    plain = requirements()
    for path in FILES:
        for package in {name.partition(".")[0] for name in imports_of(path)}:
            if package in sys.stdlib_module_names or package in ("parallel3d", "models"):
                continue
            if path.as_posix().startswith(OF_EXTRAS.get(package, ())):
                continue
            name = COMES_WITH.get(package, DISTRIBUTION.get(package, package))
            assert name in plain, f"{path} imports {package}, no dependency of a plain install"


def test_constraints_have_a_version_in_range_of_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, requirement in {**requirements(), **requirements("test")}.items():
        key = name.lower().replace("_", "-")
        assert key in pinned, f"constraints.txt has no version of {name}"
        assert pinned[key] in requirement.specifier, f"constraints.txt: {name} is out of range"


@pytest.mark.parametrize("page", [".ci/run", "README.md", "docs/from-zero.md", "CONTRIBUTING.md"])
def test_install_takes_the_tested_versions(page):
    text = (ROOT / page).read_text()
    installs = re.findall(r"^ *(?:\S+ && )?pip install .*-e .*", text, re.MULTILINE)
    assert installs and all(" -c " in line or "docs" in line for line in installs), installs


def test_newest_torch_of_the_range_is_tested():
    """The range ends below the next release, and one job takes what is newest in it."""
    torch = requirements()["torch"].specifier
    assert "2.14.1" in torch and "2.15.0" not in torch and "2.11.0" in torch
    assert 'NEWEST: "1"' in (ROOT / ".github/workflows/checks.yml").read_text()
    assert "grep -v '^torch=='" in (ROOT / ".ci/run").read_text()


def test_licence_matches_the_package():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Version 2.0, January 2004" in text and len(text.splitlines()) == 202
