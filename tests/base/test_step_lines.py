"""Lines are read and appended beside what a full disk or a killed process left of one."""

import errno
import os

import pytest

from parallel3d.base import journal
from parallel3d.base.step_lines import read_lines
from parallel3d.train.digests import DIGESTS, append_digest

pytestmark = pytest.mark.gloo


def append_event(folder, step):
    journal.record("saved", step=step)


def append_a_digest(folder, step):
    append_digest(folder, step, {"weight": [step]})


@pytest.mark.parametrize(
    ("name", "append"), [(journal.EVENTS, append_event), (DIGESTS, append_a_digest)]
)
def test_line_appended_after_a_partial_line_is_read_whole(tmp_path, monkeypatch, name, append):
    monkeypatch.setattr(journal, "_folder", tmp_path)
    append(tmp_path, 1)
    with (tmp_path / name).open("a") as file:  # the disk was full
        file.write('{"step": 2, "eve')
    append(tmp_path, 3)
    append(tmp_path, 4)
    assert [line["step"] for line in read_lines(tmp_path / name)] == [1, 3, 4]


def test_digest_lost_to_a_full_disk_is_recorded_as_an_event(tmp_path, monkeypatch):
    write = os.write

    def full(file, data):
        if os.readlink(f"/proc/self/fd/{file}").endswith(DIGESTS):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(journal, "_folder", tmp_path)
    monkeypatch.setattr(os, "write", full)
    append_a_digest(tmp_path, 7)
    (event,) = read_lines(tmp_path / journal.EVENTS)
    assert (event["event"], event["step"]) == ("digest_not_written", 7)
    assert os.strerror(errno.ENOSPC) in event["reason"]
