"""The server that ranks are forked from: what it imports asks the machine for no GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parallel3d.mesh.device import settle_accelerator
from parallel3d.verify import local_ranks
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.verify import asking

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]


def what_the_server_asked(rank):
    assert os.getpid() != asking.SERVER
    return asking.ASKED, asking.TOLD


def test_server_asks_for_no_gpu():
    assert local_ranks.PRELOAD[0] == asking.__name__
    assert run_locally(what_the_server_asked, 1) == [([], "cpu")]


def one_dies(rank):
    if rank == 1:
        time.sleep(0.2)  # the peer's lost connection is heard before this death
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:39306")


def test_rank_that_died_is_named_and_not_its_peer():
    """Seen: a crash within gloo, told as another rank's lost connection."""
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 died with exit code -9$"):
        run_locally(one_dies, 2)


@pytest.mark.slow
def test_server_asks_for_no_gpu_where_there_are_eight(monkeypatch):
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
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["cuda", []]
