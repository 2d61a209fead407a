"""Tables of runs: CSV, JSON or JSON lines."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.base.errors import ConfigError

LARGEST = 64 * 2**20  # bytes of a table that are read


@dataclass(frozen=True)
class Table:
    """Rows as column -> cell (text or a JSON value), each with a name: "line 7", or a run's."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """What of the source is no row at all, and why."""

    def column(self, flag: str, name: str) -> str:
        """The column called `name`; ConfigError names the columns that exist."""
        if name in self.columns:
            return name
        near = get_close_matches(name, self.columns, 1, 0.6)
        meant = f"; is it {near[0]}? " if near else "; "
        raise ConfigError(
            f'{flag} = "{name}": no column of {self.path}{meant}its columns are: '
            f"{', '.join(self.columns)}"
        )

    def where(self, conditions: Sequence[str]) -> "Table":
        """The rows whose cells equal all of `conditions`, each written COLUMN=VALUE."""
        keep = set(range(len(self.rows)))
        for condition in conditions:
            name, equals, value = condition.partition("=")
            if not equals:
                raise ConfigError(f'--where = "{condition}": has no value; write COLUMN=VALUE')
            column = self.column("--where", name)
            held = {_text(row.get(column)) for row in self.rows}
            keep &= {i for i, row in enumerate(self.rows) if _same(row.get(column), value)}
            if not any(_same(cell, value) for cell in held):
                some = ", ".join(sorted(held)[:12])
                raise ConfigError(f'--where = "{condition}": no row has it; {column} holds: {some}')
        if not keep:
            raise ConfigError(f"--where: no row has {' and '.join(conditions)}; leave one out")
        kept = sorted(keep)
        rows, names = [tuple(of[i] for i in kept) for of in (self.rows, self.names)]
        return Table(self.path, self.columns, rows, names, self.left_out)  # type: ignore[arg-type]


def read(path: Path) -> Table:
    """The table in a file; its first bytes decide its format, whatever its name.

    CSV with commas, semicolons or tabs; a JSON list of objects; one JSON object a line. Raises
    ConfigError where it cannot be read or holds no row.
    """
    text = _read_text(path)
    start = text.lstrip()[:1]
    if start == "[":
        rows = _json(path, text, 1)
        numbered = [(f"row {i}", row) for i, row in enumerate(rows, 1)]
    elif start == "{":
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        numbered = [(f"line {i}", _json(path, line, i)) for i, line in lines]
    else:
        numbered = _csv(path, text)
    if not numbered:
        raise ConfigError(f"{path}: holds no row; write one run a row below a line of column names")
    for name, row in numbered:
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, {name}: is no object; write one JSON object for each run")
    columns = dict.fromkeys(column for _, row in numbered for column in row)
    names, found = zip(*numbered, strict=True)
    return Table(path, tuple(columns), found, names)


def number(cell: Any) -> float | None:
    """A cell's number, nan and inf among them; None where it holds none."""
    if isinstance(cell, bool) or cell is None:
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "no UTF-8 text"
        raise ConfigError(
            f"{path}: cannot be read as a table ({reason}); give a CSV, JSON or JSONL file, or a "
            "folder of runs"
        ) from None
    if len(raw) > LARGEST:
        raise ConfigError(f"{path}: is larger than {LARGEST // 2**20} MiB; give a shorter table")
    return text


def _json(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"{path}, line {line}: is no JSON ({str(problem)[:80]}); write a list of objects, or "
            "one object a line"
        ) from None


def _csv(path: Path, text: str) -> list[tuple[str, Any]]:
    header = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: list[tuple[str, Any]] = []
    columns: list[str] = []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if not columns:
                columns = [cell.strip() for cell in row]
                if twice := sorted({c for c in columns if c and columns.count(c) > 1}):
                    raise ConfigError(f"{path}: {', '.join(twice)} stand twice; rename one column")
                continue
            if len(row) != len(columns):
                raise ConfigError(
                    f"{path}, line {reader.line_num}: has {len(row)} cells, the first line "
                    f"{len(columns)}; write empty cells as such"
                )
            cells = (cell.strip() for cell in row)
            rows.append((f"line {reader.line_num}", dict(zip(columns, cells, strict=True))))
    except csv.Error as problem:
        raise ConfigError(f"{path}, line {reader.line_num}: is no CSV ({problem})") from None
    return rows


def _text(cell: Any) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell)


def _same(cell: Any, value: str) -> bool:
    own, asked = number(cell), number(value)
    return _text(cell) == value or (own is not None and own == asked)
