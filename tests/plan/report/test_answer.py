"""The functions behind the planner's page in a browser, called here without one."""

import importlib.util
import json
from pathlib import Path

import pytest

from parallel3d.base.reader import CONFIGS

pytestmark = pytest.mark.pure

ANSWER = Path(__file__).parents[3] / "docs/plan_page/answer.py"


def test_page_has_rows_and_parts_of_an_answer(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("answer", ANSWER)
    assert spec and spec.loader
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
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
