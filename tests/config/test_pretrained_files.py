"""model.from_pretrained: names, indices and shards that no folder can have."""

import errno
import json
import os

import pytest

from tests.config.test_pretrained import LLAMA, config_of, published, refused

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


def test_pointer_of_git_lfs_says_how_to_fetch_the_file(tmp_path):
    path = published(tmp_path / "model", LLAMA) / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "it is a pointer of Git LFS: `git lfs pull`" in refused(path.parent)


def test_link_to_weights_that_are_gone_is_named(tmp_path):
    path = published(tmp_path / "model", LLAMA) / "model.safetensors"
    path.unlink()
    path.symlink_to("../blobs/gone")
    assert f"{path}: is a link to ../blobs/gone, which does not exist" in refused(path.parent)


def test_adapter_without_its_model_is_named(tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    (folder / "config.json").rename(folder / "adapter_config.json")
    assert "has an adapter (adapter_config.json) without its model; merge it" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("pad_token_id", [2]),
        ("bos_token_id", 1.5),
    ],
)
def test_special_id_that_no_tokenizer_loads_is_refused(key, value, tmp_path):
    """A run said that its tokenizer cannot be loaded, and to use one that it has."""
    folder = published(tmp_path / "model", LLAMA | {key: value})
    (line,) = refused(folder).splitlines()[1:]
    assert line.startswith(f"  {folder}/config.json: {key} = {json.dumps(value)}: is no token id; ")


def test_special_ids_of_published_models_are_accepted(tmp_path):
    ids = {"eos_token_id": [1, 2], "bos_token_id": None, "pad_token_id": -1}
    folder = published(tmp_path / "model", LLAMA | ids | {"tokenizer_class": "LlamaTokenizer"})
    record = config_of(folder).run.published
    assert {key: record.config[key] for key in ids} == ids
    assert record.config["tokenizer_class"] == "LlamaTokenizer"


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
