"""Tables and paragraphs for a terminal of any width: rows fold, nothing is cut off.

If a table is too wide, each row continues on further lines below the first, and so do the heads.
"""

import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from parallel3d.base.step_lines import finite

PIPED = 132  # width without a terminal and without COLUMNS
_GAP = "  "  # between two columns
_INDENT = 4  # before a row's further lines
_LEAST = 20  # smallest width that a text is wrapped to

Cell = str | Text


@dataclass(frozen=True)
class Column:
    """One column of a table.

    `right` aligns its cells right. `line` is the line of a row on which it stands in a narrow
    table.
    """

    head: str
    right: bool = True
    line: int = 0


def console(as_json: bool) -> Console:
    """Return a command's console, as wide as the terminal or COLUMNS; on stderr with --json."""
    out = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
    if not out.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        out.width = PIPED
    return out


def print_json(value: object) -> None:
    """Print a command's result as one line of JSON; numbers that are not finite become null."""
    print(json.dumps(finite(value), allow_nan=False))


def show(
    out: Console, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, first: str = ""
) -> None:
    """Print a table; `first` is the style of its first row."""
    for line in table(columns, rows, out.width, first=first):
        out.print(line)


def say(out: Console, text: Cell, indent: str = "") -> None:
    """Print a paragraph wrapped at spaces, so that paths stay whole; indent its further lines."""
    plain = text.plain if isinstance(text, Text) else text
    style = text.style if isinstance(text, Text) else ""
    for part in plain.split("\n"):
        lines = textwrap.wrap(
            part,
            max(out.width, _LEAST),
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
            replace_whitespace=False,
        )
        for line in lines or [""]:
            out.print(Text(line, style))


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], width: int, *, first: str = ""
) -> list[Text]:
    """Return the lines of a table, at most `width` wide unless a cell is wider."""
    cells = [[Text.assemble(cell) for cell in row] for row in rows]
    heads = [Text(column.head, "bold underline") for column in columns]
    widths = [max(text.cell_len for text in column) for column in zip(heads, *cells, strict=True)]
    texts = []
    for place, row in enumerate([heads, *cells]):
        for number, line in enumerate(_lines(columns, widths, width)):
            padded = [_padded(row[i], widths[i], columns[i].right) for i in line]
            text = Text(" " * _INDENT if number else "") + Text(_GAP).join(padded)
            text.rstrip()
            if place == 1 and first:
                text.stylize_before(first)
            texts.append(text)
    return texts


def _padded(cell: Text, width: int, right: bool) -> Text:
    pad = Text(" " * (width - cell.cell_len))
    return pad + cell if right else cell + pad


def _lines(columns: Sequence[Column], widths: list[int], width: int) -> list[list[int]]:
    """Return the columns on each line of a row: all on one if they fit, else by their `line`."""
    everything = list(range(len(columns)))

    def fits(line: list[int], room: int) -> bool:
        return sum(widths[i] for i in line) + len(_GAP) * (len(line) - 1) <= room

    if fits(everything, width):
        return [everything]
    lines: list[list[int]] = []
    for i in sorted(everything, key=lambda i: columns[i].line):
        new = not lines or columns[i].line != columns[lines[-1][-1]].line
        indent = _INDENT if len(lines) > 1 else 0
        if new or not fits([*lines[-1], i], width - indent):
            lines.append([])
        lines[-1].append(i)
    return lines
