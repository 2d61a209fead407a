"""The functions behind the planner's page in a browser, called here without one."""

import importlib.util
import json
from pathlib import Path

import pytest

from parallel3d.base.reader import CONFIGS
from parallel3d.models.transformers import facts, spec

pytestmark = pytest.mark.pure

PAGE = Path(__file__).parents[3] / "docs/plan_page"


def module(name):
    """A file of the page, as a module."""
    source = importlib.util.spec_from_file_location(name, PAGE / f"{name}.py")
    assert source and source.loader
    own = importlib.util.module_from_spec(source)
    source.loader.exec_module(own)
    return own


@pytest.mark.slow
def test_models_of_transformers_are_planned_by_bundled_answers(tmp_path, monkeypatch):
    text = (CONFIGS / "pythia-70m.json").read_text()
    (tmp_path / "answers.json").write_text(json.dumps(module("build").answers([text])))
    page = module("answer")
    assert "pythia-70m" in json.loads(page.choices())["configs"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr(facts, "asked", None)
    monkeypatch.setattr(spec, "asked", None)
    spec.costs_of.cache_clear()
    page.use_answers(tmp_path / "answers.json")
    parts: dict[str, str] = {}
    words = "--hardware a100-80gb --devices 8 --rows 2"
    page.answer(text, words, "1x4x2", 100, parts.__setitem__)
    assert len(json.loads(parts["json"])["plans"]) == 2
    parts.clear()
    page.answer(text.replace("2048", "1536"), words, "", 100, parts.__setitem__)
    assert parts.keys() == {"error"} and "is not in this page" in parts["error"]


def test_page_has_rows_and_parts_of_an_answer(tmp_path, monkeypatch):
    page = module("answer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [])
    parts: dict[str, str] = {}
    config = (CONFIGS / "gpt2-1.5b.json").read_text()
    words = (
        "--hardware a100-80gb --devices 2 --rows 2 --explain 2 --fix recompute=none micro_batch=4"
    )
    page.answer(config, words, "2x1x1", 100, parts.__setitem__)
    assert parts.keys() == {"table", "json", "parts", "why", "drawing"}
    assert len(json.loads(parts["json"])["plans"]) == 2
    assert "longer" in parts["why"] and parts["drawing"].startswith("<svg")
    parts.clear()
    page.answer(config, "--hardware abacus", "", 100, parts.__setitem__)
    assert parts.keys() == {"error"} and "abacus" in parts["error"]
