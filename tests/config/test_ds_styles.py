"""Other people's DeepSpeed files train with a parallel3d block added and nothing taken out."""

import json
import os
from importlib.util import find_spec

import pytest
import torch

from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from tests.config.styles import FILES, corpus_in, filled
from tests.train.running import folder_of, start_all

pytestmark = pytest.mark.gloo

THEIRS = {name: json.loads(path.read_text()) for name, path in FILES.items()}
OFFLOADED = ["trainer_zero2", "trainer_zero3"]
LOGGED = "everything_logged"
TRAINED = ["chat_fine_tuning", "megatron_bf16"]
OTHERS = sorted(set(THEIRS) - {*TRAINED, *OFFLOADED, LOGGED})
NO_OPTIMIZER = {name for name, file in THEIRS.items() if "optimizer" not in file}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    section = corpus_in(tmp_path_factory.mktemp("styles"))
    prepare(RunConfig.from_dict(filled({}, section)).data)
    return section


def run(names, data):
    """Each of them on one rank; what it came to, and its folder, by name."""
    raws = [filled(THEIRS[name], data, name=name) for name in names]
    ranks = start_all([(raw, stay_in, str(folder_of(raw).parent)) for raw in raws], (1, 1, 1))
    return {
        name: (ended, folder_of(raw))
        for name, raw, (ended,) in zip(names, raws, ranks, strict=True)
    }


def stay_in(rank, folder):
    """So that their relative output_path lies there; one thread is quickest at this size."""
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)


def check(ended, folder):
    assert (ended.code, ended.error) == (0, ""), (folder.name, ended.error, ended.printed)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(line["loss"] > 0 for line in lines)


@pytest.fixture(scope="module")
def trained(data):
    return run([*TRAINED, LOGGED], data)


def test_published_files_train(trained):
    for name in TRAINED:
        ended, folder = trained[name]
        check(ended, folder)
        assert ended.says("optimizer: not set; AdamW") == (name in NO_OPTIMIZER), name
    boards = trained["chat_fine_tuning"][1].parent / "boards" / "step1"
    assert list(boards.glob("events.out.tfevents.*"))
    assert trained["megatron_bf16"][0].says("time    step") == 2


@pytest.mark.slow  # by default they are read
def test_other_published_files_train(data):
    for name, (ended, folder) in run(OTHERS, data).items():
        check(ended, folder)
        assert ended.says("optimizer: not set; AdamW") == (name in NO_OPTIMIZER), name


@pytest.mark.slow  # DeepSpeed's CPU Adam is loaded, or compiled
def test_files_of_the_hugging_face_trainer_train(data):
    for name, (ended, folder) in run(OFFLOADED, data).items():
        check(ended, folder)
        assert ended.says("WARNING: optimizer.params.lr = 5e-05") == 1, name


def test_file_with_every_logger_trains(trained):
    ended, folder = trained[LOGGED]
    check(ended, folder)
    for word in ("time    step 1", "time    step 2"):
        assert ended.says(word) == 1, word
    assert (folder.parent / "csv" / "job" / "loss.csv").read_text().count("\n") == 3
    if find_spec("wandb") is None:
        assert ended.says("WARNING: wandb: wandb cannot be started and is left out") == 1


@pytest.mark.parametrize("name", THEIRS)
def test_published_file_is_read(name, data):
    raw = filled(THEIRS[name], data)
    assert THEIRS[name].keys() <= raw.keys()
    config = RunConfig.from_dict(raw).resolve(1)
    notes = [note for note in config.notes if note.startswith("optimizer: not set")]
    assert len(notes) == (name in NO_OPTIMIZER) and all("0.001" in note for note in notes)
