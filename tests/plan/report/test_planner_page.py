"""What docs/planner.md shows is what the planner prints today."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from launch import plan

pytestmark = [pytest.mark.pure, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = (Path(__file__).parents[3] / "docs/planner.md").read_text()
LARGE = "--config gpt3-175b.json --hardware a100-80gb --devices 1024"
SHOWN = {
    f"{LARGE} --rows 3": "gpt of 175B",
    "--config gpt3-13b.json --hardware a100-40gb --devices 64": "faster, but too large",
    "--config gpt3-13b.json --hardware a100-80gb --devices 64 --explain 1"
    " --fix pp=4 dp=8 tp=2 schedule=one_f_one_b recompute=none": "gpt of 12.9B",
}


@pytest.mark.parametrize("arguments", SHOWN)
def test_page_shows_the_printed_text(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan.py", *shlex.split(arguments)])
    monkeypatch.setenv("COLUMNS", "150")
    assert not plan.main()
    printed = capsys.readouterr().out
    begin = SHOWN[arguments]
    block = re.search(rf"(?m)^    {begin}.*\n(?:(?:    .*)?\n)*?(?=\S)", PAGE)
    lines = [line.strip() for line in block[0].splitlines() if line.strip()]
    assert len(lines) > 5
    assert [line for line in lines if line not in printed] == []
