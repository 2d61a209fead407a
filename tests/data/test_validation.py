"""Validation sets: any source, the training text's tokenizer, nothing of them trained on."""

import json

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

import parallel3d.data.prepare as prepare_module
from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig, PartConfig
from parallel3d.data import sources as hub
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import prepare, validation_sets
from parallel3d.data.show import as_text, summarise
from parallel3d.data.split import num_common
from parallel3d.train.evaluation import evaluation_corpora
from parallel3d.train.open_corpus import corpus_lines
from tests.data.documents import document_of, table_of

pytestmark = pytest.mark.gloo

ROWS = [f"row {i} of some text that is not too short" for i in range(12)]


def config_of(root, **changes):
    settings = {"source": "text", "paths": (f"{root}/texts/*.txt",), "vocab_size": 280}
    settings |= {"sequence_length": 8, "held_out_fraction": 0.2, "cache": str(root / "cache")}
    return DataConfig(**settings | changes)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / f"texts/{i}.txt").write_text(f"text {i}\n" * (i + 3))
    lines = [json.dumps({"body": row}) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_validation_sets_use_the_training_tokenizer(root):
    rows = {"source": "jsonl", "paths": (f"{root}/rows.jsonl",), "text_field": "body"}
    some = {"source": "text", "paths": (f"{root}/texts/?.txt",)}
    corpus = prepare(config_of(root, validation={"rows": rows, "some": some}))
    alone = prepare(config_of(root))
    assert corpus.directory == alone.directory and not alone.validation
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_directory)
    rows_set = corpus.validation["rows"]
    stream = rows_set.held_out
    assert [tokenizer.decode(document_of(stream, i)) for i in range(12)] == ROWS
    assert len(rows_set.train) == 0 and rows_set.facts.num_in_training == 0
    # As many of these ten files as are not held out.
    table = corpus.train
    texts = [tokenizer.decode(document_of(table, i)) for i in range(table.num_documents)]
    trained = sum(f"text {i}\n" * (i + 3) in texts for i in range(10))
    assert 0 < trained < 10
    assert corpus.validation["some"].facts.num_in_training == trained
    # Another process opens the same.
    again = Corpus.at(json.loads(json.dumps(corpus.place())))
    assert again.summary() == corpus.summary()
    assert list(evaluation_corpora(again)) == ["held_out", "rows", "some"]
    text = as_text(summarise(corpus, None))
    assert "validation: rows" in text
    assert f"WARNING: {trained} of the documents are also in the training part" in text


def test_skipped_documents_of_a_set_are_reported(root):
    lines = [json.dumps({"body": row}) for row in ROWS]
    (root / "rows.jsonl").write_text("\n".join([*lines, "[]", '{"body": ""}']))
    rows = {"source": "jsonl", "paths": (f"{root}/rows.jsonl",), "text_field": "body"}
    corpus = prepare(config_of(root, validation={"rows": rows}, on_error="skip"))
    printed = as_text(summarise(corpus, None)).splitlines()
    at = printed.index("left out: 1 empty, 1 not JSON")
    assert "validation: rows" in printed[:at]
    assert "rows.jsonl, line 13 is a list" in printed[at + 1]
    start_lines = list(corpus_lines(corpus))
    skipped = [line for line in start_lines if "left out" in line]
    assert len(skipped) == 1
    assert "of validation rows: 1 empty, 1 not JSON" in skipped[0]


def test_evaluated_corpora_are_sets_and_parts_of_mixtures(root):
    rows = {"source": "jsonl", "paths": (f"{root}/rows.jsonl",), "text_field": "body"}
    alone = prepare(config_of(root, held_out_fraction=0, validation={"rows": rows}))
    assert list(evaluation_corpora(alone)) == ["rows"] and alone.train.num_documents == 20
    check_length(alone, 8, 4)
    parts = ({"source": "text", "paths": (f"{root}/texts/*.txt",)}, rows)
    mixture = prepare(config_of(root, source="mixture", paths=(), mixture=parts))
    assert list(evaluation_corpora(mixture)) == ["held_out", "mixture.0", "mixture.1"]
    # Nothing at all is evaluated where nothing is there.
    assert not evaluation_corpora(prepare(config_of(root, held_out_fraction=0)))


