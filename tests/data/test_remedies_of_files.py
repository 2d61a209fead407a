"""Each remedy of the messages about files of text and data sets is applied as it is written."""

import gzip
import json
import shutil
import subprocess
import zipfile

import pytest

from parallel3d.config.data import DataConfig
from parallel3d.data.prepare import prepare
from parallel3d.data.unchanged import OpenFiles
from tests.data.test_remedies import TEXT, assert_read, lines_of, text_config, write
from tests.remedies import refused

pytestmark = pytest.mark.gloo


def test_file_of_nul_bytes_is_restored_or_removed(tmp_path):
    write(tmp_path / "a.txt", TEXT)
    path = write(tmp_path / "b.txt", "\0" * 9000)
    config = text_config(tmp_path / "*.txt", tmp_path)
    with refused("restore or remove it"):
        prepare(config)
    write(path, "restored")
    assert assert_read(config).num_documents == 2
    path.unlink()
    assert assert_read(config).num_documents == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON", "a.jsonl.gz"])
def test_lines_of_json_are_no_text_unless_by_line(tmp_path, name):
    path = tmp_path / name
    opened = gzip.open if name.endswith("gz") else open
    with opened(path, "wt") as file:
        file.writelines(json.dumps({"text": f"{TEXT} {number}"}) + "\n" for number in range(2))
    config = text_config(path, tmp_path)
    with refused('set data.source to "jsonl", or data.documents to "line"'):
        prepare(config)
    with refused("braces and keys"):
        prepare(config.model_copy(update={"documents": "blank_line"}))
    assert assert_read(config.model_copy(update={"documents": "line"})).num_documents == 2
    assert assert_read(config.model_copy(update={"source": "jsonl"})).num_documents == 2
    shutil.copy(path, tmp_path / "renamed.txt")
    assert assert_read(text_config(tmp_path / "renamed.txt", tmp_path)).num_documents == 1
    assert assert_read(text_config(tmp_path / "*", tmp_path)).num_documents == 2


def test_archive_is_unpacked(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside.txt", TEXT)
    with refused("unpack it, and name the files in it"):
        prepare(text_config(path, tmp_path))
    shutil.unpack_archive(path, tmp_path / "unpacked")
    assert_read(text_config(tmp_path / "unpacked/inside.txt", tmp_path))


def test_file_in_another_encoding_is_converted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(f"café {TEXT}".encode("latin-1"))
    with refused("convert the file with iconv"):
        prepare(text_config(path, tmp_path))
    converted = subprocess.run(
        ["iconv", "-f", "latin1", "-t", "utf-8", path], capture_output=True, check=True
    )
    path.write_bytes(converted.stdout)
    assert_read(text_config(path, tmp_path))


@pytest.mark.parametrize("value", [f'"\\ud800{TEXT}"', "9" * 5000, "[" * 100_000])
def test_line_that_cannot_be_read_is_fixed_or_removed(tmp_path, value):
    good = lines_of({"text": TEXT})
    path = write(tmp_path / "a.jsonl", f'{good}{{"text": {value}}}\n')
    config = text_config(path, tmp_path, source="jsonl")
    with refused("fix or remove the line"):
        prepare(config)
    write(path, good)
    assert assert_read(config).num_documents == 1
    write(path, good * 2)
    assert assert_read(config).num_documents == 2


def test_documents_of_which_none_can_be_used_are_fixed(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of({"body": TEXT}) * 30)
    settings = {"source": "jsonl", "on_error": "skip", "max_skipped": 1.0}
    with refused("none of 30 documents can be used; fix them") as refusal:
        prepare(text_config(path, tmp_path, **settings))
    assert 'it has "body"; set text_field' in refusal.text
    assert_read(text_config(path, tmp_path, **settings, text_field="body"))


@pytest.fixture
def data_set(tmp_path):
    import datasets

    rows = [f"{number} {TEXT}" for number in range(8)]
    return datasets.Dataset.from_dict({"text": rows})


def saved_config(name, tmp_path, **settings):
    own = {"cache": str(tmp_path / "cache"), "vocab_size": 300, "held_out_fraction": 0}
    own |= {"sequence_length": 8, "validation_split": None, **settings}
    return DataConfig(source="hub", name=str(name), **own)


def test_selection_of_a_data_set_is_flattened(tmp_path, data_set, monkeypatch):
    selected = data_set.select([5, 1, 3])
    # `save_to_disk` flattens, so the files are those of a cache.
    monkeypatch.setattr("datasets.load_from_disk", lambda folder: selected)
    data_set.save_to_disk(tmp_path / "set")
    with refused("call flatten_indices, then save_to_disk, and use that folder"):
        prepare(saved_config(tmp_path / "set", tmp_path))
    monkeypatch.undo()
    selected.flatten_indices().save_to_disk(tmp_path / "flat")
    assert assert_read(saved_config(tmp_path / "flat", tmp_path)).num_documents == 3


def test_split_without_rows_is_replaced(tmp_path, data_set):
    import datasets

    datasets.DatasetDict(train=data_set).save_to_disk(tmp_path / "set")
    with refused("use another split"):
        prepare(saved_config(tmp_path / "set", tmp_path, split="train[:0]"))
    assert_read(saved_config(tmp_path / "set", tmp_path, split="train[:4]"))


def test_name_of_no_folder_is_replaced_by_a_folder(tmp_path, data_set):
    with refused("use the path of a folder"):
        prepare(saved_config(tmp_path / "nowhere", tmp_path))
    data_set.save_to_disk(tmp_path / "set")
    assert_read(saved_config(tmp_path / "set", tmp_path))


def test_corpus_that_was_written_to_is_removed_and_prepared_again(tmp_path):
    config = text_config(write(tmp_path / "a.txt", TEXT), tmp_path)
    corpus = prepare(config)
    files = OpenFiles(corpus)
    tokens = corpus.directory / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with refused(f"Remove the folder {corpus.directory}"):
        files.check()
    files.close()
    shutil.rmtree(corpus.directory)
    again = assert_read(config)
    files = OpenFiles(again)
    files.check()
    files.close()
