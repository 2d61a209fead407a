"""docs/cards: a card is of the config as it is, and names a commit that has it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from parallel3d import models
from parallel3d.base import reader
from parallel3d.config import RunConfig

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "docs" / "cards"
NAMES = sorted(path.stem for path in CARDS.glob("*.md"))


def text_of(name):
    return (CARDS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_card_is_of_the_config(name):
    """Remedy: python -m benchmarks.card NAME."""
    text = text_of(name)
    config = RunConfig.from_json(f"{name}.json")
    assert f"| parameters | {models.num_params(config.model):,}" in text
    assert f"--config {name}.json" in text
    assert "FAILED" not in text and "DIFFERS" not in text and "ANOTHER" not in text
    assert text.count("\n| ") > 8, "parity on eight meshes"


@pytest.mark.parametrize("name", NAMES)
def test_card_names_a_commit_with_the_same_config(name):
    commit = re.search(r"at commit (\w+)", text_of(name))[1]
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("the checkout has no history")
    before = reader.parse(git("show", f"{commit}:configs/{name}.json"))
    now = reader.parse((ROOT / "configs" / f"{name}.json").read_text())
    assert before == now, "python -m benchmarks.card"


def git(*words):
    command = ["git", "-C", ROOT, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
