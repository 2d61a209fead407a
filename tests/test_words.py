"""Texts, comments and the names of tests are plain (CONTRIBUTING.md, "Ten rules of writing")."""

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
BANNED = re.compile(r"(Of|What|That) [a-z]|\w+ gives\b")
QUOTED = re.compile(rf"[\"'](?:{BANNED.pattern})")
# A test is named after the thing that is tested: test_invalid_file_gives_one_message.
TEST_NAME = re.compile(
    r"test_(a|an|the|it|its|of|they|what|who|where|how)_|\w+_that_is_none|\w+_is_no_|\w+_says_so"
)
VAGUE_NAMES = {"found", "said", "got"}
SUSPECT = re.compile(rf"def (?:{TEST_NAME.pattern})|\b({'|'.join(VAGUE_NAMES)})\b")
TRAILING = re.compile(r"#:? ?(of|its|as|what)\b", re.IGNORECASE)
MODULES = sorted(
    path
    for folder in ("parallel3d", "models", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if not (folder == "parallel3d" and path.relative_to(ROOT).parts[1] in ("models", "launch"))
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def texts_of(path):
    """Each docstring and string of a module that reads like a sentence, with its line."""
    text = path.read_text()
    if not QUOTED.search(text):
        return  # to parse all files takes seconds
    for node in ast.walk(ast.parse(text)):
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


def bad_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each test, local and parameter of a test file that is not plain."""
    text = path.read_text()
    if not SUSPECT.search(text):
        return  # to parse all files takes seconds
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) if TEST_NAME.match(name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE_NAMES:
                yield node.lineno, name


def bad_comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment that follows code and opens with a banned word."""
    text = path.read_text()
    if not TRAILING.search(text):
        return  # to tokenize all files takes seconds
    for token in tokenize.generate_tokens(StringIO(text).readline):
        follows_code = token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and follows_code and TRAILING.match(token.string):
            yield token.start[0], token.string


@pytest.mark.parametrize(
    "places, paths",
    [(bad_names, TESTS), (bad_comments, MODULES + TESTS + BENCHMARKS)],
    ids=["names", "comments"],
)
def test_names_of_tests_and_trailing_comments_are_plain(places, paths):
    messages = []
    for path in paths:
        messages += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in places(path)]
    assert not messages, "\n".join(messages)


@pytest.mark.parametrize(
    ("places", "code", "lines"),
    [
        (bad_names, "def test_the_file(): ...", [1]),
        (bad_names, "def test_file_that_is_none_is_refused(): ...", [1]),
        (bad_names, "def test_file(found):\n    said = 1\n    got: int = 2", [1, 2, 3]),
        (bad_names, "def test_theory():\n    messages = corpus.found", []),
        (bad_comments, "x = 1  # of the first\n# of the second\ny = '# of'  # the third", [1]),
        (bad_comments, "x = 1  # office hours", []),
    ],
)
def test_place_that_is_not_plain_is_detected(tmp_path, places, code, lines):
    path = tmp_path / "test_module.py"
    path.write_text(f"{code}\n")
    assert [line for line, _ in places(path)] == lines
