"""Code is written out: one thing a line, a loop with a body, the formatter's own layout.

CONTRIBUTING.md, "Written to be read", lists the forms that are refused, and what to write instead.
"""

import ast
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from tests.test_floors import FILES, ROOT, TESTS, nodes_of, text_of

pytestmark = pytest.mark.pure

BENCHMARKS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))
LEAST_ROWS = 4
"""A table of data, which may keep its own layout, has at least so many rows."""
BOOLEANS = (ast.Compare, ast.BoolOp)
COMPREHENSIONS = {ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp}
# The other nodes, nine of ten, are not looked at any further.
KINDS = COMPREHENSIONS | {
    ast.Assign,
    ast.AnnAssign,
    ast.IfExp,
    ast.BinOp,
    ast.Slice,
    ast.Subscript,
    ast.BoolOp,
    ast.List,
    ast.Tuple,
    ast.Set,
}


def packed_form(node: ast.AST) -> str | None:
    """Return the name of the packed form that a node is, or None."""
    match node:
        case ast.Assign(targets=[ast.Tuple() as targets], value=ast.Tuple() as values):
            if are_unrelated(targets.elts, values.elts):
                return "a tuple assigned to a tuple of unrelated names"
        case ast.Assign(value=ast.Lambda()) | ast.AnnAssign(value=ast.Lambda()):
            return "a lambda assigned to a name"
        case ast.IfExp():
            if holds(node, ast.IfExp):
                return "a conditional expression inside a conditional expression"
        case ast.BinOp(op=ast.Mult() | ast.Add() | ast.Sub()):
            if is_boolean(node.left) or is_boolean(node.right):
                return "arithmetic on a condition"
        case ast.Slice():
            if is_boolean(node.lower) or is_boolean(node.upper):
                return "arithmetic on a condition"
        case ast.Subscript(value=ast.Tuple() | ast.List() | ast.Constant()):
            if is_boolean(node.slice):
                return "arithmetic on a condition"
        case ast.BoolOp(op=ast.Or(), values=[ast.BoolOp(op=ast.And()), *_]):
            return "a and b or c"
        case ast.List() | ast.Tuple() | ast.Set():
            if any(is_literal_unpacked(element) for element in node.elts):
                return "a literal unpacked into a literal"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            if holds(node, ast.NamedExpr):
                return "an assignment hidden in a comprehension"
    return None


def are_unrelated(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Return False for a swap, an unpacking with a star, and values that read the targets."""
    if any(isinstance(part, ast.Starred) for part in [*targets, *values]):
        return False
    names = {ast.unparse(target) for target in targets}
    read = {ast.unparse(node) for value in values for node in ast.walk(value)}
    return not names & read


def holds(node: ast.AST, kind: type[ast.AST]) -> bool:
    """Return True if a node of this kind stands inside `node`."""
    return any(isinstance(inner, kind) for inner in ast.walk(node) if inner is not node)


def is_boolean(node: ast.AST | None) -> bool:
    """Return True if an expression is a condition, or a name that says so."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    name = getattr(node, "attr", getattr(node, "id", ""))
    return isinstance(node, BOOLEANS) or name.startswith(("is_", "has_"))


def is_literal_unpacked(element: ast.AST) -> bool:
    """Return True for the `*("a", "b")` of a display."""
    return isinstance(element, ast.Starred) and isinstance(element.value, (ast.Tuple, ast.List))


def packed_places(path: Path) -> Iterator[str]:
    """Yield file, line and form of each packed place of a file."""
    for node in nodes_of(path):
        form = packed_form(node) if type(node) in KINDS else None
        if form:
            yield f"{path}:{node.lineno}: {form}"
    if "# fmt:" not in text_of(path):
        return
    tables = {node.end_lineno for node in nodes_of(path) if is_table(node)}
    for token in tokenize.generate_tokens(StringIO(text_of(path)).readline):
        number = token.start[0]
        is_table_end = token.string.endswith("# fmt: skip") and number in tables
        if token.type == tokenize.COMMENT and "# fmt:" in token.string and not is_table_end:
            yield f"{path}:{number}: {token.string} outside a table of data"


def is_table(node: ast.AST) -> bool:
    """Return True for an assignment of a list, tuple or dictionary of several rows."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return False
    match node.value:
        case ast.List(elts=rows) | ast.Tuple(elts=rows) | ast.Dict(values=rows):
            kinds = (ast.List, ast.Tuple, ast.Dict, ast.Call)
            return sum(isinstance(row, kinds) for row in rows) >= LEAST_ROWS
    return False


@pytest.mark.parametrize(
    "paths", [FILES, TESTS, BENCHMARKS], ids=["library", "tests", "benchmarks"]
)
def test_no_packed_code(paths):
    places = [place for path in paths for place in packed_places(path)]
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    "text",
    [
        "a, b = 1, f(2)",
        "self.a, self.b = x, y",
        "words * (n > 1)",
        "total + (a and b)",
        "word * is_last",
        "'s'[: n > 1]",
        "('one', 'many')[n > 1]",
        "[*('a', 'b'), c]",
        "a and b or c",
        "a if b else c if d else e",
        "f(a if b else 1) if c else d",
        "double = lambda x: 2 * x",
        "[y for x in z if (y := f(x))]",
        "x = [\n    1, 2,\n]  # fmt: skip",
        "f(\n    1, 2,\n)  # fmt: skip",
        "# fmt: off",
    ],
)
def test_packed_form_is_refused(tmp_path, text):
    path = tmp_path / "packed.py"
    path.write_text(f"{text}\n")
    assert [place.split(":")[1] for place in packed_places(path)] == [str(len(text.splitlines()))]


@pytest.mark.parametrize(
    "text",
    [
        "a, b = b, a",
        "a, b = b, a + b",
        "a, b = pair",
        "first, *rest = 1, *others",
        "a or (b and c)",
        "words * count",
        "[*names, c]",
        "f(key=lambda x: x)",
        "TABLE = [\n    (1, 2),\n    (3, 4),\n    (5, 6),\n    (7, 8),\n]  # fmt: skip",
    ],
)
def test_plain_form_is_accepted(tmp_path, text):
    path = tmp_path / "plain.py"
    path.write_text(f"{text}\n")
    assert not list(packed_places(path))
