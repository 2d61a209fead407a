"""Whether a checkpoint is as it was written: damage is seen, and named.

Files that are missing, cut off, swapped or something else: test_damage_in_a_run.py.
"""

import os

import pytest
import torch

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.manifest import check_file, read_manifest, verify
from tests.checkpoint.conftest import bad_files
from tests.checkpoint.folders import FIRST, SECOND

pytestmark = pytest.mark.gloo

FILES = [FIRST, SECOND, "state.json", "manifest.json"]


def flip(path, position, bit):
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_flipped_bit_in_any_byte_of_the_manifest_is_detected(folder):
    path = folder / "manifest.json"
    for position in range(path.stat().st_size):
        flip(path, position, position % 8)
        with pytest.raises(CheckpointError, match=r"manifest\.json: "):
            read_manifest(folder)
        flip(path, position, position % 8)
    assert verify(folder) == []


@pytest.mark.parametrize("name", FILES[:-1])
def test_flipped_bit_in_any_byte_of_any_file_is_detected(folder, name):
    entry = read_manifest(folder).files[name]
    for position in range(entry.size):
        flip(folder / name, position, position % 8)
        assert "do not match the manifest" in check_file(folder, name, entry)
        if position % 100 == 0:
            assert bad_files(folder) == [name]
        flip(folder / name, position, position % 8)
    assert verify(folder) == []


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_broken_link(path):
    path.unlink()
    path.symlink_to(path)


def make_torch_file(path):
    torch.save({"weight": torch.ones(3)}, path)


@pytest.mark.parametrize("damage", [make_pipe, make_broken_link, make_torch_file])
@pytest.mark.parametrize("name", FILES)
def test_foreign_file_is_detected_and_named(folder, name, damage, monkeypatch):
    monkeypatch.chdir(folder)
    damage(folder / name)
    (bad,) = verify(folder)
    assert bad.file == name and bad.reason and str(folder) not in bad.reason
    assert {path.name for path in folder.iterdir()} <= set(FILES), "no pickle was read"


def test_reasons_name_missing_truncated_and_changed_files(folder):
    (folder / FIRST).unlink()
    os.truncate(folder / SECOND, 1234 - 1000)
    size = read_manifest(folder).files[SECOND].size
    flip(folder / "state.json", 30, 0)
    reasons = dict(verify(folder))
    assert reasons.keys() == {FIRST, SECOND, "state.json"}
    assert reasons[FIRST] == "missing"
    assert "234 bytes" in reasons[SECOND] and f"{size:,}" in reasons[SECOND]
    assert "do not match the manifest" in reasons["state.json"]
    (folder / "manifest.json").unlink()
    assert bad_files(folder) == ["manifest.json"]
