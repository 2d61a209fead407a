"""A pickle that would run code runs none: it is refused, and the class that was met is named."""

import builtins
import io
import json
import os
import pickle
import subprocess
import zipfile
from itertools import product

import pytest
import torch

from tests.foreign.continuing import assert_no_checkpoint, convert_checkpoint
from tests.foreign.plain import SEEN, Run
from tests.foreign.sources import write_config

pytestmark = pytest.mark.gloo


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


class Foreign:
    """An object of a class that is not known here."""


def calls(marker):
    """Objects that would make a file, with the name that must be in the message."""
    made = str(marker)
    return {
        "posix.system": Hostile(os.system, f"touch {made}"),
        "Popen": Hostile(subprocess.Popen, ["touch", made]),
        "eval": Hostile(builtins.eval, f"open({made!r}, 'w')"),
        "exec": Hostile(builtins.exec, f"open({made!r}, 'w')"),
        "getattr": Hostile(getattr, "text", "format"),
        "torch.serialization.load": Hostile(torch.load, made),
        "Foreign": Foreign(),
    }


NAMES = list(calls("x"))


def as_zip(value, protocol=2):
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    return file.getvalue()


@pytest.fixture
def assert_refused(tmp_path, capsys):
    config = write_config(tmp_path, warmup=0)
    marker = tmp_path / "ran"

    def check(folder, name, place):
        run = tmp_path / "runs" / "new"
        assert convert_checkpoint(folder, run, config, *SEEN) == 2
        message = capsys.readouterr().err
        assert not marker.exists(), "the pickle has run code"
        assert name in message and place in message, message
        assert_no_checkpoint(run)

    return check


FORMS = ["zip", "zip of protocol 4", "legacy", "raw"]
# Each name in one form, and each form with one name.
PAIRS = [(name, FORMS[number % len(FORMS)]) for number, name in enumerate(NAMES)]
OTHERS = [pair for pair in product(NAMES, FORMS) if pair not in PAIRS]
# Of the other programs' files those that may be known, and are not.
KNOWN = ["posix.system", "torch.serialization.load", "Foreign"]
OF_OTHERS = [pytest.param(x, marks=() if x in KNOWN else pytest.mark.slow) for x in NAMES]


@pytest.mark.parametrize(
    ("name", "form"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)]
)
def test_hostile_file_of_deepspeed_is_refused(tmp_path, assert_refused, name, form):
    state = {"module": {}, "client": calls(tmp_path / "ran")[name]}
    file = io.BytesIO()
    if form == "legacy":
        torch.save(state, file, _use_new_zipfile_serialization=False)
    elif form == "raw":
        pickle.dump(state, file)
    else:
        file.write(as_zip(state, 4 if form.endswith("4") else 2))
    folder = tmp_path / "theirs" / "global_step3"
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(file.getvalue())
    (tmp_path / "theirs" / "latest").write_text("global_step3")
    assert_refused(tmp_path / "theirs", name, "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("name", OF_OTHERS)
def test_hostile_index_of_torch_is_refused(tmp_path, assert_refused, name):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(calls(tmp_path / "ran")[name]))
    assert_refused(folder, name, ".metadata")


def test_hostile_entry_of_torch_is_refused(tmp_path, assert_refused):
    """The file has the same length, so the index still names the entry's bytes."""
    from torch.distributed.checkpoint import save

    folder = tmp_path / "theirs"
    hostile = calls(tmp_path / "ran")["posix.system"]
    run = Run()
    entries = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    entries["optimizer"]["param_groups"][0]["lr"] = hostile
    save(entries, checkpoint_id=folder, no_dist=True)
    assert_refused(folder, "posix.system", ".distcp")


@pytest.mark.parametrize("name", OF_OTHERS)
def test_hostile_optimizer_of_the_trainer_is_refused(tmp_path, assert_refused, name):
    folder = tmp_path / "theirs"
    Run().save_as_trainer(folder)
    (folder / "optimizer.pt").write_bytes(as_zip({"state": calls(tmp_path / "ran")[name]}))
    assert_refused(folder, name, "optimizer.pt")


def test_file_outside_the_folder_is_refused(tmp_path, assert_refused):
    folder = tmp_path / "theirs"
    Run().save(folder)
    index = pickle.loads((folder / ".metadata").read_bytes())
    for info in index.storage_data.values():
        object.__setattr__(info, "relative_path", f"../{info.relative_path}")
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert_refused(folder, "outside the folder", ".metadata")


def test_trainers_own_arguments_are_not_read(tmp_path):
    """training_args.bin is a pickled object of transformers, which nothing here needs."""
    folder = tmp_path / "theirs"
    Run().save_as_trainer(folder)
    marker = tmp_path / "ran"
    (folder / "training_args.bin").write_bytes(as_zip(calls(marker)["posix.system"]))
    config = write_config(tmp_path, warmup=0)
    assert convert_checkpoint(folder, tmp_path / "runs" / "new", config, *SEEN) == 0
    assert not marker.exists()


def test_damaged_archive_is_refused(tmp_path, assert_refused):
    folder = tmp_path / "theirs"
    Run().save_as_trainer(folder)
    file = folder / "optimizer.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", json.dumps({}))
    assert_refused(folder, "cannot be read", "optimizer.pt")
