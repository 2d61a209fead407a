"""The command `parallel3d`: which commands it has, and how it hands over to launch/."""

import sys
from pathlib import Path

import pytest

import parallel3d
from parallel3d import __main__ as program

pytestmark = pytest.mark.pure

LAUNCH = Path(__file__).parents[1] / "launch"


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["parallel3d", *words])
    return program.main()


def test_every_file_of_launch_is_a_command():
    assert set(program.COMMANDS) == {path.stem for path in LAUNCH.glob("[!_]*.py")}


def test_help_names_the_commands(monkeypatch, capsys):
    for words in ((), ("--help",), ("-h",)):
        assert call(monkeypatch, *words) == 0
        said = capsys.readouterr().out
        assert all(f"\n  {name} " in said for name in program.COMMANDS)
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"parallel3d {parallel3d.__version__}\n"


def test_a_word_that_is_no_command(monkeypatch, capsys):
    assert call(monkeypatch, "trian", "--config", "ds.json") == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(
        "parallel3d: unknown command trian; use one of train"
    )


def test_a_command_has_its_words_and_its_name(monkeypatch, capsys):
    assert call(monkeypatch, "draw", "--pp", "2", "--microbatches", "2") == 0
    assert "peak in flight" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "draw", "--pp", "no")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("parallel3d draw: --pp = no: must be a whole number")


def test_the_flag_of_deepspeeds_launcher_comes_behind_the_command(monkeypatch):
    """It is put before all words: `python -m parallel3d --local_rank=1 train --config ds.json`."""
    seen = []

    class Command:
        def main():
            seen.append(sys.argv)
            return 3

    monkeypatch.setattr(program, "import_module", {"parallel3d.launch.train": Command}.get)
    assert call(monkeypatch, "--local_rank=1", "train", "--config", "a.json") == 3
    assert seen == [["parallel3d train", "--config", "a.json", "--local_rank=1"]]
