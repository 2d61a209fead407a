"""Private names of DeepSpeed stand in one list, and the installed DeepSpeed has them."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from tests.engine.deepspeed_names import FIRST_VERSION, TRIED

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
ENGINE = sorted((ROOT / "parallel3d/engine").rglob("*.py"))
# Private names of torch, and a prefix to which tracing.py appends the names in the list.
OTHERS = {"_foreach_norm", "_get_build_directory", "_PartitionedParameterCoordinator__"}


def private_names(tree):
    """Yield the names of DeepSpeed's private attributes that a file reads, sets or spells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_ours = ast.unparse(node.value) in ("self", "cls")
            if node.attr.startswith("ds_") or (re.match("_[A-Za-z]", node.attr) and not is_ours):
                yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"_[A-Za-z]\w+|ds_\w+", str(node.value)
        ):
            yield node.value


def plain(name):
    """Return a mangled name as it stands in the class."""
    return re.sub(r"^_[A-Z]\w*?(?=__\w)", "", name)


@pytest.fixture(scope="module")
def deepspeed():
    """Return the code of the installed DeepSpeed, without importing it."""
    folder = Path(importlib.util.find_spec("deepspeed").origin).parent
    parts = [*folder.glob("*.py")]
    for name in ("runtime", "ops/adam", "comm", "utils"):
        parts += (folder / name).rglob("*.py")
    text = "\n".join(path.read_text(errors="replace") for path in parts)
    return set(re.findall(r"\w+", text))


def test_private_names_that_the_engine_uses_are_listed():
    listed = {*FIRST_VERSION, *OTHERS}
    for path in ENGINE:
        missing = set(private_names(ast.parse(path.read_text()))) - listed
        assert not missing, (
            f"{path.name}: add to tests/engine/deepspeed_names.py: {sorted(missing)}"
        )


def test_listed_names_are_used():
    text = "\n".join(path.read_text() for path in ENGINE)
    words = set(re.findall(r"\w+", text))
    unused = [x for x in FIRST_VERSION if x not in words and plain(x)[2:] not in words]
    # A name after a prefix, as in tracing.py, follows the two underscores.
    assert not [x for x in unused if plain(x)[2:] not in text]


def test_installed_deepspeed_has_the_names(deepspeed):
    missing = [name for name in FIRST_VERSION if plain(name) not in deepspeed]
    assert not missing, "DeepSpeed dropped or renamed them: see docs/deepspeed.md"


def test_allowed_versions_have_all_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (allowed,) = [line for line in project["dependencies"] if line.startswith("deepspeed")]
    assert set(FIRST_VERSION.values()) <= set(TRIED)
    newest = max(FIRST_VERSION.values(), key=TRIED.index)
    assert allowed == "deepspeed==0.19.8" and newest == "0.19.8"
