"""A file that takes another's place does so whole or not at all."""

import os

import pytest

from parallel3d.base import atomic
from parallel3d.base.atomic import replace_text, replaced

pytestmark = pytest.mark.pure


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shared", [False, True])
def test_new_file_replaces_old_file(tmp_path, shared):
    path = tmp_path / "file"
    for text in ("one\n", "two\n"):
        replace_text(path, text, shared=shared)
        assert path.read_text() == text and names(tmp_path) == ["file"]


@pytest.mark.parametrize("shared", [False, True])
def test_error_leaves_old_file(tmp_path, shared):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced(path, shared=shared) as partial:
        partial.write_text("new")
        assert names(tmp_path) == sorted(["file", partial.name]) and path.read_text() == "old"
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


def test_replacing_works_beside_leftovers_of_a_killed_process(tmp_path):
    (tmp_path / "file.partial").write_text("half of a long text")
    replace_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and names(tmp_path) == ["file"]


def test_contents_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    seen = []
    sync = atomic.sync
    rename = os.rename
    monkeypatch.setattr(atomic, "fault_point", seen.append)

    def noted_sync(path):
        seen.append(path.name)
        sync(path)

    def noted_rename(*paths):
        seen.append("rename")
        rename(*paths)

    monkeypatch.setattr(atomic, "sync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with replaced(tmp_path / "file", points="mine") as partial:
        partial.write_text("new")
    assert seen == [
        "mine.before_fsync",
        "file.partial",
        "mine.after_fsync",
        "mine.before_rename",
        "rename",
        "mine.after_rename",
        "mine.before_folder_fsync",
        tmp_path.name,
        "mine.after_folder_fsync",
    ]
