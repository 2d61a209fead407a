"""Remedies about published weights and exports, each done as it is written."""

import errno
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel3d.base.errors import remedy_of
from parallel3d.config import RunConfig
from parallel3d.data.sources import no_progress
from parallel3d.huggingface import conversion
from parallel3d.huggingface.conversion import export
from parallel3d.huggingface.initial_weights import find_weights, tokenizer_warning
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from tests.huggingface.checkpoints import checkpoint_of, small, tokenizer_in
from tests.huggingface.published import run_config, save
from tests.remedies import refused

pytestmark = pytest.mark.gloo


@pytest.fixture
def mesh():
    own = Mesh(launch=Launch(0, 1, 0))
    yield own
    own.close()


def test_folder_of_weights_is_restored_or_set_again(tmp_path, mesh):
    folder = save("llama2", tmp_path / "model")

    def read():
        return RunConfig.from_dict(run_config(folder)).model

    model = read()
    assert find_weights(model, model.from_pretrained, mesh) == folder
    shutil.move(folder, tmp_path / "away")
    with refused("the folder no longer exists; restore it, or resume from a checkpoint"):
        find_weights(model, model.from_pretrained, mesh)
    shutil.move(tmp_path / "away", folder)
    file = folder / "model.safetensors"
    before = load_file(file)
    changed = {name: value + 1 for name, value in before.items()}
    save_file(changed, file, {"format": "pt"})
    with refused("set parallel3d.model.from_pretrained again, or restore them"):
        find_weights(model, model.from_pretrained, mesh)
    again = read()
    assert find_weights(again, again.from_pretrained, mesh) == folder
    save_file(before, file, {"format": "pt"})
    assert find_weights(model, model.from_pretrained, mesh) == folder


def test_tokenizer_of_the_model_is_the_one_that_the_warning_names(tmp_path):
    model = tokenizer_in(tmp_path / "model")
    other = tokenizer_in(tmp_path / "other", ["in to it"])
    warning = tokenizer_warning(model, other, str(model))
    assert f"set parallel3d.data.tokenizer to {model}, unless" in warning
    assert tokenizer_warning(model, model, str(model)) == ""


def test_conversion_that_failed_is_done_elsewhere_or_again(tmp_path, monkeypatch):
    source = CheckpointSource(checkpoint_of(small("gpt"), tmp_path))

    def exported(to):
        return export(source, source.about(), WeightFiles(source.config.model), to, no_progress)

    create = conversion.create

    def fail(folder, layout):
        if folder.name.startswith("full"):
            raise OSError(errno.ENOSPC, "No space left on device")
        create(folder, layout)

    monkeypatch.setattr(conversion, "create", fail)
    with refused("free some space, or name another folder with --to"):
        exported(tmp_path / "full")
    assert exported(tmp_path / "other").ok
    monkeypatch.undo()
    assert exported(tmp_path / "full").ok


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "give this user the right to write there"),
        (errno.EPERM, "give this user the right to write there"),
        (errno.EIO, "otherwise"),
    ],
)
def test_remedy_of_a_failed_write_fits_its_cause(number, remedy):
    assert remedy_of(OSError(number, "words"), "otherwise") == remedy


def test_weights_that_would_be_rounded_are_exported_in_fp32():
    scaled = {"type": "mup", "base_width": 32, "output_multiplier": 3.0}
    config = small("llama", parametrization=scaled)
    refusal = WeightFiles(config, torch.bfloat16).refusal
    assert refusal.endswith("use --dtype fp32"), refusal
    assert not WeightFiles(config, torch.float32).refusal
