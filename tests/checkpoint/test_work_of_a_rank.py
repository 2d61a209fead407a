"""What a rank of many opens, reads and is sent until its checkpoint is loaded: counted."""

import json
import os
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from parallel3d.checkpoint import resume
from parallel3d.checkpoint.load import _packed_rows, load
from parallel3d.checkpoint.manifest import shapes_of
from parallel3d.models import layers
from tests.cases import Case
from tests.checkpoint.coordinates import Coordinate, States, write

pytestmark = pytest.mark.gloo

CONFIG = Case().config
MODEL = layers(CONFIG.model)


class Hearing(Coordinate):
    """A rank that hears what the others would say, and counts the bytes."""

    def hear(self, first, headers):
        self.first, self.headers, self.received = iter(first), headers, 0
        return self

    def gather_texts(self, text, aside=False):
        found = self.headers if text else [text]  # "": nothing went wrong
        self.received += sum(map(len, found))
        return found

    def broadcast_text(self, text):
        said = next(self.first)  # by rank 0
        self.received += len(said)
        return said


class Loaded(States):
    """States that are read into, and that come to what they were when they were written."""

    @contextmanager
    def opened(self, number, write=True):
        with super().opened(number) as written:
            read = [{kind: torch.full_like(v, -1) for kind, v in w.items()} for w in written]
            yield read
            for theirs, ours in zip(written, read, strict=True):
                assert all(torch.equal(theirs[kind], ours[kind]) for kind in theirs)

    def finish_loading(self):
        """Nothing computes with them."""

    def set_counters(self, counters):
        assert counters == self.counters()


@pytest.fixture
def noted(monkeypatch):
    """Counts the files that are opened and looked at, by name, and the bytes of headers."""
    counts = SimpleNamespace(opened=Counter(), sizes=0, header_bytes=0)
    really_open, really_read, really_check = os.open, os.pread, resume._check_size

    def opened(path, *args, **options):
        counts.opened[os.path.basename(path)] += 1
        return really_open(path, *args, **options)

    def read(*args):
        data = really_read(*args)
        counts.header_bytes += len(data)
        return data

    def check(*args):
        counts.sizes += 1
        really_check(*args)

    def begin():
        counts.__init__(opened=Counter(), sizes=0, header_bytes=0)
        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "pread", read)
        monkeypatch.setattr(resume, "_check_size", check)
        return counts

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return begin


def load_on(rank, folder, first, headers, sizes):
    """Load what the rank itself wrote; the bytes that others sent it."""
    mesh = Hearing(sizes, rank).hear(first, headers)
    found, rejected = resume.find(folder.parent, "auto", mesh)
    assert not rejected
    load(
        found.folder, found.files, found.state,
        engine=SimpleNamespace(states=Loaded(mesh, MODEL)), mesh=mesh, layers=MODEL,
    )  # fmt: skip
    return mesh.received


@pytest.mark.parametrize(
    "sizes", [(2, 4, 2), (2, 16, 2), pytest.param((2, 128, 4), marks=pytest.mark.slow)], ids=str
)
def test_the_work_of_a_rank_does_not_grow_with_their_number(sizes, tmp_path, noted):
    """Files opened and headers read: as many on 16 ranks as on 1,024. Bytes sent: some a chunk."""
    folder = write(tmp_path / "checkpoints", sizes, CONFIG)
    world = sizes[0] * sizes[1] * sizes[2]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) == world
    found = resume._described(folder)
    first = [json.dumps(["step-2"]), json.dumps(found)]
    headers = [
        json.dumps(_packed_rows(folder, shards, shapes_of(found[1]), Coordinate(sizes, rank)))
        for rank in range(world)
    ]
    counts = noted()
    received = load_on(world // 2, folder, first, headers, sizes)
    mine = shards[world // 2]
    # To hash it, to see that it is what its name says, for the index, and for what is in it.
    assert counts.opened == {mine: 4}
    assert counts.sizes == 1
    of_others = received - sum(map(len, first))
    assert of_others == sum(map(len, headers)) < 1200 * world  # 1 KB for each rank's file
    whole = sum((folder / name).stat().st_size for name in shards)
    assert of_others < whole / 3, (of_others, whole)
    header_bytes = counts.header_bytes

    noted()
    load_on(0, folder, first, headers, sizes)
    small = {"manifest.json": 1, "state.json": 2}
    assert counts.opened == {shards[0]: 4, **small}
    assert counts.sizes == world + 2  # of each file and the state, and of one as all ranks
    assert max(header_bytes, counts.header_bytes) < 30_000
