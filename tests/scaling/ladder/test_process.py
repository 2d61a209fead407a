"""The devices that the runs of a ladder share."""

import pytest

from parallel3d.scaling.ladder import process

pytestmark = pytest.mark.pure


def test_devices_are_numbered_as_cuda_does(tmp_path, monkeypatch):
    """In a container that has the host's GPUs 3 and 10 alone, they are 0 and 1."""
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(process, "_NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert process.visible_devices() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert process.visible_devices() == ("4", "7")
    # CUDA sees nothing from the first name on that is none.
    for given, seen in {"-1": (), "": (), " 2, -1,3": ("2",), "MIG-7f,x": ("MIG-7f",)}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert process.visible_devices() == seen, given
