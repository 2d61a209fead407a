"""The server that ranks are forked from: what it imports asks the machine for no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel3d.mesh.device import settle_accelerator
from parallel3d.verify import local_ranks
from parallel3d.verify.local_ranks import run_locally
from tests.verify import asking

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]


def what_the_server_asked(rank):
    assert os.getpid() != asking.SERVER
    return asking.ASKED, asking.TOLD


def test_the_server_asks_for_no_gpu():
    assert local_ranks.PRELOAD[0] == asking.__name__
    assert run_locally(what_the_server_asked, 1) == [([], "cpu")]


@pytest.mark.slow
def test_nor_does_it_where_there_are_eight(monkeypatch):
    """Everything that is preloaded, on a torch that would say that there are."""
    with monkeypatch.context() as gpus:
        gpus.setenv("DS_ACCELERATOR", "")  # so that what is set here is undone
        gpus.delenv("DS_ACCELERATOR")
        gpus.setattr(torch.accelerator, "is_available", lambda: True)
        gpus.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        settle_accelerator()
        environment = dict(os.environ)
    code = (
        "import importlib, json, sys\n"
        "from tests.verify import asking\n"
        "asking.listen(True, 8)\n"
        "for name in json.loads(sys.argv[1]):\n importlib.import_module(name)\n"
        "print(json.dumps([asking.TOLD, asking.ASKED]))\n"
    )
    names = [name for name in local_ranks.PRELOAD if name != "__main__"]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(names)],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["cuda", []]
