"""A run of another program goes on here: losses and weights are those of its own continuation."""

import json
from shutil import copytree

import pytest

from parallel3d.verify.local_ranks import run_locally
from tests.foreign import sources
from tests.foreign.continuing import assert_goes_on, convert_checkpoint, go_on, merged

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(1800)]  # four meshes on a busy machine

MESHES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)]
SEEN = ("--samples-seen", str(sources.SAVED * sources.BATCH))


def check(source, root, config, made, meshes, *options):
    """Convert once, and go on from a copy on each mesh."""
    first = root / "runs" / "converted"
    assert convert_checkpoint(source, first, config, *options) == 0
    for mesh in meshes:
        run = root / "runs" / "x".join(map(str, mesh))
        copytree(first, run)
        go_on(run, config, mesh)
        assert_goes_on(run, *made)


@pytest.mark.parametrize(
    ("stage", "world", "meshes"),
    [
        (3, 2, [(1, 1, 1)]),
        pytest.param(0, 2, MESHES, marks=pytest.mark.slow),
        pytest.param(1, 2, MESHES, marks=pytest.mark.slow),
        pytest.param(2, 4, MESHES, marks=pytest.mark.slow),
        pytest.param(3, 4, MESHES, marks=pytest.mark.slow),
    ],
)
def test_run_of_deepspeed_goes_on(tmp_path, stage, world, meshes):
    config = sources.write_config(tmp_path)
    windows = sources.samples(config)
    made = run_locally(sources.by_deepspeed, world, tmp_path / "theirs", windows, stage)
    check(tmp_path / "theirs", tmp_path, config, merged(made), meshes)


@pytest.mark.parametrize(
    ("stage", "meshes"), [(1, [(1, 1, 1)]), pytest.param(0, MESHES, marks=pytest.mark.slow)]
)
def test_run_of_deepspeeds_pipeline_goes_on(tmp_path, stage, meshes):
    config = sources.write_config(tmp_path, tied=True)
    windows = sources.samples(config)
    made = run_locally(sources.by_pipeline, 2, tmp_path / "theirs", windows, stage)
    check(tmp_path / "theirs", tmp_path, config, merged(made), meshes)


@pytest.mark.slow
def test_run_of_gpt_neoxs_layers_goes_on(tmp_path):
    sizes = {"config": sources.NEOX, "vocab_size": sources.VOCABULARY}
    config = sources.write_config(tmp_path, family="transformers", sizes=sizes)
    windows = sources.samples(config)
    made = run_locally(sources.by_pipeline, 2, tmp_path / "theirs", windows, 1, "neox")
    check(tmp_path / "theirs", tmp_path, config, merged(made), MESHES)


@pytest.mark.parametrize(
    ("style", "meshes"),
    [
        ("nested", [(1, 1, 1)]),
        *(
            pytest.param(style, MESHES, marks=pytest.mark.slow)
            for style in ("flat", "numbered", "accelerate")
        ),
    ],
)
def test_run_of_fsdp_goes_on(tmp_path, style, meshes):
    config = sources.write_config(tmp_path, warmup=4)
    windows = sources.samples(config)
    made = run_locally(sources.by_fsdp, 2, tmp_path / "theirs", windows, style)
    check(tmp_path / "theirs", tmp_path, config, merged(made), meshes, *SEEN)


def by_trainer(rank, root, windows, decay, tied):
    losses, weights, _ = sources.by_trainer(root, windows, decay=decay, tied=tied)
    return losses, weights


@pytest.mark.parametrize(
    ("decay", "tied", "meshes"),
    [(0.1, False, [(1, 1, 1)]), pytest.param(0.0, True, MESHES, marks=pytest.mark.slow)],
)
def test_run_of_the_trainer_goes_on(tmp_path, decay, tied, meshes):
    config = sources.write_config(tmp_path, tied=tied, warmup=0)
    windows = sources.samples(config)
    made = run_locally(by_trainer, 1, tmp_path / "theirs", windows, decay, tied)
    folder = tmp_path / "theirs" / f"checkpoint-{sources.SAVED}"
    raw = json.loads(config.read_text())
    raw["optimizer"]["params"]["weight_decay"] = decay
    config.write_text(json.dumps(raw))
    check(folder, tmp_path, config, merged(made), meshes, *SEEN)
