"""Each remedy about checkpoints is applied as it is written: another one, another run."""

import json
import shutil
from types import SimpleNamespace

import pytest

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.describe import find_checkpoints
from parallel3d.checkpoint.find import find_named, find_newest
from parallel3d.checkpoint.load import _check_parameters
from parallel3d.checkpoint.manifest import read_manifest, read_state
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.state import RunState
from parallel3d.config import RunConfig
from parallel3d.config.parallel3d_block import CheckpointConfig
from parallel3d.data.prepare import prepare
from parallel3d.extras.guard.host_memory import open_memory
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from tests.checkpoint.drill import changed, prepared_config
from tests.checkpoint.folders import FIRST, make_checkpoint, seal, state_of
from tests.remedies import refused

pytestmark = pytest.mark.gloo


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def state_without(key):
    def write(folder):
        state = state_of(10)
        del state[key]
        (folder / "state.json").write_text(json.dumps(state))
        seal(folder, 10)

    return write


def other_step(folder):
    (folder / "state.json").write_text(json.dumps(state_of(11)))
    seal(folder, 10)


def no_object(folder):
    (folder / "state.json").write_text("[")
    seal(folder, 10)


DAMAGES = {
    "tensors cut off": lambda folder: cut(folder / FIRST),
    "tensors missing": lambda folder: (folder / FIRST).unlink(),
    "no tensors": lambda folder: (folder / FIRST).write_bytes(b"x"),
    "state missing": lambda folder: (folder / "state.json").unlink(),
    "state cut off": lambda folder: cut(folder / "state.json"),
    "state is no object": no_object,
    "state of another step": other_step,
    "state without its config": state_without("config"),
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut off": lambda folder: cut(folder / "manifest.json"),
    "manifest of another format": lambda folder: seal(folder, 10, format=2),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_another_checkpoint_is_used(tmp_path, name):
    """By its step or its path, and by itself if none is named."""
    mesh = Mesh()
    folder = make_checkpoint(tmp_path, step=10)
    other = make_checkpoint(tmp_path, step=9)
    DAMAGES[name](folder)
    with pytest.raises(CheckpointError, match=r"step-10"):
        find_named(tmp_path, 10, mesh)
    for resume in (9, str(other)):
        assert find_named(tmp_path, resume, mesh).folder == other
    newest, rejected = find_newest([DiskPlace(mesh, tmp_path)])
    assert newest.folder == other and len(rejected) == 1


def test_folder_of_a_step_or_a_run_is_named(tmp_path):
    make_checkpoint(tmp_path / "run/checkpoints", step=10)
    with refused("name a folder step-N, or a run's folder"):
        find_checkpoints(tmp_path)
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/step-10"):
        assert [folder.name for folder in find_checkpoints(path)] == ["step-10"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return prepared_config(tmp_path_factory.mktemp("remedies"))


def position(raw, state, path):
    """Where a run of this config goes on after a state."""
    config = RunConfig.from_dict(raw).resolve(1)
    corpus = prepare(config.data)
    whole = config.with_corpus(corpus.vocab_size, len(corpus.train))
    return RunState(whole, corpus).position_in(state, path, lambda _: None)


def state_at(raw):
    config = RunConfig.from_dict(raw).resolve(1)
    corpus = prepare(config.data)
    whole = config.with_corpus(corpus.vocab_size, len(corpus.train))
    own = RunState(whole, corpus)
    from parallel3d.checkpoint.state import Position

    return own.at(Position(2, 64, 8)), corpus.tokenizer_directory


CHANGES = {
    "parallel3d.train.seed": 1,
    "parallel3d.data.sequence_length": 8,
}


@pytest.mark.parametrize("setting", CHANGES)
def test_setting_is_set_back(raw, tmp_path, setting):
    state, _ = state_at(raw)
    with refused("set it back, or start a new run"):
        position(changed(raw, {setting: CHANGES[setting]}), state, tmp_path)
    assert position(raw, state, tmp_path).step == 2


def test_own_tokenizer_is_named(raw, tmp_path):
    state, tokenizer = state_at(raw)
    path = tmp_path / "step-2"
    shutil.copytree(tokenizer, path / "tokenizer")
    smaller = changed(raw, {"parallel3d.data.vocab_size": 265})
    remedy = f"add --data.tokenizer {path / 'tokenizer'}"
    with refused(remedy):
        position(smaller, state, path)
    named = changed(raw, {"parallel3d.data.tokenizer": str(path / "tokenizer")})
    assert position(named, state, path).step == 2
    both = changed(smaller, {"parallel3d.data.tokenizer": str(path / "tokenizer")})
    assert position(both, state, path).step == 2
    other = tmp_path / "other"
    shutil.copytree(prepare(RunConfig.from_dict(smaller).data).tokenizer_directory, other)
    with refused("set data.tokenizer back"):
        position(changed(raw, {"parallel3d.data.tokenizer": str(other)}), state, path)
    assert position(raw, state, path).step == 2


def test_state_is_read_as_it_was_written(tmp_path):
    folder = make_checkpoint(tmp_path, step=10)
    assert read_manifest(folder).step == read_state(folder)["step"]


def test_folder_in_memory_is_named_for_each_host(tmp_path):
    """As the setting's default, which is in memory on each host."""
    mesh = Mesh()
    nodes = find_nodes(mesh)

    def open_in(folder):
        settings = CheckpointConfig(in_memory_every=1, in_memory_folder=str(folder))
        return open_memory(settings, mesh, nodes, tmp_path / "run", print)

    with refused("name a folder in memory of each host"):
        open_in(tmp_path / "nowhere")
    memory = open_in(tmp_path)
    message = memory.describe_missing(10**9, 10**10)
    assert "enlarge it (docker: --shm-size), or set checkpoint.in_memory_folder" in message


def test_model_is_set_back():
    expected = {"weight": (4, 4)}
    source = SimpleNamespace(folder="step-1", state={"parameters": {"weight": {"shape": [4, 8]}}})
    with refused("set the model back, or start a new run"):
        _check_parameters(source, expected)
    _check_parameters(source, {"weight": (4, 8)})
