"""What Slurm says of a node: `srun` counts for a step, node by node."""

import os

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.launch import Launch

pytestmark = pytest.mark.gloo

SRUN = {"SLURM_PROCID": 5, "SLURM_NTASKS": 40, "SLURM_LOCALID": 1, "MASTER_ADDR": "node0"}
STEP = "SLURM_STEP_TASKS_PER_NODE"
JOB = "SLURM_TASKS_PER_NODE"


@pytest.fixture
def launch_on(monkeypatch):
    """The launch of these variables and no other launcher's."""

    def launch(node, **variables):
        for name in [*os.environ]:
            if name.startswith(("SLURM_", "RANK", "LOCAL_", "WORLD_", "TORCHELASTIC_")):
                monkeypatch.delenv(name)
        for name, value in (SRUN | {"SLURM_NODEID": node} | variables).items():
            monkeypatch.setenv(name, str(value))
        return Launch.from_environment()

    return launch


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({STEP: "8(x4),4,2(x2)"}, [8, 8, 8, 8, 4, 2, 2]),
        ({STEP: "10"}, [10]),
        ({STEP: "4,8"}, [4, 8]),
        ({STEP: "4(x10)", JOB: "8(x5)"}, [4] * 10),  # the step is a part of the job
        ({STEP: "1(x8)"}, [2, 2]),  # cannot be: local rank 1 is one of two at least
        ({STEP: "eight"}, [2, 2]),
        ({STEP: "800(x5)"}, [2]),  # more than were started
        ({}, [2]),
    ],
)
def test_slurm_variables_give_the_processes_of_a_node(launch_on, variables, sizes):
    """Each rank's share of its node's memory and cores is by their number."""
    for node, size in enumerate(sizes):
        launch = launch_on(node, **variables)
        assert (launch.rank, launch.world_size, launch.local_rank) == (5, 40, 1)
        assert launch.local_world_size == size, (node, variables)


def test_bad_slurm_variable_is_named(launch_on):
    with pytest.raises(ConfigError, match="SLURM_LOCALID"):
        launch_on(0, SLURM_LOCALID="one")
