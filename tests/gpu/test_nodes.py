"""The script for several nodes, tried on this machine: as two nodes, and its faults on one."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.verify.local_ranks import free_port
from tests.gpu import here
from tests.launch.launching import environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).with_name("nodes.py")


def run(folder, nodes, ranks, *options):
    """The lines that are printed by the script, on nodes that are all this machine."""
    command = [
        "torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        str(SCRIPT),
        "--folder",
        str(folder),
        *options,
    ]
    started = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=sys.stderr)
        for _ in range(nodes)
    ]
    output = "".join(node.communicate(timeout=400)[0].decode() for node in started)
    assert [node.returncode for node in started] == [0] * nodes, output
    lines = [line for line in output.splitlines() if ": ranks " not in line]
    for line in lines:
        here.report(f"{nodes} nodes, {ranks} ranks each", line)
    return lines


FAULTS = ["SIGKILL", "resumed,", "SIGSTOP", "resumed,"]


@pytest.mark.skipif(here.COUNT > 0, reason="its two nodes would share the GPUs")
def test_two_nodes_match_transformers_and_survive_faults(tmp_path):
    lines = run(tmp_path, 2, 1)
    crossing = [line.split()[0] for line in lines if "crosses" in line]
    assert crossing == ["dp"] * 3 + ["pp"] * 3, lines
    assert [line.split()[0] for line in lines if "crosses" not in line] == FAULTS, lines


def test_lost_rank_is_named_and_the_run_resumes(tmp_path):
    """The others end in time and say who it was; the same command goes on from what was saved.

    No launcher stands above a run's ranks, as under plain `srun`: torchrun and deepspeed would end
    the others themselves.
    """
    lines = run(tmp_path, 1, min(2, here.RANKS), "--only", "faults")
    assert [line.split()[0] for line in lines] == FAULTS, lines
