"""`train` under launchers beside torchrun and deepspeed, and under half of one."""

import os
import re
import shutil
import subprocess

import pytest

from tests.launch.launching import PYTHON, Place, environment, free_port
from tests.launch.test_clusters import command_of

pytestmark = [pytest.mark.drill, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("launchers"))


MPIRUN = ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")
def test_mpirun_trains(place):
    done = place.run([*MPIRUN, *PYTHON], "--mesh.tp", 2, "--run.name", "mpi", "--train.steps", 1)
    assert done.returncode == 0, done.stderr
    assert "tp 2" in done.stderr and len(place.lines("mpi")) == 1


@pytest.mark.skipif(not shutil.which("accelerate"), reason="accelerate is not installed")
def test_accelerate_trains(place):
    launcher = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"]
    done = place.run(launcher, "--mesh.tp", 2, "--run.name", "accelerated")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_its_peers_ends_in_one_message(place, rank):
    """Its variables are whole, but no launcher's that we know, and the other rank is missing."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    code, output = place.ended("--mesh.tp", 2, variables=variables)
    assert code == 1 and output.count("have not met at 127.0.0.1") == 1, output
    # The start of Python, which the machine's load stretches, is not part of this time.
    waited = re.search(r"within (\d+) s", output)
    assert waited and int(waited[1]) < 30, output
    assert "found LOCAL_RANK=0, MASTER_ADDR=127.0.0.1, RANK=" in output
    assert not os.path.exists(place.root / "runs" / "auto")


def test_command_of_cluster_files_trains_on_one_machine(place):
    settings = place.command([], steps=2)[3:]
    variables = {
        "NODES": "1",
        "PER_NODE": "2",
        "HEAD": "127.0.0.1",
        "RUN": "cluster",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = command_of("slurm.sbatch").replace("29500", str(free_port()))
    words = " ".join(f"'{word}'" for word in settings)
    done = subprocess.run(
        ["bash", "-c", f"{command} {words}"],
        cwd=place.root,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert len(place.lines("cluster")) == 2
