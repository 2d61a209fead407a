"""Tables and paragraphs at any width: nothing wider than the terminal, nothing left out."""

import re
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch import plan
from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.plan.report import plan_rows

pytestmark = pytest.mark.pure

FIGURE = re.compile(r"[\d,]*\.?\d+[a-zA-Z%]*")


def lines_at(width: int, columns: list[Column], rows: list[list[str]]) -> list[str]:
    return [line.plain for line in terminal.table(columns, rows, width)]


def test_printed_json_has_null_for_numbers_that_json_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.print_json({"loss": float("nan"), "each": [1.5, float("-inf")]})
    assert capsys.readouterr().out == '{"loss": null, "each": [1.5, null]}\n'


def test_fitting_table_has_one_line_per_row() -> None:
    columns = [Column("#"), Column("name", right=False, line=1), Column("GiB")]
    assert lines_at(40, columns, [["1", "a b", "72.4"], ["10", "c", "8.0"]]) == [
        " #  name   GiB",
        " 1  a b   72.4",
        "10  c      8.0",
    ]


def test_wide_table_folds_rows_by_the_lines_of_its_columns() -> None:
    columns = [Column("#"), Column("name", right=False, line=1), Column("GiB")]
    assert lines_at(11, columns, [["1", "a b c d", "72.4"], ["10", "c", "8.0"]]) == [
        " #   GiB",
        "    name",
        " 1  72.4",
        "    a b c d",
        "10   8.0",
        "    c",
    ]


cells = st.text(alphabet="0123456789", min_size=1, max_size=9)
tables = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 2), min_size=n, max_size=n),
        st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=3),
    )
)


@given(tables, st.integers(14, 120))
def test_lines_fit_and_no_cell_is_lost(table, width) -> None:
    lines, rows = table
    columns = [Column(f"h{place}", line=line) for place, line in enumerate(lines)]
    table_lines = lines_at(width, columns, rows)
    assert max(map(len, table_lines)) <= width
    heads = [f"h{place}" for place in range(len(columns))]
    expected = [*heads, *(cell for row in rows for cell in row)]
    assert sorted(" ".join(table_lines).split()) == sorted(expected)


def screen(monkeypatch, capsys, width: int, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["plan.py", "--config", "gpt2-1.5b", "--hardware", "a100-40gb", "--devices", "8"]
    monkeypatch.setattr(sys, "argv", [*words, *arguments])
    assert plan.main() == plan.DONE
    return capsys.readouterr().out


TABLE = ("--fix", "pp=2")  # enough for rows that do not fit, and for most parts


@pytest.fixture(scope="module")
def planned_once() -> Iterator[None]:
    """All screens are of the same plans."""
    plans = []
    find = plan_rows.rank_plans

    def once(*asked):
        if not plans:
            plans.append(find(*asked))
        return plans[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_rows, "rank_plans", once)
        yield


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("narrow", [80, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [TABLE, (*TABLE, "--explain", "1")], ids=["table", "row"])
def test_planner_screens_have_every_figure_at_every_width(
    monkeypatch, capsys, arguments, narrow
) -> None:
    screens = {w: screen(monkeypatch, capsys, w, *arguments) for w in (narrow, 140)}
    for width, text in screens.items():
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
    wide_figures = sorted(FIGURE.findall(screens[140]))
    narrow_figures = sorted(FIGURE.findall(screens[narrow]))
    assert len(wide_figures) > 30
    assert narrow_figures == wide_figures
    heads = ("GiB", "bubble", "tokens/s", "MFU", "TFLOP/s")
    assert all(head in text for head in heads for text in screens.values())


def test_piped_console_is_wide(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.console(as_json=True).width == terminal.PIPED
    monkeypatch.setenv("COLUMNS", "90")
    assert terminal.console(as_json=True).width == 90


def test_paragraph_is_wrapped_at_words(capsys) -> None:
    terminal.say(
        Console(width=30, soft_wrap=True), "the first of the lines and then the rest", "    "
    )
    assert capsys.readouterr().out == "the first of the lines and\n    then the rest\n"
