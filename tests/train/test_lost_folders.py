"""Folders that are removed, moved or changed while a run goes on: all is saved, or an error."""

import shutil
from pathlib import Path

import pytest

from parallel3d.base.errors import DataError
from parallel3d.checkpoint.manifest import verify
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.data.unchanged import OpenFiles
from parallel3d.train import trainer as trainer_module
from parallel3d.train.ending import DONE
from parallel3d.verify.local_ranks import RankFailed
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start, start_all

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]


QUICK = {"zero_optimization.stage": 1, "gradient_accumulation_steps": 1}


def after_step_1(disturbance, *args):
    """Call a disturbance when the first step has ended."""
    take_step = trainer_module.Trainer.take_step

    def take(self, *args_of_step):
        result = take_step(self, *args_of_step)
        trainer_module.Trainer.take_step = take_step
        disturbance(*args)
        return result

    trainer_module.Trainer.take_step = take


def lose(rank, folder):
    after_step_1(shutil.rmtree, folder)


def move(rank, folder):
    after_step_1(shutil.move, folder, f"{folder}-moved")


def replace(rank, folder):
    after_step_1(_replace, folder)


def _replace(folder):
    shutil.move(folder, f"{folder}-old")
    Path(folder).mkdir()


def truncate(rank, cache):
    after_step_1(_change, cache, 64)


def _change(cache, size):
    (path,) = Path(cache).rglob("tokens.bin")
    with path.open("r+b") as file:
        file.write(b"\1\0")
        if size is not None:
            file.truncate(size)


LOST = [
    ("lost-cache", lose, "cache"),
    ("lost-tokenizer", lose, "runs/lost-tokenizer/tokenizer"),
]
OTHERS = [
    ("moved-cache", move, "cache"),
    ("lost-run", lose, "runs/lost-run"),
    ("replaced-run", replace, "runs/replaced-run"),
]


@pytest.mark.parametrize("cases", [LOST, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_lost_folders_are_replaced_by_copies_or_end_the_run(tmp_path, cases):
    raws = {}
    runs = []
    for name, disturbance, lost in cases:
        root = tmp_path / name
        root.mkdir()
        settings = {"parallel3d.run.name": name, "parallel3d.run.save_weights": "cache" in name}
        settings |= {"parallel3d.data.read_ahead": 0} | QUICK
        raws[name] = changed(prepared_config(root), settings)
        runs.append((raws[name], disturbance, str(root / lost)))
    results = dict(zip(raws, start_all(runs, (1, 1, 1)), strict=True))

    for name in results:
        (ended,) = results[name]
        if "cache" not in name:
            assert ended.code is None, name
            assert ended.error.startswith("TrainingError: the last checkpoint was not saved"), name
            assert f"{folder_of(raws[name])} is not what it was" in ended.error
            continue
        assert (ended.code, ended.error) == (DONE, ""), name
        assert not ended.says("CHECKPOINT NOT SAVED")
        folder = folder_of(raws[name])
        assert not verify(folder / "checkpoints/step-4")
        for place in (folder, folder / "checkpoints/step-4", folder / "weights"):
            assert list(place.rglob("tokenizer.json")), place


def test_truncated_ids_are_an_error_that_names_the_file(tmp_path):
    """Reading a map past the end of its file would end the process without a word."""
    raw = prepared_config(tmp_path)
    with pytest.raises(RankFailed, match=r"tokens\.bin was truncated from [0-9,]+ to 64 bytes"):
        start(raw, (1, 1, 1), truncate, str(tmp_path / "cache"))


def test_ids_that_were_written_to_are_an_error(tmp_path):
    corpus = prepare(RunConfig.from_dict(prepared_config(tmp_path)).data)
    files = OpenFiles(corpus)
    files.check()
    _change(tmp_path / "cache", None)
    with pytest.raises(DataError, match=r"tokens\.bin was written to while the run read it"):
        files.check()
    files.close()


@pytest.mark.parametrize("damage", ["change", "remove", "add"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_verify_reads_every_file_of_the_tokenizer(saved_step, damage, name):
    path = saved_step / "tokenizer" / name
    before = path.read_bytes()
    if damage == "add":
        path = path.with_name("chat_template.jinja")
        path.write_text("{{ messages }}")
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(before.replace(b"{", b"{ ", 1))
    assert verify(saved_step)
    path.unlink(missing_ok=True)
    if damage != "add":
        path.write_bytes(before)
    assert not verify(saved_step)


@pytest.fixture(scope="module")
def saved_step(tmp_path_factory):
    """The folder of a checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    settings = {"parallel3d.train.steps": 1, "parallel3d.run.name": "a"} | QUICK
    raw = changed(prepared_config(root), settings)
    start_all([(raw,)], (1, 1, 1))
    return folder_of(raw) / "checkpoints/step-1"
