"""The saved weights, as anybody reads them: every name once, whole, in fp32, and right."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.huggingface import from_ranks
from parallel3d.huggingface.from_ranks import save_weights
from parallel3d.huggingface.weight_files import (
    INDEX,
    About,
    WeightFiles,
    create,
    write_rest,
    write_tensor,
)
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import SEED, first_weights, in_our_names
from parallel3d.verify.shrink import shrink
from tests.cases import Case, Trainer
from tests.mesh.mortal import mortal
from tests.verify.configs import MODELS
from tests.verify.configs import config_of as whole_config

pytestmark = pytest.mark.gloo
SHARDS = 20_000  # bytes of one
ONE_LAYER = {"num_hidden_layers": 1}


def train_and_save(rank, case, directory):
    trainer = Trainer(case)
    trainer.run()
    parts = [(name, cut, value) for name, cut, copy, value in trainer.weights() if not copy]
    save_weights(trainer.engine, trainer.mesh, directory, config=trainer.config)
    # Its return says that all is on disk, on every rank.
    return parts, sorted(path.name for path in (directory / "weights").iterdir())


def read(directory, config):
    """Every tensor of every file, by our names; one that stands twice is an error."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                assert name not in tensors, f"{name} stands twice"
                tensors[name] = file.get_tensor(name)
    return in_our_names(config, tensors)


