"""Tables of runs: CSV, JSON or JSON lines."""

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
    """Rows as column -> cell (text or a JSON value), each with a name: "line 7", or a run's."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """Parts of the source that are no row at all, and why."""

    def column(self, flag: str, name: str) -> str:
        """Return the column called `name`; ConfigError names the columns that exist."""
        if name in self.columns:
            return name
        near = get_close_matches(name, self.columns, 1, 0.6)
        meant = f"; is it {near[0]}? " if near else "; "
        raise ConfigError(
            f'{flag} = "{name}": no column of {self.path}{meant}its columns are: '
            f"{', '.join(self.columns)}"
        )

    def take(self, rows: Sequence[int]) -> "Table":
        """Return the table of some rows."""
        kept, names = tuple(self.rows[i] for i in rows), tuple(self.names[i] for i in rows)
        return replace(self, rows=kept, names=names)

    def where(self, conditions: Sequence[str]) -> "Table":
        """Return the rows whose cells equal all of `conditions`, each written COLUMN=VALUE."""
        found = self
        for condition in conditions:
            name, equals, value = condition.partition("=")
            if not equals:
                raise ConfigError(f'--where = "{condition}": has no value; write COLUMN=VALUE')
            column = self.column("--where", name)
            rows = [i for i, row in enumerate(found.rows) if _same(row.get(column), value)]
            if not rows:
                some = ", ".join(sorted({_text(row.get(column)) for row in found.rows})[:12])
                raise ConfigError(
                    f'--where = "{condition}": no row has it; {column} holds: {some}; name another'
                )
            found = found.take(rows)
        return found


def read(path: Path) -> Table:
    """Return the table in a file: CSV, a JSON list of objects, or one JSON object a line.

    The first bytes decide. Raises ConfigError where it cannot be read or holds no row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "no UTF-8 text"
        raise ConfigError(
            f"{path}: cannot be read as a table ({reason}); give a CSV, JSON or JSONL file, or a "
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
        raise ConfigError(f"{path}: holds no row; write one run a row below a line of column names")
    for name, row in numbered:
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, {name}: is no object; write one JSON object for each run")
    columns = dict.fromkeys(column for _, row in numbered for column in row)
    names, found = zip(*numbered, strict=True)
    return Table(path, tuple(columns), found, names)


def number(cell: Any) -> float | None:
    """Return a cell's number, nan and inf among them; None where it holds none."""
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
            f"{path}, line {line}: is no JSON ({str(problem)[:80]}); write a list of objects, or "
            "one object a line"
        ) from None


def _csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    lines = text.lstrip("\r\n ")
    skipped = text[: len(text) - len(lines)].count("\n")
    delimiter = max(",;\t", key=lines.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(lines, newline=""), delimiter=delimiter)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if twice := sorted({c for c in columns if c and columns.count(c) > 1}):
            raise ConfigError(f"{path}: {', '.join(twice)} stand twice; rename one column")
        for row in reader:
            cells, place = [cell.strip() for cell in row], f"line {reader.line_num + skipped}"
            if any(cells) and len(cells) != len(columns):
                raise ConfigError(
                    f"{path}, {place}: has {len(cells)} cells, the first line {len(columns)}; "
                    "write empty cells as such"
                )
            if any(cells):
                yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as problem:
        raise ConfigError(f"{path}: is no CSV ({problem}); write one") from None


def _text(cell: Any) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell)


def _same(cell: Any, value: str) -> bool:
    own, asked = number(cell), number(value)
    return _text(cell) == value or (own is not None and own == asked)
