"""How much tokens count, read beside other programs' ids: labels, loss masks, weights."""

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError, DataError
from parallel3d.config import RunConfig
from parallel3d.config.data import DataConfig
from parallel3d.data.batches import Batches
from parallel3d.data.evaluation_samples import EvaluationSamples
from parallel3d.data.prepare import prepare
from tests.data.ids import writers
from tests.data.ids.writers import END, SIZE

pytestmark = pytest.mark.gloo


def config_of(tmp_path, **data):
    return DataConfig.model_validate(
        {
            "tokenizer": "none",
            "vocab_size": SIZE,
            "end_of_text_id": END,
            "sequence_length": 16,
            "held_out_fraction": 0.2,
            "cache": str(tmp_path / "cache"),
        }
        | data
    )


def masks_of(documents):
    """A number from 0 to 2 for each id, by the id: so it is known of every token."""
    return [[i % 3 for i in ids] for ids in documents]


def expected(tokens):
    """Of tokens in windows; an end-of-text that stands between documents counts 1."""
    return np.where(tokens == END, 1, tokens % 3).astype(np.float32)


def corpus_of(tmp_path, documents, kind, **changes):
    """The corpus of these documents, told how much their tokens count by one kind of column."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"input_ids": pa.array(documents, pa.list_(pa.int32()))}
    columns["loss_mask"] = pa.array(masks_of(documents), pa.list_(pa.float32()))
    labels = [[i if i % 3 else -100 for i in ids] for ids in documents]
    columns["labels"] = pa.array(changes.pop("labels", labels), pa.list_(pa.int64()))
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=7)
    field = {"labels": {"label_field": "labels"}, "weights": {"weight_field": "loss_mask"}}
    config = {"source": "parquet", "paths": [str(tmp_path / "a.parquet")]}
    config |= {"token_field": "input_ids", **field[kind]}
    return prepare(config_of(tmp_path, **config | changes))


@pytest.mark.parametrize("kind", ["weights", "labels"])
def test_each_label_has_its_own_weight(tmp_path, kind):
    corpus = corpus_of(tmp_path, writers.some_documents(), kind)
    for stream in (corpus.train, corpus.held_out):
        batches = Batches(stream, 16, seed=3)
        assert batches.weighs
        for first in range(0, batches.num_samples, 5):
            _, labels = batches.microbatch(first, 5)
            weights = batches.weights(first, 5)
            assert weights.dtype == np.float32 and weights.shape == labels.shape
            by_hand = expected(labels)
            if kind == "labels":
                by_hand = by_hand > 0
            assert weights.tolist() == by_hand.tolist()


def test_without_weight_field_all_labels_count_alike(tmp_path):
    corpus = corpus_of(tmp_path, writers.some_documents(), "weights", weight_field=None)
    assert not Batches(corpus.train, 16, seed=0).weighs


def test_other_field_gives_another_corpus(tmp_path):
    documents = writers.some_documents()
    keys = {corpus_of(tmp_path, documents, kind).key for kind in ("weights", "labels")}
    assert len(keys) == 2


def test_shifted_labels_are_refused(tmp_path):
    documents = writers.some_documents()
    moved = [[*ids[1:], -100] for ids in documents]
    with pytest.raises(DataError, match="differs from the token ids"):
        corpus_of(tmp_path, documents, "labels", labels=moved)


def test_mask_of_wrong_length_is_refused(tmp_path):
    documents = writers.some_documents()
    labels = [[*ids] for ids in documents]
    labels[4].append(9)
    with pytest.raises(DataError, match=r"row 5.*has .* numbers for"):
        corpus_of(tmp_path, documents, "labels", labels=labels)


def test_field_of_the_wrong_source_is_refused():
    for data, problem in (
        ({"source": "text", "paths": ["a.txt"], "label_field": "labels"}, "is not read by source"),
        ({"source": "datatrove", "paths": ["a.ds"], "weight_field": "loss"}, "is not read by"),
        ({"source": "hub", "name": "a", "weight_field": "loss_mask"}, "requires token_field"),
    ):
        block = {"model": {"family": "gpt"}, "data": data | {"sequence_length": 16}}
        with pytest.raises(ConfigError, match=problem):
            RunConfig.from_dict({"parallel3d": block})


def test_evaluation_is_weighted(tmp_path):
    corpus = corpus_of(tmp_path, writers.some_documents(), "weights")
    samples = EvaluationSamples(corpus.held_out, 16, max_samples=100)
    losses = np.arange(samples.num_documents, dtype=float)
    weights = np.ones(samples.num_documents)
    weights[0] = 0
    loss = samples.loss(losses * weights, weights)
    assert loss.loss == losses[1:].mean() and loss.documents == samples.num_documents - 1
    with pytest.raises(DataError, match="all tokens that were read have weight 0"):
        samples.loss(0 * losses, 0 * weights)
