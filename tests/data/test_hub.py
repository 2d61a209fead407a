"""Source hub: what `datasets` loads, here from folders, and one message where it cannot."""

import json

import datasets
import pytest

from parallel3d.base.errors import DataError
from tests.data.documents import READ, names_of, read_source, texts_at, texts_of

pytestmark = pytest.mark.gloo

ROWS = [text for text in READ.values() if text] * 2


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """What `datasets` caches goes to the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def write_jsonl(folder, name="train.jsonl", rows=ROWS):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(rows)]
    (folder / name).write_text("\n".join(lines))


def write_parquet(folder):
    folder.mkdir()
    datasets.Dataset.from_dict({"text": ROWS}).to_parquet(folder / "train.parquet")


def write_saved(folder):
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(folder, num_shards=3)


def write_saved_splits(folder):
    splits = {"train": datasets.Dataset.from_dict({"text": ROWS})}
    datasets.DatasetDict(splits).save_to_disk(folder)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_saved, write_saved_splits])
def test_folder_is_loaded(tmp_path, write):
    write(tmp_path / "set")
    documents = read_source("hub", name=str(tmp_path / "set"))
    assert texts_of(documents) == ROWS
    assert names_of(documents)[1].startswith(f"{tmp_path}/set train")
    assert texts_at(documents, [1, 7]) == [ROWS[1], ROWS[7]]


def test_split_and_column_are_chosen(tmp_path):
    write_jsonl(tmp_path / "set")
    write_jsonl(tmp_path / "set", "test.jsonl", ["only this"])
    assert texts_of(read_source("hub", name=f"{tmp_path}/set", split="test")) == ["only this"]
    with pytest.raises(DataError, match='set test has no column "body"; it has "text"; set'):
        read_source("hub", name=f"{tmp_path}/set", split="test", text_field="body")


@pytest.mark.parametrize("write", [write_jsonl, write_saved])
@pytest.mark.parametrize(
    "split",
    ["train[:50%]", "train[3:10]", "train[-25%:]+train[:2]", "train[5:]+train", "train[:1]"],
)
def test_slice_of_a_split_is_loaded(tmp_path, write, split):
    write(tmp_path / "set")
    # As `datasets` cuts it.
    whole = {"train": datasets.Dataset.from_dict({"text": ROWS})}
    rows = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(whole["train"])})
    expected = [text for part in rows for text in ROWS[part.from_ : part.to]]
    documents = read_source("hub", name=f"{tmp_path}/set", split=split)
    assert texts_of(documents) == expected
    assert texts_at(documents, [len(expected) - 1]) == expected[-1:]


def test_invalid_slice_is_refused(tmp_path):
    write_jsonl(tmp_path / "set")
    for split, message in {
        "train[half]": "is invalid .*train\\[:50%\\]",
        "train[12:]": "has no rows",
        "valid[:1]": "cannot be loaded",
        "train[:150%]": "is invalid",
    }.items():
        with pytest.raises(DataError, match=message):
            read_source("hub", name=f"{tmp_path}/set", split=split)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("owner/none", {}, r"= 'owner/none': split 'train' cannot be loaded \(.+\); check"),
        ("none", {"subset": "a"}, r"subset 'a': split .*Without network access, download"),
        ("/no/such/place", {}, r"'/no/such/place' is not a folder; use the path"),
        ("./nowhere", {}, r"is not a folder"),
    ],
)
def test_unloadable_data_set_gives_one_line(name, settings, message):
    with pytest.raises(DataError, match=message) as caught:
        read_source("hub", name=name, **settings)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_split_is_refused(tmp_path):
    write_jsonl(tmp_path / "set")
    with pytest.raises(DataError, match=r"split 'valid' cannot be loaded \(.*valid"):
        read_source("hub", name=f"{tmp_path}/set", split="valid")
    write_saved_splits(tmp_path / "saved")
    with pytest.raises(DataError, match=r"split 'valid' cannot .*the splits are train"):
        read_source("hub", name=f"{tmp_path}/saved", split="valid")


def test_code_of_a_data_set_does_not_run(tmp_path):
    write_jsonl(tmp_path / "set")
    (tmp_path / "set/set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError, match=r"cannot be loaded \(.*scripts are no longer supported"):
        read_source("hub", name=f"{tmp_path}/set")
    assert not (tmp_path / "ran").exists()


def test_selection_of_rows_is_refused(tmp_path, monkeypatch):
    write_saved(tmp_path / "set")
    half = datasets.load_from_disk(tmp_path / "set").select([0, 2])
    monkeypatch.setattr(datasets, "load_from_disk", lambda _: half)
    with pytest.raises(DataError, match=r"is a selection of its files' rows; call flatten"):
        read_source("hub", name=f"{tmp_path}/set")
