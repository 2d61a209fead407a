"""Commands called in this process."""

import sys
from functools import partial

import pytest


@pytest.fixture
def called(monkeypatch, capsys):
    """Calls a command's `main`; gives its exit code and its two outputs."""

    def call(main, program, *arguments):
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def scaled(called, monkeypatch, tmp_path):
    """Calls `scale` in an empty folder."""
    from launch import scale

    monkeypatch.chdir(tmp_path)
    return partial(called, scale.main, "scale.py")
