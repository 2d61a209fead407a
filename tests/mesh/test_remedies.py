"""Each remedy about a launcher's variables is applied as it is written, and ranks are known."""

import re
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from parallel3d.base.errors import RankError
from parallel3d.mesh import device, join
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import free_port
from tests.mesh.test_launchers import BATCH, OPEN_MPI, STEP, launch_of  # noqa: F401
from tests.remedies import refused

pytestmark = pytest.mark.gloo

HALVES = [
    {"WORLD_SIZE": 4},
    {"LOCAL_RANK": 1, "WORLD_SIZE": 2},
    {"RANK": 1},
    {"RANK": 2, "WORLD_SIZE": 2},
    {"FLUX_TASK_RANK": 3},
    {"PALS_RANKID": 1},
    {"OMPI_COMM_WORLD_RANK": 1},
    {"PMI_RANK": 1},
    {"RANK": "x", "WORLD_SIZE": "y", "LOCAL_WORLD_SIZE": -1},
]


@pytest.mark.parametrize("variables", HALVES)
def test_variables_that_were_found_are_unset_or_completed(launch_of, variables):  # noqa: F811
    with pytest.raises(Exception, match="for one process unset them") as caught:
        launch_of(variables)
    message = str(caught.value)
    listed = re.search(r"found (.*?)\. Start with", message)[1]
    names = [word.partition("=")[0] for word in listed.split(", ")]
    rest = {name: value for name, value in variables.items() if name not in names}
    assert launch_of(rest) == Launch(0, 1, 0)
    wanted = re.search(r"or set (.*?) for each rank", message)[1]
    names = re.split(r", | and ", wanted)
    values = dict.fromkeys(names, 0) | {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    values["MASTER_ADDR"] = "127.0.0.1"
    assert launch_of(variables | values) == Launch(0, 2, 0, 2)


def test_address_of_the_first_node_is_set(launch_of):  # noqa: F811
    without = {name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}
    with refused("set it to the host name of rank 0"):
        launch_of(without)
    assert launch_of(without | {"MASTER_ADDR": "node0"}).world_size == 8
    without = {name: value for name, value in STEP.items() if name != "MASTER_ADDR"}
    with refused("set it to the first node's host name"):
        launch_of(without)
    assert launch_of(without | {"MASTER_ADDR": "node0"}).world_size == 4
    assert launch_of(BATCH).world_size == 1


def test_no_more_processes_are_started_than_there_are_devices(monkeypatch):
    monkeypatch.setattr(device, "settle_accelerator", lambda: "cuda")
    accelerator = SimpleNamespace(device_count=lambda: 2, set_device_index=lambda _: None)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(device, "set_allocator", lambda: None)
    with refused("start at most 2 processes on it"):
        device.pick_device(Launch(2, 3, 2, 3))
    for rank in range(2):
        assert device.pick_device(Launch(rank, 2, rank, 2)).index == rank


def test_mesh_has_as_many_ranks_as_processes():
    with refused("the two must be equal"):
        Mesh(dp=2, launch=Launch(0, 1, 0))
    mesh = Mesh(launch=Launch(0, 1, 0))
    assert mesh.world.size == 1
    mesh.close()


@pytest.mark.slow  # two seconds of waiting
def test_port_in_use_is_freed_or_another_one_is_set(launch_of, monkeypatch):  # noqa: F811
    """A store that waits for another rank was served, so its message is another one."""

    def meet(port):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launch = launch_of({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0} | place)
        monkeypatch.setattr(join, "_store", None)
        with pytest.raises(RankError) as caught:
            join.meet(launch, timedelta(seconds=0.2))
        return str(caught.value)

    monkeypatch.setattr(join, "_SECONDS_OF_UNKNOWN", 0.0)
    monkeypatch.setattr(join, "_LEAST_SECONDS_OF_UNKNOWN", 0.2)
    remedy = "end the process that has this port, or set MASTER_PORT to a free one"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert remedy in meet(port)
        assert "have not met" in meet(free_port())
    assert "have not met" in meet(port)
