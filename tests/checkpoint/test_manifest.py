"""Manifests and states, sound and hostile, and whether all chunks are the parameters."""

import json
import shutil

import numpy as np
import pytest

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.manifest import (
    Entry,
    check_file,
    read_manifest,
    read_state,
    shapes_of,
    step_folders,
    verify,
)
from tests.checkpoint.conftest import bad_files
from tests.checkpoint.folders import (
    FIRST,
    KINDS,
    SECOND,
    SHAPES,
    make_checkpoint,
    seal,
    state_of,
    write_manifest,
    write_tensors,
)

pytestmark = pytest.mark.gloo


def test_sound_checkpoint_passes(folder):
    assert verify(folder) == []
    manifest = read_manifest(folder)
    assert manifest.step == 10 and set(manifest.files) == {FIRST, SECOND, "state.json"}
    assert shapes_of(read_state(folder)) == SHAPES
    for name, entry in manifest.files.items():
        assert entry.size == (folder / name).stat().st_size
        assert check_file(folder, name, entry) == ""


def test_state_of_another_step_is_detected(folder):
    """Written wrong, with right hashes."""
    (folder / "state.json").write_text(json.dumps(state_of(11)))
    seal(folder, 10)
    assert bad_files(folder) == ["state.json"]


@pytest.mark.parametrize("step", [11, -10, 10.0, True, "10", None])
def test_manifest_of_another_step_is_refused(folder, step):
    seal(folder, step)
    assert bad_files(folder) == ["manifest.json"]


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.0, True])
def test_other_format_version_is_refused(folder, version):
    seal(folder, 10, format=version)
    with pytest.raises(CheckpointError, match="format" if version != 1 else "own hash"):
        read_manifest(folder)
    (folder / "state.json").write_text(json.dumps(state_of(10) | {"format": 2}))
    seal(folder, 10)
    assert bad_files(folder) == ["state.json"]


@pytest.mark.parametrize(
    "name",
    [
        "../step-20/state.json",
        "../evil.safetensors",
        "..",
        "/etc/passwd",
        "/tmp/evil.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..\\evil.safetensors",
        "a\0.safetensors",
        "a.safetensors\n",
        ".a.safetensors",
        ".safetensors",
        "-a.safetensors",
        "~a.safetensors",
        "a b.safetensors",
        "ä.safetensors",
        "a.safetensors/",
        "a.pt",
        "a.SAFETENSORS",
        "manifest.json",
        "State.json",
        "",
    ],
)
def test_unsafe_file_name_is_refused(folder, other, name):
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][name] = content["files"]["state.json"]
    write_manifest(folder, content)
    with pytest.raises(CheckpointError, match="not a plain file name"):
        read_manifest(folder)
    assert bad_files(folder) == ["manifest.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {}},
        {"files": {"state.json": None}},
        {"files": {"state.json": {"size": 1}}},
        {"files": {"state.json": {"size": -1, "digest": "0" * 32}}},
        {"files": {"state.json": {"size": 1.0, "digest": "0" * 32}}},
        {"files": {"state.json": {"size": 1, "digest": "0" * 31}}},
        {"files": {"state.json": {"size": 1, "digest": "F" * 32}}},
        {"files": {"state.json": {"size": 1, "digest": 10**31}}},
        {"files": {"state.json": {"size": 1, "digest": "0" * 32, "more": 1}}},
        {"more": 1},
        {"digest": "1" * 32},
        {"digest": None},
    ],
)
def test_malformed_manifest_is_refused(folder, change):
    content = json.loads((folder / "manifest.json").read_text()) | {"digest": "0" * 32}
    write_manifest(folder, content | change)
    with pytest.raises(CheckpointError, match=r"manifest\.json: .*; use another checkpoint"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "data", [b"[" * 10**5, b"[]", b"null", b"\xff", b"{", b'{"a": ' + b"9" * 9999 + b"}"]
)
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_file_without_json_object_is_refused(folder, name, data):
    (folder / name).write_bytes(data)
    if name == "state.json":
        seal(folder, 10)
        with pytest.raises(CheckpointError, match="not JSON"):
            read_state(folder)
    assert bad_files(folder) == [name]


