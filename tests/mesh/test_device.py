"""Which accelerator a process takes, on machines that this one is not."""

import os

import pytest
import torch

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.device import pick_device, settle_accelerator
from parallel3d.mesh.launch import Launch

pytestmark = pytest.mark.gloo


@pytest.fixture
def machine(monkeypatch):
    """Makes it one with so many GPUs that this process sees; gives the device that is current."""
    chosen = []
    accelerator = torch.accelerator
    monkeypatch.setenv("DS_ACCELERATOR", "")  # so that what is set here is undone
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "set_device_index", chosen.append)

    def with_devices(count):
        monkeypatch.setattr(accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(accelerator, "device_count", lambda: count)
        return chosen

    return with_devices


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(8, 3, 3), (1, 3, 0), (1, 0, 0)])
def test_each_process_takes_its_own_device(machine, visible, local_rank, index):
    """`srun --gpus-per-task=1` shows each task one alone, whatever its place on the node."""
    chosen = machine(visible)
    device = pick_device(Launch(11, 16, local_rank, 8))
    assert device == torch.device("cuda", index) and chosen == [index]
    assert os.environ["DS_ACCELERATOR"] == "cuda"


def test_more_processes_than_devices_are_refused(machine):
    machine(2)
    with pytest.raises(ConfigError, match="local rank 3 has no device: this node has 2; start"):
        pick_device(Launch(3, 4, 3, 4))


def test_cpu_is_used_without_devices(machine, monkeypatch):
    assert machine(0) == [] and pick_device(Launch(1, 2, 1, 2)) == torch.device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")  # the user's word counts
    assert settle_accelerator() == "cpu" and os.environ["DS_ACCELERATOR"] == "cuda"
