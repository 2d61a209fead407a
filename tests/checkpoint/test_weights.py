"""The saved weights, as anybody reads them: every name once, whole, in fp32, and right."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from parallel3d.checkpoint.weights import save_weights
from parallel3d.config import RunConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import SEED, first_weights
from parallel3d.verify.shrink import shrink
from tests.cases import Case, Trainer
from tests.mesh.mortal import mortal
from tests.verify.configs import MODELS
from tests.verify.configs import config_of as whole_config

pytestmark = pytest.mark.gloo


def train_and_save(rank, case, directory):
    trainer = Trainer(case)
    trainer.run()
    parts = [
        (name, cut.dim, cut.start, cut.stop, value)
        for name, cut, copy, value in trainer.weights()
        if not copy
    ]
    save_weights(trainer.engine, trainer.mesh, directory)
    # Its return says that all is on disk, on every rank.
    return parts, sorted(path.name for path in directory.iterdir())


def read(directory):
    """The index, and every tensor of every file; a name that stands twice is an error."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                assert name not in tensors, f"{name} stands twice"
                tensors[name] = path.name, file.get_tensor(name)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return index, tensors


CASES = [
    Case(mesh=(2, 2, 2), tied=True, steps=3),
    pytest.param(Case(mesh=(2, 2, 2), tied=False, steps=3, offload="cpu"), marks=pytest.mark.slow),
    Case(mesh=(1, 1, 1), zero_stage=1, steps=3),
    # Seven layers on three coordinates of the pipeline, a vocabulary that tp does not divide.
    Case(mesh=(3, 1, 2), zero_stage=1, steps=3, model={"num_hidden_layers": 5}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_read_is_what_was_trained(case, tmp_path):
    directory = tmp_path / "run" / "weights"
    ranks = run_locally(train_and_save, case.world_size, case, directory)
    index, tensors = read(directory)
    whole = first_weights(case.config)
    assert tensors.keys() == whole.keys()
    assert ("head.output.weight" in tensors) == (not case.tied)

    trained = load_file(case.reference.weights)
    for name, (_, value) in tensors.items():
        assert value.dtype == torch.float32, name
        assert value.shape == whole[name].shape, name
        assert (value - trained[name]).abs().max() < 1e-5, name
        assert not torch.equal(value, whole[name]), f"{name} never moved"
    # Bit for bit what the ranks hold.
    for parts, _ in ranks:
        for name, dim, start, stop, part in parts:
            value = tensors[name][1]
            here = value if dim is None else value.narrow(dim, start, stop - start)
            assert torch.equal(here, part), name

    assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
    assert list(index["weight_map"]) == sorted(tensors)
    total = sum(value.numel() * 4 for _, value in tensors.values())
    assert index["metadata"]["total_size"] == total
    pp = case.mesh[0]
    files = [f"model-{p + 1:05d}-of-{pp:05d}.safetensors" for p in range(pp)]
    for _, names in ranks:
        assert names == [*files, "model.safetensors.index.json"]  # and no .partial


def test_weights_trained_in_bf16_are_saved_in_fp32(tmp_path):
    case = Case(mesh=(1, 2, 1), precision="bf16", steps=2, batch=16)
    run_locally(train_and_save, 2, case, tmp_path)
    _, tensors = read(tmp_path)
    assert {value.dtype for _, value in tensors.values()} == {torch.float32}
    # The masters, not the rounded copies that the forward reads.
    value = tensors["blocks.0.mlp.up.weight"][1]
    assert not torch.equal(value, value.bfloat16().float())


def save_with_a_full_disk(rank, directory):
    """Each rank's error; the writer of the second pipeline coordinate cannot write."""
    from parallel3d.checkpoint import weights

    trainer = Trainer(Case(mesh=(2, 1, 1), steps=1, batch=16))
    if rank == 1:

        def full(tensors, path, metadata):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        weights.save_file = full
    try:
        save_weights(trainer.engine, trainer.mesh, directory)
    except Exception as error:
        return str(error)
    return None


def test_a_failed_write_leaves_no_index_and_fails_everywhere(tmp_path):
    errors = run_locally(mortal, 2, save_with_a_full_disk, tmp_path)
    assert "No space left on device" in errors[1]
    assert errors[0] is not None
    assert not (tmp_path / "model.safetensors.index.json").exists()


def save_on_two_hosts(rank, directory):
    """Each rank's error, where the two see different folders."""
    from parallel3d.checkpoint import weights

    weights.appears = lambda look: look()
    trainer = Trainer(Case(mesh=(2, 1, 1), steps=1, batch=16))
    try:
        save_weights(trainer.engine, trainer.mesh, directory / f"host{rank}")
    except Exception as error:
        return str(error)
    return None


def test_no_index_names_a_file_that_is_on_another_host(tmp_path):
    for error in run_locally(save_on_two_hosts, 2, tmp_path):
        assert "model-00002-of-00002.safetensors was written on another host" in error, error
    assert [path.name for path in (tmp_path / "host0").iterdir()] == [
        "model-00001-of-00002.safetensors"
    ]


def save_as_started(rank, raw, directory):
    config = RunConfig.from_dict(raw)
    mesh = Mesh(config.mesh.pp, config.mesh.dp, config.mesh.tp)
    parts = assemble(config, mesh, seed=SEED)
    save_weights(parts.engine, mesh, Path(directory))
    mesh.barrier()


@pytest.mark.parametrize("model", [n for n, m in MODELS.items() if m["family"] != "gpt"])
def test_every_family_is_saved_whole(model, tmp_path):
    """On tp 4, where each rank holds the key and value weights of two heads whole."""
    config = RunConfig.from_dict(whole_config(model=model, sequence_parallel=True))
    small = shrink(config, ((1, 1, 4),))[1, 1, 4]
    run_locally(save_as_started, 4, small.to_dict(), str(tmp_path / "weights"), timeout=60)
    _, saved = read(tmp_path / "weights")
    whole = first_weights(small)
    assert saved.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(saved[name][1], value), name