def test_reformatted_manifest_is_refused(folder):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="own hash"):
        read_manifest(folder)


def test_false_file_size_takes_no_memory(folder):
    entry = Entry(2**60, "0" * 32)
    assert check_file(folder, FIRST, entry).endswith(f"bytes, not {2**60:,}")


@pytest.mark.parametrize(
    "parameters",
    [None, [], {}, {"w": None}, {"w": {}}, {"w": {"shape": 3}}, {"w": {"shape": [-1]}}],
)
def test_state_without_shapes_is_refused(folder, parameters):
    (folder / "state.json").write_text(json.dumps(state_of(10) | {"parameters": parameters}))
    seal(folder, 10)
    assert bad_files(folder) == ["state.json"]
    with pytest.raises(CheckpointError, match=r"state\.json"):
        shapes_of(read_state(folder))


# Checkpoints with right hashes whose tensors are not those of the state: the chunks of the second
# file, and a word of what is wrong. The first file holds rows [0, 2) of (4, 6).
ROWS = np.ones((2, 6), "<f4")
NOT_ONCE = "the files do not hold each element of 'w' once, but for exp_avg, exp_avg_sq"
WRONG = [
    ({}, NOT_ONCE),
    ({"w|master|2,0": ROWS[:1]}, NOT_ONCE),
    ({"w|master|2,0": ROWS[:, :5]}, NOT_ONCE),
    ({"w|master|3,0": ROWS}, NOT_ONCE),
    ({"w|master|2,1": ROWS}, NOT_ONCE),
    ({"w|master|2,999999999999999999": ROWS}, NOT_ONCE),
    ({"w|master|2": ROWS[0]}, NOT_ONCE),
    ({"w|master|2,0,0": ROWS[None]}, NOT_ONCE),
    ({"v|master|2,0": ROWS}, "no parameter 'v'"),
    ({"w|weights|2,0": ROWS}, NOT_ONCE),
    ({"w|master|0,0": ROWS}, NOT_ONCE),
    ({"w|master|1,0": ROWS}, NOT_ONCE),
    ({"w|master|2,0": ROWS, "w|master|3,5": ROWS[:1, :1]}, NOT_ONCE),
]


@pytest.mark.parametrize(("tensors", "word"), WRONG)
def test_chunks_must_tile_the_parameters(tmp_path, tensors, word):
    shapes = {"w": (4, 6)}
    folder = make_checkpoint(tmp_path, shapes=shapes)
    moments = {f"w|{kind}|2,0": ROWS for kind in KINDS[1:]}
    write_tensors(folder / SECOND, {"w|master|2,0": ROWS} | moments)
    seal(folder, 10)
    assert verify(folder) == []
    write_tensors(folder / SECOND, tensors | moments)
    seal(folder, 10)
    (bad,) = verify(folder)
    assert word in bad.reason and bad.file == ("state.json" if word == NOT_ONCE else SECOND)


def test_missing_parameters_are_reported(folder):
    parameters = state_of(10)["parameters"] | {"more": {"shape": [2]}, "none": {"shape": [0]}}
    (folder / "state.json").write_text(json.dumps(state_of(10) | {"parameters": parameters}))
    seal(folder, 10)
    assert [bad.reason for bad in verify(folder)] == [
        "the files do not hold each element of 'more' once, but for no kind"
    ]


def test_folder_name_must_match_the_step(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read_manifest(folder.__class__(".")).step == 10
    link = folder.with_name("best")
    link.symlink_to(folder)
    with pytest.raises(CheckpointError, match="of step 10, but the folder is 'best'"):
        read_manifest(link)


def test_step_folders_are_listed_newest_first(tmp_path):
    for name in ("step-9", "step-10", "step-0", "step-7.tmp", "step-3.deleted", "step-010"):
        (tmp_path / name).mkdir()
    for name in ("step--1", "step-", "step-1a", "Step-1", "xstep-1", "step-1 ", "step-\u0663"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-11").touch()
    (tmp_path / "latest").write_text("step-11")
    assert step_folders(tmp_path) == [(n, tmp_path / f"step-{n}") for n in (10, 9, 0)]
    shutil.rmtree(tmp_path)
    assert step_folders(tmp_path) == []
