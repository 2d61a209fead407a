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
    """Calls `scale` in an empty folder.

    A fit searches from few starts, which is most of its time; tests/scaling has all of them.
    """
    from launch import scale
    from parallel3d.extras.scaling import data_constrained
    from parallel3d.extras.scaling.estimator import SumModel

    starts = SumModel.starts
    monkeypatch.setattr(
        SumModel, "starts", lambda model, weights, each=None: starts(model, weights, 2)
    )
    monkeypatch.setattr(data_constrained, "_GRID", data_constrained._GRID[1::3])
    monkeypatch.chdir(tmp_path)
    return partial(called, scale.main, "scale.py")
