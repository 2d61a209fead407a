"""What people read opens plainly: docstrings, messages and docs (CONTRIBUTING.md, ten rules)."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
BANNED = re.compile(r"(Of|What|That) [a-z]|\w+ gives\b")
MODULES = sorted(
    path
    for folder in ("parallel3d", "models", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if not (folder == "parallel3d" and path.relative_to(ROOT).parts[1] in ("models", "launch"))
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def texts_of(path):
    """Each docstring and string of a module that reads like a sentence, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def sentences_of(page):
    """The sentences of a page that open a line, an item or a cell, with their lines.

    Headings, questions, code and the table of writing rules are exempt.
    """
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith(("#", "    ", "```")) and "| before | after |" not in line:
            cells = [] if re.match(r"\| \d+ \|", line) else line.split("|")
            for sentence in (part for cell in cells for part in re.split(r"(?<=[.:]) ", cell)):
                plain = sentence.strip().lstrip("-*_ ")
                if not plain.endswith("?"):
                    yield number, plain


@pytest.mark.parametrize(
    "texts, paths", [(texts_of, MODULES), (sentences_of, PAGES)], ids=["library", "docs"]
)
def test_no_text_opens_with_a_banned_word(texts, paths):
    openings = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in paths
        for line, text in texts(path)
        if BANNED.match(text) and not text.partition("\n")[0].rstrip("*").endswith("?")
    ]
    assert not openings, "\n".join(openings)


def test_banned_opening_is_detected(tmp_path):
    module = tmp_path / "module.py"
    page = tmp_path / "page.md"
    module.write_text('"""What a rank holds."""\n\nTEXT = "Of many ranks one."\n')
    page.write_text("# What is this\n\nThe rank ends. What it holds is lost.\n")
    assert [bool(BANNED.match(text)) for _, text in texts_of(module)] == [True, True]
    assert [plain for _, plain in sentences_of(page) if BANNED.match(plain)] == [
        "What it holds is lost."
    ]
