"""The command `parallel3d`: which commands it has, and how it hands over to launch/."""

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

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
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        core, extras = text.split("\nExtras")
        assert all(f"\n  {name} " in core for name in program.CORE)
        assert all(f"\n  {name} " in extras for name in program.EXTRAS)


def test_commands_of_the_extras_are_those_whose_work_is_there():
    """Commands of the core may ask extras for a part: a guard, a calibration."""
    for name in program.EXTRAS:
        assert "from parallel3d.extras." in (LAUNCH / f"{name}.py").read_text(), name


@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_version_names_torch_deepspeed_and_cuda(monkeypatch, capsys, cuda):
    """Of a stand-in for torch, which the pure tier does not load."""
    devices = SimpleNamespace(
        is_available=lambda: cuda is not None,
        device_count=lambda: 3,
        get_device_name=["NVIDIA H100", "NVIDIA A100", "NVIDIA H100"].__getitem__,
    )
    torch = SimpleNamespace(__version__="2.13.0", cuda=devices, version=SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert call(monkeypatch, "--version") == 0
    first_line, *others = capsys.readouterr().out.splitlines()
    assert first_line == f"parallel3d {parallel3d.__version__}"
    assert others[:2] == ["torch 2.13.0", f"DeepSpeed {version('deepspeed')}"]
    if cuda is None:
        assert others[2:] == ["CUDA none (torch is built without it)"]
    else:
        assert others[2:] == ["CUDA 12.8"]


def test_unknown_command_is_refused(monkeypatch, capsys):
    assert call(monkeypatch, "trian", "--config", "ds.json") == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("parallel3d: unknown command trian; use one of train")


def test_command_receives_its_arguments_and_name(monkeypatch, capsys):
    assert call(monkeypatch, "draw", "--pp", "2", "--microbatches", "2") == 0
    assert "peak in flight" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "draw", "--pp", "no")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("parallel3d draw: --pp = no: must be a whole number")


def test_flag_of_the_deepspeed_launcher_moves_behind_the_command(monkeypatch):
    """It is put before all words: `python -m parallel3d --local_rank=1 train --config ds.json`."""
    seen = []

    class Command:
        def main():
            seen.append(sys.argv)
            return 3

    monkeypatch.setattr(program, "import_module", {"parallel3d.launch.train": Command}.get)
    assert call(monkeypatch, "--local_rank=1", "train", "--config", "a.json") == 3
    assert seen == [["parallel3d train", "--config", "a.json", "--local_rank=1"]]
