"""One vocabulary of flags, and one message where a command line is wrong."""

from textwrap import dedent

import pytest

from parallel3d.base.arguments import Parser, output_file, path_of, whole_number

pytestmark = pytest.mark.pure


@pytest.fixture
def parser() -> Parser:
    made = Parser("What it does.", prog="thing.py")
    made.add_config()
    made.add_json()
    made.add_pictures("a timeline")
    made.add_argument("--rows", type=whole_number(), metavar="N")
    return made


BAD = [
    ([], "thing: --config: is missing; add it"),
    (["--config"], "thing: --config: has no value; write --config VALUE"),
    (["--config", "a", "--rows", "x"], "thing: --rows = x: must be a whole number; use 1 or more"),
    (["--config", "a", "--rows", "0"], "thing: --rows = 0: is too small; use 1 or more"),
    (["--config", "a", "--rows", "9" * 40], "is too large; use 1,000,000,000 or less"),
    (["--config", "a", "--json=1"], "thing: --json = '1': takes no value; write --json"),
    (["--config", "a", "--jso"], "thing: --jso: unknown argument; see --help"),
    (["--config", "a", "--svg", "/"], 'thing: --svg = "/": is a folder; name a file in it'),
    (["--config", "a", "--svg", "$NO_SUCH/a"], "names the environment variable NO_SUCH, which is"),
    (["--config", "a", "--trace", "nowhere/a"], "'nowhere' does not exist; create it"),
]


def test_settings_with_spaces_are_no_values_of_other_flags() -> None:
    made = Parser(prog="thing.py")
    made.add_argument("--dry-run", nargs="?", const=0, type=whole_number())
    args, rest = made.parse_known_args(["--dry-run", "--data.paths=a b/*.txt", "--x=y"])
    assert (args.dry_run, rest) == (0, ["--data.paths", "a b/*.txt", "--x=y"])


@pytest.mark.parametrize("words", [["--local_rank=0"], ["--local-rank=0"], ["--local-rank", "1"]])
def test_local_rank_of_both_launchers_is_accepted(parser: Parser, words: list[str]) -> None:
    _, rest = parser.parse_known_args(["--config", "a", *words])
    assert rest == []


@pytest.mark.parametrize(("words", "message"), BAD)
def test_wrong_arguments_give_one_line(parser: Parser, capsys, words, message) -> None:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(words)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and err.count("\n") == 1
    assert message in err


def test_paths_of_flags_are_resolved_as_those_of_a_config(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Parser(prog="thing.py")
    made.add_argument("--to", type=path_of)
    assert made.parse_args(["--to=~/out"]).to == tmp_path / "out"
    assert made.parse_args(["--to", "$HOME/out"]).to == tmp_path / "out"
    assert output_file("~/a.svg") == tmp_path / "a.svg"


def test_output_file_accepts_new_and_existing_files(tmp_path) -> None:
    assert output_file(str(tmp_path / "a.svg")) == tmp_path / "a.svg"
    (tmp_path / "a.svg").write_text("old")
    assert output_file(str(tmp_path / "a.svg")) == tmp_path / "a.svg"


def test_help_fills_paragraphs_and_keeps_commands():
    text = """Do a thing.

    It takes a file, of which each line is longer than a terminal of eighty columns has, and then
    goes on in the next.

    thing --one
    thing --two
    """
    description = Parser(dedent(text).replace("\n    ", "\n")).description
    assert description is not None
    filled = description.split("\n\n")[1]
    assert max(map(len, filled.splitlines())) < 80
    assert len(filled.splitlines()) == 2, "the lines of a paragraph are filled together"
    assert "thing --one\nthing --two" in description
