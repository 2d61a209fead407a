"""Tables and paragraphs for a terminal of any width: rows fold, nothing is cut off.

If a table is too wide, each row continues on further lines below the first, and so do the heads.
"""

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

PIPED = 132  # width without a terminal and without COLUMNS
_INDENT = 4  # largest indent of a row's further lines
_LEAST = 20  # smallest width that a text is wrapped to

Cell = str | Text


@dataclass(frozen=True)
class Column:
    """One column of a table.

    `right` aligns its cells right. `line` is the line of a row on which it stands in a narrow
    table. `wraps` wraps long cells (last column only). `rule` marks a line between columns, which
    is left out at the ends.
    """

    head: str
    right: bool = True
    line: int = 0
    wraps: bool = False
    rule: bool = False


def console(as_json: bool) -> Console:
    """Return a command's console, as wide as the terminal or COLUMNS; on stderr with --json."""
    out = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
    if not out.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        out.width = PIPED
    return out


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
        for line in _wrapped(part, out.width, indent):
            out.print(Text(line, style))


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], width: int, *, first: str = ""
) -> list[Text]:
    """Return the lines of a table, at most `width` wide; without heads if all are empty."""
    cells = [[Text.assemble(cell) for cell in row] for row in rows]
    heads = [Text(column.head, "bold underline") for column in columns]
    widths = [max(text.cell_len for text in column) for column in zip(heads, *cells, strict=True)]
    lines, gap = _lines(columns, widths, width)
    texts = []
    for place, row in enumerate([heads, *cells]):
        if place or any(column.head for column in columns if not column.rule):
            for number, line in enumerate(lines):
                indent = min(_INDENT, widths[0] + gap) if number else 0
                texts += _row(columns, row, line, widths, width, gap, indent)
                if place == 1 and first:
                    for text in texts[-1:]:
                        text.stylize_before(first)
    return texts


def _lines(columns: Sequence[Column], widths: list[int], width: int) -> tuple[list[list[int]], int]:
    """Return the columns on each line of a row, and the gap between two columns."""
    everything = list(range(len(columns)))
    least = [_LEAST if c.wraps and w > _LEAST else w for c, w in zip(columns, widths, strict=True)]
    for gap in (2, 1):
        if _width(everything, least, gap) <= width:
            return [everything], gap
    lines: list[list[int]] = [[]]

    def fits(line: list[int]) -> bool:
        room = width - (_INDENT if len(lines) > 1 else 0)
        return _width(_trimmed(columns, line), least, 2) <= room

    for number in sorted({column.line for column in columns}):
        group = [i for i in everything if columns[i].line == number]
        if not fits(lines[-1] + group):
            lines.append([])
        for i in group:
            if not fits([*lines[-1], i]):
                lines.append([])
            lines[-1].append(i)
    return [trimmed for line in lines if (trimmed := _trimmed(columns, line))], 2


def _trimmed(columns: Sequence[Column], line: list[int]) -> list[int]:
    """Return the columns of a line without the rules at its ends."""
    while line and columns[line[0]].rule:
        line = line[1:]
    while line and columns[line[-1]].rule:
        line = line[:-1]
    return line


def _width(line: list[int], widths: list[int], gap: int) -> int:
    return sum(widths[i] for i in line) + gap * (len(line) - 1)


def _row(
    columns: Sequence[Column], row: list[Text], line: list[int], widths: list[int],
    width: int, gap: int, indent: int,
) -> list[Text]:  # fmt: skip
    """Return the text of one line of a row, several if its last cell wraps."""
    line_text = Text(" " * indent)
    for place, i in enumerate(line):
        if place:
            line_text.append(" " * gap)
        if columns[i].wraps and len(line_text) + row[i].cell_len > width:
            at = len(line_text)
            first, *rest = _wrapped(row[i].plain, width - at, breaks=True)
            return [line_text.append(first), *(Text(" " * at + text) for text in rest)]
        pad = " " * (widths[i] - row[i].cell_len)
        last = place == len(line) - 1
        line_text += Text(pad) + row[i] if columns[i].right else row[i] + Text("" if last else pad)
    return [line_text]


def _wrapped(text: str, width: int, indent: str = "", breaks: bool = False) -> list[str]:
    """Return `text` wrapped at spaces; with `breaks` also within words longer than a line."""
    width = max(width, _LEAST)
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=breaks,
        drop_whitespace=True, replace_whitespace=False,
    ) or [""]  # fmt: skip
