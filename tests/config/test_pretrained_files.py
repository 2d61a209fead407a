"""model.from_pretrained: names, indices and shards that no folder can have."""

import errno
import json
import os

import pytest

from tests.config.test_pretrained import LLAMA, published, refused

pytestmark = pytest.mark.pure

LONG = "x" * 5000  # no file system takes such a name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (f"/{LONG}", "is not a folder; "),
        ("~no such user/x", "names the folder of a user who is not known; "),
        ("/x\0y", "is not a folder; "),
    ],
    ids=["long", "user", "null"],
)
def test_impossible_folder_name_is_refused(name, rule):
    (line,) = refused(name).splitlines()[1:]
    assert line.startswith('  parallel3d.model.from_pretrained = "') and len(line) < 300
    assert rule in line


def test_name_too_long_for_the_hub_cache_is_refused(tmp_path, monkeypatch):
    """Of 250 characters a folder can be; not so with what the cache puts before it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refused("y" * 250)
    assert "is not a local folder, and cannot be fetched from the hub" in message


@pytest.mark.parametrize(
    "name", [LONG, "a\0.safetensors", "", ".."], ids=["long", "null", "empty", "above"]
)
def test_index_with_impossible_shard_names_is_refused(name, tmp_path):
    folder = published(tmp_path / "model", LLAMA, ())
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    message = refused(folder)
    assert message.startswith(f"{path}: is not a valid index (") and repr(name[:60]) in message
    assert message.endswith("; download it again") and len(message) < 400
    path.write_text("[" * 100_000)
    assert refused(folder).startswith(f"{path}: is not a valid index (")


@pytest.mark.parametrize(
    ("start", "size"),
    [(b"abc", 3), (b"version https://git-lfs", 130), (int.to_bytes(123, 8, "little"), 130)],
    ids=["short", "pointer", "cut"],
)
def test_shard_with_invalid_header_is_refused(start, size, tmp_path):
    path = published(tmp_path / "model", LLAMA) / "model.safetensors"
    path.write_bytes(start.ljust(size, b"\0"))
    message = refused(path.parent)
    assert message.startswith(f"{path}: is not a valid safetensors file (")
    assert message.endswith("; download it again")


def test_unsearchable_folder_is_refused(tmp_path, monkeypatch):
    """Root may search every folder, so the system's answer is put in."""
    folder = published(tmp_path / "model", LLAMA)
    looked_up = os.stat

    def stat(path, **options):
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return looked_up(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    message = refused(folder)
    assert message.startswith(f"{folder}/model.safetensors")
    assert message.endswith(
        ": cannot be read: Permission denied; make it readable, or download it again"
    )
