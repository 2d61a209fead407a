"""Megatron-LM's files that are written: read by struct and numpy alone, and by our own reader."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch import prepare as command
from parallel3d.base.errors import DataError
from parallel3d.data import export
from parallel3d.data.export import export_megatron
from parallel3d.data.prepare import prepare
from tests.data.documents import document_of
from tests.data.ids import writers
from tests.data.ids.test_formats import ENDED, config_of
from tests.data.ids.writers import END, some_documents

pytestmark = pytest.mark.gloo


def read_pair(prefix):
    """The documents of a pair, by the format's description alone."""
    data = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, count, num_documents = struct.unpack_from("<9sQBQQ", data)
    assert (magic, version) == (b"MMIDIDX\0\0", 1) and num_documents == count + 1
    assert len(data) == 34 + 12 * count + 8 * num_documents
    lengths = np.frombuffer(data, "<i4", count, 34)
    firsts = np.frombuffer(data, "<i8", count, 34 + 4 * count)
    documents = np.frombuffer(data, "<i8", num_documents, 34 + 12 * count)
    assert documents.tolist() == list(range(count + 1))
    dtype = np.dtype({8: "<u2", 4: "<i4"}[code])
    ids = np.fromfile(f"{prefix}.bin", dtype)
    assert firsts.tolist() == [dtype.itemsize * n for n in [0, *np.cumsum(lengths)[:-1].tolist()]]
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])], dtype


def documents_of(corpus):
    documents = []
    for stream in (corpus.train, corpus.held_out):
        for i in range(stream.num_documents):
            documents.append([*document_of(stream, i).tolist(), corpus.end_of_text])
    return documents


@pytest.mark.parametrize(("size", "dtype"), [(300, "uint16"), (65500, "int32")])
def test_export_holds_all_documents_training_first(size, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "BLOCK", 100)
    ended = [[*ids, END] for ids in some_documents(size=size)]
    path = writers.megatron(tmp_path / "a.bin", ended, "int32")
    corpus = prepare(config_of("megatron", path, vocab_size=size))
    prefix = str(tmp_path / "out")
    [written] = export_megatron(corpus, prefix)
    documents, dtype_read = read_pair(prefix)
    assert documents == documents_of(corpus) and dtype_read == np.dtype(dtype)
    assert written == {
        "prefix": prefix,
        "dtype": dtype,
        "num_documents": len(ended),
        "num_tokens": sum(map(len, ended)),
        "split": f"{corpus.train.num_documents},{corpus.held_out.num_documents},0",
    }
    again = prepare(config_of("megatron", tmp_path / "out", vocab_size=size))
    assert sorted(documents_of(again)) == sorted(ended)
    with pytest.raises(DataError, match=r"out\.bin exists; remove it, or use another prefix"):
        export_megatron(corpus, prefix)


def test_failed_export_leaves_no_file(tmp_path, monkeypatch):
    corpus = prepare(config_of("megatron", writers.megatron(tmp_path / "a.bin", ENDED)))
    with pytest.raises(DataError, match=r"none/out\.bin cannot be written \(No such file"):
        export_megatron(corpus, str(tmp_path / "none/out"))
    index = export._index
    monkeypatch.setattr(export, "_index", lambda lengths, dtype: index(lengths[::-1], dtype))
    with pytest.raises(DataError, match="differs from the data that was written"):
        export_megatron(corpus, str(tmp_path / "out"))
    assert list(tmp_path.glob("out*")) == []


def test_command_exports_each_part_of_a_mixture(tmp_path, monkeypatch, capsys):
    one = writers.megatron(tmp_path / "a.bin", ENDED[:20])
    other = writers.raw(tmp_path / "b.npy", ENDED[20:])
    parts = [{"source": "megatron", "paths": [str(one)]}, {"source": "tokens"}]
    parts[1]["paths"] = [str(other)]
    data = {"source": "mixture", "mixture": parts, "tokenizer": "none", "vocab_size": 300}
    data |= {"end_of_text_id": END, "sequence_length": 8, "cache": str(tmp_path / "cache")}
    model = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "parallel3d": {"model": model, "data": data, "train": {"steps": 1}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(raw))
    words = ["prepare.py", "--config", str(tmp_path / "ds.json"), "--json", "--to"]
    monkeypatch.setattr("sys.argv", [*words, "megatron", str(tmp_path / "out")])
    assert command.main() == 0
    summary = json.loads(capsys.readouterr().out)
    assert [pair["num_documents"] for pair in summary["written"]] == [20, 20]
    assert [part["check_ids"] for part in summary["mixture"]] == ["full", "full"]
    for number, ids in enumerate((ENDED[:20], ENDED[20:])):
        assert sorted(read_pair(tmp_path / f"out_{number}")[0]) == sorted(ids)
    assert command.main() == 2
    assert "out_0.bin exists" in capsys.readouterr().err
    text = command.as_text(summary)
    assert "part: megatron" in text and "num_checked_ids         633" in text and "split" in text
    monkeypatch.setattr("sys.argv", [*words, "olmo", "x"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "--to = olmo: unknown format; the only one is megatron" in capsys.readouterr().err


@pytest.mark.slow
def test_text_corpus_is_exported(settings, tmp_path):
    corpus = prepare(replace(settings, vocab_size=290))
    export_megatron(corpus, str(tmp_path / "out"))
    assert read_pair(tmp_path / "out")[0] == documents_of(corpus)
