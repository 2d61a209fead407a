"""model.from_pretrained: damaged names, config.json, indexes and shards, each refused by name."""

import errno
import json
import os

import pytest

from tests.config.test_pretrained import LLAMA, MISTRAL, published, refused

pytestmark = pytest.mark.pure

LONG = "x" * 5000  # no file system takes such a name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (LONG, "cannot be looked up (File name too long)"),
        ("~no such user/x", "cannot be looked up (Could not determine home directory)"),
        ("~\0/x", "cannot be looked up (embedded null byte)"),
        ("/x\0y", "is no folder"),
    ],
    ids=["long", "user", "null", "null in a path"],
)
def test_a_name_that_no_folder_can_have(name, said):
    (line,) = refused(name).splitlines()[1:]
    assert line.startswith('  parallel3d.model.from_pretrained = "') and len(line) < 300
    assert f"{said}; name one that holds config.json, or a model on the hub" in line


def test_a_name_that_the_cache_of_the_hub_cannot_have(tmp_path, monkeypatch):
    """Of 250 characters a folder can be; not so with what the cache puts before it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    said = refused("y" * 250)
    assert "is no folder here, and the hub cannot be asked" in said


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": LONG}}, f"it names '{'x' * 60}...': File name too long"),
        ({"weight_map": {"a": "a\0.safetensors"}}, "'a\\x00.safetensors'"),
        ({"weight_map": {"a": ""}}, "it names a file of another folder"),
        ({"weight_map": {"a": ".."}}, "it names a file of another folder"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
    ids=["long", "null", "empty", "above", "nested"],
)
def test_an_index_of_names_that_no_shard_can_have(index, said, tmp_path):
    folder = published(tmp_path / "model", LLAMA, ())
    path = folder / "model.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps(index))
    found = refused(folder)
    assert found.startswith(f"{path}: is no index (") and said in found and len(found) < 400
    assert found.endswith("; download it again")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"layer_types": [["x"]]}, 'layer_types = [["x"]]: has layers that do not attend'),
        (MISTRAL | {"layer_types": [{}]}, "layer_types = [{}]: has layers that do not attend"),
        (LLAMA | {"layer_types": "full_attention"}, 'layer_types = "full_attention": is no list'),
        (MISTRAL | {"sliding_window": "a"}, 'sliding_window = "a": is no number of tokens'),
    ],
    ids=["list", "block", "text", "window"],
)
def test_fields_of_other_kinds(config, said, tmp_path):
    folder = published(tmp_path / "model", config)
    assert f"{folder / 'config.json'}: {said}" in refused(folder)


@pytest.mark.parametrize(
    ("start", "size", "said"),
    [
        (b"abc", 3, "it has 3 bytes"),
        (b"version https://git-lfs", 130, "its header claims 2,336,927,755,350,992,246 of the 130"),
        (int.to_bytes(123, 8, "little"), 130, "its header claims 123 of the 130 bytes"),
        (int.to_bytes(10**8 + 1, 8, "little"), 10**9, "its header claims 100,000,001 of the 1,000"),
    ],
    ids=["short", "pointer", "cut", "beyond the format"],
)
def test_a_shard_whose_header_is_no_header(start, size, said, tmp_path):
    path = published(tmp_path / "model", LLAMA) / "model.safetensors"
    with open(path, "wb") as file:  # of which the disk holds what is not zero
        file.write(start)
        file.truncate(size)
    found = refused(path.parent)
    assert found.startswith(f"{path}: is no sound file of safetensors ({said}")
    assert found.endswith("; download it again")


def test_a_shard_that_cannot_be_read(tmp_path):
    """Memory is a file that opens, and whose first bytes no process has."""
    path = published(tmp_path / "model", LLAMA, ()) / "model.safetensors"
    path.symlink_to("/proc/self/mem")
    assert refused(path.parent) == (
        f"{path}: cannot be read: Input/output error; make it readable, or download it again"
    )


def test_a_folder_that_may_not_be_searched(tmp_path, monkeypatch):
    """Root may search every folder, so the system's answer is put in."""
    folder = published(tmp_path / "model", LLAMA)
    looked_up = os.stat

    def stat(path, **options):
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return looked_up(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    said = refused(folder)
    assert said.startswith(f"{folder}/model.safetensors")
    assert said.endswith(
        ": cannot be read: Permission denied; make it readable, or download it again"
    )
