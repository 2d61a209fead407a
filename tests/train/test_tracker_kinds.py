"""The csv files of a run, whoever fills the disk or ends the run."""

import csv
import errno

import pytest

from parallel3d.train.tracker_kinds import CsvTracker

pytestmark = pytest.mark.gloo


def test_csv_rows_of_steps_to_come_are_dropped(tmp_path):
    for first in (0, 2):
        tracker = CsvTracker(tmp_path, first)
        tracker.start()
        for step in range(first + 1, first + 4):
            tracker.log({"loss": 10 * first + step}, step)
    with open(tmp_path / "loss.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["step", "loss"], ["1", "1"], ["2", "2"], ["3", "23"], ["4", "24"], ["5", "25"]]


def test_a_csv_file_whose_head_is_cut_off_begins_anew(tmp_path):
    (tmp_path / "loss.csv").write_text("step,lo")
    tracker = CsvTracker(tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0}, 1)
    assert (tmp_path / "loss.csv").read_text() == "step,loss\n1,1.0\n"


def test_csv_rows_stay_where_the_disk_is_full_at_the_start(tmp_path, monkeypatch):
    first = CsvTracker(tmp_path)
    first.start()
    for step in (1, 2):
        first.log({"loss": 1.0}, step)
    before = (tmp_path / "loss.csv").read_bytes()

    def sync(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("parallel3d.base.atomic.sync", sync)
    with pytest.raises(OSError, match="No space left"):
        CsvTracker(tmp_path, 1).start()
    assert (tmp_path / "loss.csv").read_bytes() == before
    monkeypatch.undo()
    CsvTracker(tmp_path, 1).start()
    assert (tmp_path / "loss.csv").read_bytes() == b"step,loss\r\n1,1.0\r\n"
