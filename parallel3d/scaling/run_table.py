"""Tables of runs, read from CSV, JSON or JSON Lines."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.base.errors import ConfigError


@dataclass(frozen=True)
class Table:
    """A table of runs.

    rows: column -> cell, a text or a JSON value.
    names: "line 7" for a row of a file, otherwise the name of the run.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, object], ...]
    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """(name, reason) of runs without a row."""

    def column(self, flag: str, name: str) -> str:
        """Return `name` if the table has this column; otherwise raise ConfigError for the flag."""
        if name in self.columns:
            return name
        near = get_close_matches(name, self.columns, 1, 0.6)
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f'{flag} = "{name}": is not a column of {self.path}; {suggestion}its columns are: '
            f"{', '.join(self.columns)}"
        )

    def take(self, rows: Sequence[int]) -> "Table":
        """Return the table with only the rows at these indices."""
        selected, names = tuple(self.rows[i] for i in rows), tuple(self.names[i] for i in rows)
        return replace(self, rows=selected, names=names)

    def where(self, conditions: Sequence[str]) -> "Table":
        """Return the table with only the rows that meet all conditions, each COLUMN=VALUE."""
        table = self
        for condition in conditions:
            name, equals, value = condition.partition("=")
            if not equals:
                raise ConfigError(f'--where = "{condition}": has no value; write COLUMN=VALUE')
            column = self.column("--where", name)
            rows = [i for i, row in enumerate(table.rows) if _same(row.get(column), value)]
            if not rows:
                some = ", ".join(sorted({_text(row.get(column)) for row in table.rows})[:12])
                raise ConfigError(
                    f'--where = "{condition}": matches no row; use a value of {column}: {some}'
                )
            table = table.take(rows)
        return table


def read(path: Path) -> Table:
    """Read a table from a file: CSV, a JSON list of objects, or one JSON object per line.

    The first character tells which. Raises ConfigError if it cannot be read or has no row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{path}: cannot be read as a table ({reason}); use a CSV, JSON or JSONL file, or a "
            "folder of runs"
        ) from None
    start = text.lstrip()[:1]
    if start == "[":
        numbered = [(f"row {i}", row) for i, row in enumerate(_json(path, text, 1), 1)]
    elif start == "{":
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        numbered = [(f"line {i}", _json(path, line, i)) for i, line in lines]
    else:
        numbered = list(_csv(path, text))
    if not numbered:
        raise ConfigError(
            f"{path}: has no rows; write a line of column names, then one row per run"
        )
    for name, row in numbered:
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, {name}: is not an object; write one JSON object per run")
    columns = dict.fromkeys(column for _, row in numbered for column in row)
    names, cells = zip(*numbered, strict=True)
    return Table(path, tuple(columns), cells, names)


def number(cell: Any) -> float | None:
    """Return the number in a cell, which may be nan or inf; None if it holds none."""
    if isinstance(cell, bool) or cell is None:
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _json(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"{path}, line {line}: is not valid JSON ({str(problem)[:80]}); write a list of "
            "objects, or one object per line"
        ) from None


def _csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    lines = text.lstrip("\r\n ")
    skipped = text[: len(text) - len(lines)].count("\n")
    delimiter = max(",;\t", key=lines.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(lines, newline=""), delimiter=delimiter)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if twice := sorted({c for c in columns if c and columns.count(c) > 1}):
            raise ConfigError(f"{path}: has two columns named {', '.join(twice)}; rename one")
        for row in reader:
            cells, place = [cell.strip() for cell in row], f"line {reader.line_num + skipped}"
            if any(cells) and len(cells) != len(columns):
                raise ConfigError(
                    f"{path}, {place}: has {len(cells)} cells, but the first line has "
                    f"{len(columns)}; leave cells empty rather than out"
                )
            if any(cells):
                yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as problem:
        raise ConfigError(f"{path}: is not valid CSV ({problem}); correct it") from None


def _text(cell: object) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell)


def _same(cell: object, value: str) -> bool:
    cell_number = number(cell)
    return _text(cell) == value or (cell_number is not None and cell_number == number(value))