CASES = [
    pytest.param(Case(mesh=(2, 2, 2), tied=True), marks=pytest.mark.slow),
    pytest.param(Case(mesh=(2, 2, 2), tied=False, offload="cpu"), marks=pytest.mark.slow),
    pytest.param(Case(mesh=(1, 1, 1), zero_stage=1), marks=pytest.mark.slow),
    # Three layers on two coordinates of the pipeline, a vocabulary that tp does not divide.
    Case(mesh=(2, 1, 2), zero_stage=1, batch=4, microbatches=1, steps=1),
    pytest.param(
        Case(mesh=(3, 1, 2), zero_stage=1, model={"num_hidden_layers": 5}), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_written_weights_equal_the_trained_ones(case, tmp_path):
    directory = tmp_path / "run"
    ranks = run_locally(train_and_save, case.world_size, case, directory)
    tensors = read(directory / "weights", case.config.model)
    whole = first_weights(case.config)
    assert tensors.keys() == whole.keys()
    assert ("head.output.weight" in tensors) == (not case.tied)

    trained = load_file(case.reference.weights)
    for name, value in tensors.items():
        assert value.dtype == torch.float32, name
        assert value.shape == whole[name].shape, name
        assert (value - trained[name]).abs().max() < 1e-5, name
        assert not torch.equal(value, whole[name]), f"{name} never moved"
    # Bit for bit what the ranks hold.
    for parts, _ in ranks:
        for name, cut, part in parts:
            assert torch.equal(cut.part_of(tensors[name]), part), name

    for _, names in ranks:
        assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert [path.name for path in directory.iterdir()] == ["weights"]


def test_weights_trained_in_bf16_are_saved_in_fp32(tmp_path):
    sizes = {"model": ONE_LAYER, "steps": 1, "batch": 4, "microbatches": 1}
    case = Case(mesh=(1, 2, 1), precision="bf16", **sizes)
    run_locally(train_and_save, 2, case, tmp_path)
    tensors = read(tmp_path / "weights", case.config.model)
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    # The masters, not the rounded copies that the forward reads.
    value = tensors["blocks.0.mlp.up.weight"]
    assert not torch.equal(value, value.bfloat16().float())


def save_with_a_full_disk(rank, directory):
    """Each rank's error; the writer of the second pipeline coordinate cannot write."""
    trainer = Trainer(Case(mesh=(2, 1, 1), steps=1, batch=16, model=ONE_LAYER))
    if rank == 1:

        def full(*tensor):
            raise OSError(28, "No space left on device")

        from_ranks.write_tensor = full
    try:
        save_weights(trainer.engine, trainer.mesh, directory, config=trainer.config)
    except Exception as error:
        return str(error)
    return None


def test_failed_write_keeps_the_old_folder_and_fails_on_all_ranks(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.safetensors").write_text("of the run's last end")
    for error in run_locally(mortal, 2, save_with_a_full_disk, tmp_path):
        assert "No space left on device" in error, error
    assert (tmp_path / "weights/model.safetensors").read_text() == "of the run's last end"


def save_on_two_hosts(rank, directory):
    """Each rank's error, where the two see different folders."""
    from parallel3d.huggingface import weight_files

    patch.object(weight_files, "wait_until", lambda look: look()).start()  # none comes late
    trainer = Trainer(Case(mesh=(2, 1, 1), steps=1, batch=16, model=ONE_LAYER))
    try:
        save_weights(trainer.engine, trainer.mesh, directory / f"host{rank}", config=trainer.config)
    except Exception as error:
        return str(error)
    return None


def test_hosts_without_a_shared_folder_leave_no_complete_folder(tmp_path):
    for error in run_locally(save_on_two_hosts, 2, tmp_path):
        assert "model.safetensors was created on another node, and is not visible here" in error, (
            error
        )
    assert not (tmp_path / "host0/weights").exists()


def save_as_started(rank, raw, directory):
    config = RunConfig.from_dict(raw)
    sizes = config.mesh.sizes
    mesh = Mesh(pp=sizes.pp, dp=sizes.dp, tp=sizes.tp)
    config = config.resolve(sizes.ranks).completed()
    parts = assemble(config, mesh, seed=SEED)
    save_weights(parts.engine, mesh, Path(directory), config=config, shard_bytes=SHARDS)
    mesh.barrier()


def as_verified(model):
    """On tp 4, where each rank holds the key and value weights of two heads whole."""
    config = RunConfig.from_dict(whole_config(model=model, zero=1, sequence_parallel=True))
    mesh = MeshSizes(tp=4)
    return shrink(config, (mesh,))[mesh]


SLOW = partial(pytest.param, marks=pytest.mark.slow)
CONFIGS = [
    *(
        SLOW(case.config, id=str(case))
        for case in (
            Case(mesh=(2, 1, 2)),
            Case(mesh=(1, 1, 1), zero_stage=1),
            Case(mesh=(2, 1, 1), zero_stage=1, tied=False),
            Case(mesh=(1, 1, 2), zero_stage=3, offload="cpu"),
            Case(mesh=(1, 2, 1), zero_stage=1),
            Case(mesh=(1, 2, 1), zero_stage=3, precision="bf16"),
            Case(mesh=(2, 2, 2), zero_stage=3, tied=False),
            Case(mesh=(4, 1, 1), zero_stage=1, model={"num_hidden_layers": 5}),
        )
    ),
    # The names of the others' weights: tests/models/test_transformers.py.
    *(
        (pytest.param if name == "moe" else SLOW)(as_verified(name), id=name)
        for name, model in MODELS.items()
        if model["family"] != "gpt"
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_files_are_identical_from_every_mesh(config, tmp_path):
    """Of one process, which knows no mesh and no engine, in the same shards; every family whole."""
    layout = WeightFiles(config.model, shard_bytes=SHARDS)
    create(tmp_path / "alone", layout)
    whole = first_weights(config)
    if config.precision == "bf16":  # masters start as what the forward reads
        whole = {name: value.bfloat16().float() for name, value in whole.items()}
    for name, value in whole.items():
        for theirs, tensor in layout.converted(name, value).items():
            write_tensor(tmp_path / "alone", layout, theirs, tensor)
    write_rest(tmp_path / "alone", About(config, 0, 0), layout)
    assert len(layout.files) > 2

    size = config.mesh.pp * config.mesh.dp * config.mesh.tp
    run_locally(save_as_started, size, config.to_dict(), str(tmp_path), timeout=60)
    for name in [*layout.files, "config.json", "generation_config.json", INDEX]:
        written = (tmp_path / "weights" / name).read_bytes()
        assert written == (tmp_path / "alone" / name).read_bytes(), name
    saved = read(tmp_path / "weights", config.model)
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], value) for name, value in whole.items())
