"""Where a device stands is on the rank's page: by stand-ins for events, of which some are over."""

from types import SimpleNamespace

import pytest
import torch

from parallel3d.mesh import device_marks
from parallel3d.mesh.device_marks import DeviceMarks
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.page import new_page

pytestmark = pytest.mark.gloo


class Event:
    """An event of a device that has done the first `done` actions of all."""

    done = 0
    recorded = 0
    fails = False

    def __init__(self, device):
        assert device.type == "cuda"

    def record(self):
        Event.recorded += 1
        self.number = Event.recorded

    def query(self):
        if Event.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.number <= Event.done


@pytest.fixture
def page(monkeypatch):
    """The page of a rank whose device is far behind its host."""
    Event.done = Event.recorded = 0
    page, _ = new_page()
    monkeypatch.setattr(device_marks, "torch", SimpleNamespace(Event=Event))
    monkeypatch.setattr(pulse, "_page", page)
    monkeypatch.setattr(pulse, "_action", ("", False))
    monkeypatch.setattr(pulse, "_seen", ("", False))
    monkeypatch.setattr(pulse, "_marks", DeviceMarks(torch.device("cuda")))
    return page


def seen(page, done):
    Event.done = done
    pulse.look_at_device()
    text, _, computes = page.device
    return text, computes


def test_page_follows_the_device_and_not_the_host(page, monkeypatch):
    pulse.doing("0F0")
    pulse.computing()
    with pulse.waiting("waiting for R0B0"):
        pass  # on the device; the host goes on
    pulse.doing("0B0")
    pulse.computing()
    pulse.doing("the optimizer's step 1")
    assert seen(page, 1) == ("0F0", True)
    assert page.doing[0] == "the optimizer's step 1"
    since = page.device[1]
    assert seen(page, 1) == ("0F0", True) and page.device[1] == since
    assert seen(page, 2) == ("0F0, waiting for R0B0", False)
    assert seen(page, 4) == ("0B0", True)
    monkeypatch.setattr(Event, "fails", True)
    assert seen(page, 5) == ("0B0", True)
    monkeypatch.setattr(Event, "fails", False)
    assert seen(page, 5) == ("", False)  # the host is behind
    with pulse.waiting("gathering numbers"):  # the host waits for its device
        assert seen(page, 6) == ("the optimizer's step 1, gathering numbers", False)


def test_ranks_without_marks_record_nothing(page, monkeypatch):
    monkeypatch.setattr(pulse, "_marks", None)
    pulse.doing("0F0")
    pulse.computing()
    assert seen(page, 0) == ("", False) and Event.recorded == 0
