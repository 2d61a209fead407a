"""Columns of token ids: read in place in Arrow's files, and refused where that cannot be."""

import pytest

from parallel3d.base.errors import DataError
from parallel3d.data import tokenised
from parallel3d.data.ids import arrow
from parallel3d.data.prepare import prepare
from tests.data.ids import writers
from tests.data.ids.test_formats import DOCUMENTS, ENDED, check_streams, config_of

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("kind", ["int32", "int64", "uint16"])
def test_column_of_ids_is_read_in_place(kind, tmp_path, monkeypatch):
    """The loading by `datasets` stands aside: it gives paths."""
    path = str(writers.arrow(tmp_path / "a.arrow", [*ENDED[:9], [], *ENDED[9:]], kind))
    monkeypatch.setattr(tokenised, "arrow_files", lambda *_: ((path,), ("owner/set train",), ()))
    given = {"paths": (), "name": "owner/set", "token_field": "input_ids"}
    corpus = prepare(config_of("hub", tmp_path / "a.arrow", **given))
    check_streams(corpus)
    assert corpus.summary()["num_empty_documents"] == 1
    assert not (corpus.directory / "tokens.bin").exists()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["parquet", "hub"])
def test_columns_are_read_through_datasets(source, tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"input_ids": ENDED, "n": range(len(ENDED))})
    given = {"token_field": "input_ids"}
    if source == "hub":
        table.save_to_disk(tmp_path / "saved")
        given |= {"paths": (), "name": str(tmp_path / "saved")}
    else:
        table.to_parquet(tmp_path / "a.parquet")
    check_streams(prepare(config_of(source, tmp_path / "a.parquet", **given)))


def test_unsuitable_columns_are_refused(tmp_path):
    import pyarrow as pa

    rows = {
        "text": ["a", "b"],
        "floats": [[1.0], [2.0]],
        "nested": [[[1]], [[2]]],
        "null": [[1], None],
        "hole": [[1], [2, None]],
    }
    table = pa.table(rows)
    path = str(tmp_path / "a.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    for field, message in {
        "text": r'name: column "text" holds string, not lists of integers; set token_field',
        "floats": r"holds list<item: double>, not lists",
        "nested": r"holds list<item: list<item: int64>>, not lists",
        "null": r'name: column "null" has null in rows 1 to 2',
        "hole": r'name: column "hole" has null in rows 1 to 2',
        "ids": r'name has no column "ids"; it has "text", "floats"',
    }.items():
        with pytest.raises(DataError, match=message):
            arrow.read(path, "name", field)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    long = pa.table({"ids": [list(range(5000))]})
    with (
        pa.OSFile(path, "wb") as sink,
        pa.ipc.new_stream(sink, long.schema, options=options) as stream,
    ):
        stream.write_table(long)
    with pytest.raises(DataError, match="is compressed"):
        arrow.read(path, "name", "ids")
    (tmp_path / "a.arrow").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="name cannot be read"):
        arrow.read(path, "name", "ids")


def test_parts_of_a_mixture_may_be_ids(tmp_path):
    """Each part keeps the order of a corpus of its own."""
    one = writers.megatron(tmp_path / "a.bin", ENDED[:20])
    other = writers.datatrove(tmp_path / "b.ds", DOCUMENTS[20:])
    parts = [
        {"source": "megatron", "paths": (str(one),), "weight": 3.0},
        {"source": "datatrove", "paths": (str(other),)},
    ]
    config = config_of("mixture", one, paths=(), mixture=tuple(parts))
    corpus = prepare(config)
    assert [part.num_documents for part in corpus.parts] == [20, 20]
    alone = prepare(config_of("megatron", one))
    assert corpus.parts[0].key == alone.key
    assert corpus.key != corpus.directory.name
    moved = one.rename(tmp_path / "c.bin")
    (tmp_path / "a.idx").rename(tmp_path / "c.idx")
    parts[0]["paths"] = (str(moved),)
    again = prepare(config_of("mixture", one, paths=(), mixture=tuple(parts)))
    assert again.key == corpus.key and again.directory != corpus.directory
    other.write_bytes(b"\xff" * other.stat().st_size)
    with pytest.raises(DataError, match=r"data\.mixture\.1: .*b\.ds, document 1: id 65535"):
        prepare(config_of("mixture", one, paths=(), mixture=tuple(parts)))
