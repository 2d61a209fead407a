"""What is evaluated: fixed samples, each label's document, errors over documents, bytes."""

import json
from itertools import pairwise
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.batches import num_windows
from parallel3d.data.corpus import DocumentBounds
from parallel3d.data.evaluation_samples import (
    bits_per_byte,
    held_out_bytes,
    held_out_samples,
    losses_per_document,
    train_frequencies,
)
from parallel3d.data.prepare import prepare
from tests.data.documents import Settings, document_of

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A corpus and a mixture of two kinds of text."""
    root = tmp_path_factory.mktemp("evaluation")
    rng = np.random.default_rng(0)
    parts = []
    for name, alphabet in (("words", "abcdef "), ("numbers", "0123456789é")):
        lengths = rng.integers(20, 400, 120)
        texts = ["".join(rng.choice(list(alphabet), n)) for n in lengths]
        path = root / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        parts.append(Settings("jsonl", (str(path),)))
    mixture = Settings("mixture", mixture=tuple(parts), cache=str(root / "cache"))
    alone = Settings("jsonl", parts[1].paths, cache=str(root / "cache"))
    return prepare(alone), prepare(mixture)


@pytest.mark.parametrize("which", [0, 1])
def test_labels_are_assigned_to_documents_by_end_of_text(corpora, which):
    """By hand: the ordinal rises after each end-of-text, and each stream's documents are apart."""
    corpus = corpora[which]
    samples = held_out_samples(corpus, 8, max_samples=10**6)
    streams = getattr(corpus.held_out, "parts", (corpus.held_out,))
    windows_per_stream = [num_windows(len(stream), 8) for stream in streams]
    assert 0 < samples.num_samples <= sum(windows_per_stream)
    assert which or samples.num_samples == windows_per_stream[0]
    documents = samples.documents(0, samples.num_samples)
    _, labels = samples.batches.microbatch(0, samples.num_samples)
    seen = {}
    for row, row_documents in zip(labels, documents, strict=True):
        ends = (row == corpus.end_of_text).tolist()
        for place in range(1, 8):
            changed = row_documents[place] != row_documents[place - 1]
            assert changed == ends[place - 1]
        for label, document in zip(row, row_documents, strict=True):
            seen.setdefault(int(document), []).append(int(label))
    assert sorted(seen) == list(range(samples.num_documents))
    assert samples.tokens.tolist() == [len(seen[i]) for i in range(samples.num_documents)]
    # A document's labels are tokens of one document of the corpus.
    whole = []
    for stream in streams:
        for start, stop in pairwise(stream.bounds):
            whole.append(set(stream.tokens[start:stop].tolist()))
    for document_labels in seen.values():
        assert any(set(document_labels) <= tokens for tokens in whole)


def test_document_bounds_are_not_read_as_a_whole(corpora, monkeypatch):
    """Of 10^9 documents it would take seconds a batch."""
    monkeypatch.setattr(DocumentBounds, "__array__", None)
    for corpus in corpora:
        samples = held_out_samples(corpus, 8, max_samples=20)
        assert samples.documents(0, 4).min() >= 0 and samples.num_bytes > 0


def test_order_is_fixed_and_differs_from_the_stream(corpora):
    corpus, _ = corpora
    few = held_out_samples(corpus, 8, 20)
    every = held_out_samples(corpus, 8, 10**6)
    assert few.num_samples == 20
    _, starts = every.batches.windows(0, every.num_samples)
    assert sorted(starts) == [8 * i for i in range(every.num_samples)]
    assert few.batches.windows(0, 20)[1].tolist() == starts[:20].tolist()
    assert starts[:6].tolist() != sorted(starts)[:6]
    # Documents from all over the stream, not the first ones.
    assert few.num_documents >= 8


def test_padding_samples_do_not_count(corpora):
    samples = held_out_samples(corpora[0], 8, max_samples=5)
    ordinals = samples.documents(3, 4)
    assert (ordinals[2:] == samples.num_documents).all()
    assert (ordinals[:2] == samples.documents(3, 2)).all()
    assert (ordinals[:2] < samples.num_documents).all()
    assert (samples.documents(9, 2) == samples.num_documents).all()


@pytest.mark.parametrize("which", [0, 1])
def test_evaluated_bytes_are_those_of_the_evaluated_tokens(corpora, which):
    """Where everything is predicted, the bytes are nearly those of all the held-out text."""
    corpus = corpora[which]
    samples = held_out_samples(corpus, 8, max_samples=10**6)
    texts = np.concatenate(held_out_bytes(corpus))
    assert len(texts) == corpus.held_out.num_documents
    share = samples.tokens.sum() / len(corpus.held_out)
    assert samples.num_bytes == pytest.approx(texts.sum() * share, rel=0.05 if which == 0 else 0.3)


def test_held_out_bytes_are_those_of_the_text(corpora):
    from transformers import AutoTokenizer

    corpus, _ = corpora
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_directory)
    stream = corpus.stream("held_out")
    decoded = [tokenizer.decode(document_of(stream, i)) for i in range(stream.num_documents)]
    assert held_out_bytes(corpus)[0].tolist() == [len(text.encode()) for text in decoded]


@pytest.mark.parametrize("which", [0, 1])
def test_unigram_frequencies_are_those_of_training_text(corpora, which):
    """By hand: counts + 1 of each part's training tokens, and log p of the labels."""
    corpus = corpora[which]
    frequencies = np.zeros(corpus.vocab_size)
    parts = corpus.parts or (corpus,)
    for part in parts:
        counts = np.ones(corpus.vocab_size)
        for token in part.stream("train").tokens:
            counts[token] += 1
        frequencies += counts / counts.sum() / len(parts)
    samples = held_out_samples(corpus, 8, max_samples=30)
    _, labels = samples.batches.microbatch(0, samples.num_samples)
    by_hand = -np.mean([log(frequencies[label]) for label in labels.ravel()])
    assert samples.unigram_loss(corpus) == pytest.approx(by_hand, rel=1e-12)
    assert train_frequencies(corpus).sum() == pytest.approx(1)


@given(st.integers(2, 40), st.integers(0, 10**6))
def test_standard_error_of_equal_documents_is_that_of_their_means(n, seed):
    sums = np.random.default_rng(seed).normal(100, 5, n)
    mean, error = losses_per_document(sums, np.full(n, 20))
    assert mean == pytest.approx(sums.mean() / 20)
    assert error == pytest.approx(np.std(sums / 20, ddof=1) / n**0.5)


def test_standard_error_equals_the_spread_of_simulated_means():
    """Of documents of unequal length and mean: the spread of the estimate, by simulation."""
    rng = np.random.default_rng(0)
    means = []
    errors = []
    for _ in range(400):
        tokens = rng.integers(10, 200, 60)
        of_document = rng.normal(5, 1, 60)
        sums = np.array(
            [rng.normal(m, 2, n).sum() for m, n in zip(of_document, tokens, strict=True)]
        )
        mean, error = losses_per_document(sums, tokens)
        means.append(mean)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)
    # Taken as independent, the tokens would say a third of it.
    assert np.mean(errors) > 3 * 2.2 / (60 * 105) ** 0.5


def test_single_document_has_no_error_and_bits_are_log2():
    assert losses_per_document(np.array([30.0]), np.array([10])) == (3.0, None)
    # 256 equally likely bytes.
    assert bits_per_byte(1000 * log(256), 1000.0) == pytest.approx(8)
    assert bits_per_byte(1.0, None) is None
