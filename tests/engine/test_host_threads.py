"""Adam on the host of a GPU node uses the rank's share of the cores, or the user's number."""

import os
from unittest.mock import patch

import pytest
import torch

from parallel3d.engine import op_builds
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}  # it sets one thread itself


def threads(device, environment, local_size=2, cores=10):
    """The threads of a process on such a node, which had three, and what the log says."""
    messages = []
    before = torch.get_num_threads()
    with (
        patch.dict(os.environ, environment),
        patch.object(os, "cpu_count", lambda: cores),
    ):
        if "OMP_NUM_THREADS" not in environment:
            os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(3)
        op_builds.use_host_threads(torch.device(device), local_size, messages.append)
    count = torch.get_num_threads()
    torch.set_num_threads(before)
    return count, messages


@pytest.mark.parametrize("environment", [{}, TORCHRUN], ids=["srun", "torchrun"])
def test_rank_uses_its_share_of_the_cores(environment):
    assert threads("cuda:0", environment) == (5, ["threads per rank for Adam on the host: 5"])
    assert threads("cuda:0", environment, local_size=16)[0] == 1


@pytest.mark.parametrize(
    ("device", "environment"),
    [
        ("cuda:0", {"OMP_NUM_THREADS": "4"}),
        ("cuda:0", TORCHRUN | {"OMP_NUM_THREADS": "4"}),
        ("cuda:0", {"OMP_NUM_THREADS": "1"}),
        ("cpu", {}),  # the mesh has done so
    ],
    ids=str,
)
def test_number_of_threads_of_the_user_is_kept(device, environment):
    assert threads(device, environment) == (3, [])


def calls_on_rank(rank, cases):
    """How often the engine of each case sets threads."""
    counts = []
    for case in cases:
        with patch.object(op_builds, "use_host_threads") as use:
            Trainer(case).close()
        counts.append(use.call_count)
    return counts


def test_only_engines_with_a_host_optimizer_set_threads():
    model = {"num_hidden_layers": 1}
    cases = [Case(zero_stage=1, offload=offload, model=model) for offload in ("none", "cpu")]
    assert run_locally(calls_on_rank, 1, cases) == [[0, 1]]