def test_error_of_a_set_names_the_set(root):
    (root / "bad.jsonl").write_text('{"text": 1}')
    bad = {"source": "jsonl", "paths": (f"{root}/bad.jsonl",)}
    with pytest.raises(DataError, match=r"^data\.validation\.bad: .*bad\.jsonl"):
        prepare(config_of(root, validation={"bad": bad}))
    short = {"source": "text", "paths": (f"{root}/texts/0.txt",)}
    corpus = prepare(config_of(root, validation={"short": short}))
    with pytest.raises(DataError, match=r"validation set 'short' has \d+ tokens, fewer"):
        check_length(corpus, 25, 4)


def fail(*args):
    raise DataError("no text")


@pytest.mark.parametrize("saved", [True, False])
def test_validation_split_of_a_data_set_is_used(tmp_path, monkeypatch, saved):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    folder = tmp_path / "set"
    splits = {"train": ROWS, "validation": ["only this"]}
    if saved:
        made = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
        datasets.DatasetDict(made).save_to_disk(folder)
    else:
        folder.mkdir()
        for name, rows in splits.items():
            lines = "\n".join(json.dumps({"text": row}) for row in rows)
            (folder / f"{name}.jsonl").write_text(lines)
    hub = {"source": "hub", "name": str(folder)}
    config = config_of(tmp_path, paths=(), **hub)
    assert validation_sets(config) == {"validation": PartConfig(**hub, split="validation")}
    assert not validation_sets(config_of(tmp_path, paths=(), **hub, validation_split=None))
    assert not validation_sets(config_of(tmp_path, paths=(), **hub, validation_split="dev"))
    assert not validation_sets(config_of(tmp_path, paths=(), **hub, split="validation"))
    explicit = {"validation": {"source": "text", "paths": ("a",)}}
    replaced = validation_sets(config_of(tmp_path, paths=(), **hub, validation=explicit))
    assert replaced.keys() == {"validation"}
    mixed = config_of(tmp_path, source="mixture", paths=(), mixture=(hub, hub))
    assert list(validation_sets(mixed)) == ["mixture.0.validation", "mixture.1.validation"]
    corpus = prepare(config)
    assert corpus.validation["validation"].num_documents == 1
    assert corpus.num_documents == len(ROWS)
    # What nobody asked for is not to be left out of data.validation, where it is not.
    with pytest.raises(DataError, match=r"validation set 'validation' .*validation_split to null"):
        check_length(corpus, 14, 1)
    monkeypatch.setattr(prepare_module._Preparation, "_validation_set", fail)
    with pytest.raises(DataError, match=r"^data\.validation_split: validation: no text$"):
        prepare(config)


def test_unreachable_validation_split_gives_a_warning(tmp_path, monkeypatch, capsys):
    """Without a network a set is missing, which must not go unseen."""
    monkeypatch.setattr(hub, "why_unreachable", lambda: "no cable")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    config = config_of(tmp_path, source="hub", paths=(), name="owner/set")
    assert not validation_sets(config)
    warning = capsys.readouterr().err
    assert warning.startswith("WARNING: data.name = 'owner/set': split 'validation' ")
    assert "no cable" in warning and "validation_split to null" in warning
    assert warning.count("\n") == 1


def test_data_set_without_validation_split_has_no_set(tmp_path):
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "set")
    assert not validation_sets(config_of(tmp_path, source="hub", paths=(), name=f"{tmp_path}/set"))


def test_common_documents_are_counted_by_their_contents():
    here = table_of(*"aabcx")["digest"]
    there = table_of(*"bcaay" * 3)["digest"]
    assert num_common(here, there) == 4
    assert num_common(here, table_of("z")["digest"]) == 0
    assert num_common(here[:0], there) == 0 and num_common(here, np.zeros(0, there.dtype)) == 0
