"""Print the first line of every docstring as one page, or the first lines that break a rule.

    python docs/first_lines.py                         # all of parallel3d/ and models/
    python docs/first_lines.py parallel3d/plan         # one room
    python docs/first_lines.py --broken                # what breaks a rule alone; exit code 1

A reader meets a first line alone: in a list, a tooltip, the reference of the site. So it says what
the thing is without the lines above or below it, and without the code.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = ("parallel3d", "models")
_POINTS_ELSEWHERE = re.compile(
    r"(That|Those|These|This|The same|All of|Both|Of|It|Its|They|Them|Their|So (many|few|much))\b"
)
# A function's line is a command ("Print ...") or names its value ("Bytes of ...").
_STATES = re.compile(
    r"(Adds|Asks|Builds|Calls|Checks|Computes|Creates|Does|Draws|Ends|Fills|Finds|Gives|Goes|Holds|"
    r"Keeps|Lists|Looks|Makes|Measures|Opens|Prepares|Prints|Puts|Raises|Reads|Refuses|Removes|"
    r"Returns|Runs|Saves|Says|Sets|Shows|Sorts|Starts|Takes|Tells|Trains|Turns|Waits|Writes)\b"
    r"(?! (of|that|by)\b)"
)
_ARCHAIC = re.compile(r"\b([Tt]hat|[Tt]hose) of (it|them|a|an|the|all|each|some)\b|\bwherein\b")


class Line(NamedTuple):
    """The first line of one docstring: its file, the documented name ("" of the file), the text."""

    path: str
    name: str
    text: str

    @property
    def problem(self) -> str:
        """The rule that the line breaks, or ""."""
        if not re.search(r"[.?][\"'`)]*$", self.text):
            return "is no whole sentence on one line"
        if _POINTS_ELSEWHERE.match(self.text) or _ARCHAIC.search(self.text):
            return "points at something that the line does not name"
        if _STATES.match(self.text):
            return "is neither a command nor a name"
        return ""


def first_lines(path: Path) -> Iterator[Line]:
    """The first lines in a Python file, in its order; names that begin with _ are left out."""
    tree = ast.parse(path.read_text())
    where = path.relative_to(ROOT).as_posix()
    if text := ast.get_docstring(tree):
        yield Line(where, "", text.splitlines()[0])
    yield from _inside(tree, where, "")


def _inside(node: ast.AST, where: str, prefix: str) -> Iterator[Line]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            if text := ast.get_docstring(child):
                yield Line(where, prefix + child.name, text.splitlines()[0])
            if isinstance(child, ast.ClassDef):
                yield from _inside(child, where, f"{prefix}{child.name}.")


def of_rooms(rooms: list[str]) -> Iterator[Line]:
    """The first lines in the Python files below these folders."""
    for room in rooms:
        folder = (ROOT / room).resolve()
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
            yield from first_lines(path)


def main() -> None:
    """Print the page; with --broken only lines that break a rule, each with the rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", default=ROOMS, help="folders or files")
    parser.add_argument("--broken", action="store_true", help="lines that break a rule alone")
    arguments = parser.parse_args()
    shown, above = 0, ""
    for line in of_rooms(list(arguments.rooms)):
        if arguments.broken and not line.problem:
            continue
        if line.path != above:
            print(f"\n{line.path}" if above else line.path)
        above, shown = line.path, shown + 1
        problem = f"  <- {line.problem}" if arguments.broken else ""
        print(f"    {line.name + ': ' if line.name else ''}{line.text}{problem}")
    sys.exit(bool(arguments.broken and shown))


if __name__ == "__main__":
    main()
