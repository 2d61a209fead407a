"""Documents: which files they are, in which order, and what is wrong with those refused."""

import os
import sysconfig
from pathlib import Path

import pytest

from parallel3d.base.errors import DataError
from parallel3d.data.sources import matching_files
from tests.data.documents import names_of, read_source

pytestmark = pytest.mark.gloo


def test_globs_and_paths_give_each_file_once_in_sorted_order(folder):
    documents = read_source("text", [f"{folder}/**/*.txt", f"{folder}/b.txt", f"{folder}/*.txt"])
    names = [os.path.relpath(name, folder) for name in names_of(documents)]
    assert names == ["a.txt", "b.txt", "c [1].txt", "d.txt", "e.txt", "sub/f.txt"]
    assert read_source("text", [folder / "c [1].txt"]).name(0).endswith("c [1].txt")


def test_symbolic_link_is_read_once(folder):
    (folder / "z.txt").symlink_to(folder / "a.txt")
    assert len(read_source("text", [f"{folder}/*.txt"])) == 5


def test_standard_library_excludes_tests_idlelib_and_packages():
    documents = read_source("python-stdlib")
    names = names_of(documents)
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {"json/decoder.py", "argparse.py", "asyncio/events.py"} <= set(names)
    folders = {part for name in names for part in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "idlelib", "site-packages", "__pycache__"}
    sizes = documents.table["num_bytes"]
    assert sizes.sum() > 5_000_000
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "json/decoder.py").stat().st_size == sizes[names.index("json/decoder.py")]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("nothing/*.md",), r"'nothing/\*.md' matches no file .*working directory"),
        (("a.txt", "gone.txt"), "'gone.txt' matches no file"),
        (("sub",), r"'sub' is a directory; use a glob such as sub/\*\*/\*.txt"),
    ],
)
def test_paths_without_files_are_refused(folder, monkeypatch, paths, message):
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message):
        read_source("text", paths)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_pipe_or_device_is_refused_without_opening_it(tmp_path, source):
    """Opening a pipe would wait for its writer."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(DataError, match=rf"'{path}' is not a regular file.*; copy"):
            read_source(source, [path])
    (tmp_path / "a.txt").write_text("text")
    assert matching_files([f"{tmp_path}/*"]) == [f"{tmp_path}/a.txt"]
