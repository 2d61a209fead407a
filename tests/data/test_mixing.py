"""Mixtures: the shares hold over every prefix, each part keeps its own order, on every mesh."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from parallel3d.base.errors import DataError
from parallel3d.data.batches import Batches, check_length, documents_of
from parallel3d.data.corpus import Corpus, Mixture, TokenStream
from parallel3d.data.order import MAX_PATTERN, Mixing, sample_index, whole_shares
from parallel3d.data.prepare import prepare
from parallel3d.data.show import summarise
from tests.data.documents import Settings, contents, document_of

pytestmark = pytest.mark.gloo

WEIGHTS = st.lists(st.decimals("0.01", "50", places=2).map(float), min_size=1, max_size=9)


@given(WEIGHTS, st.integers(0, 10**12))
@hypothesis_settings(max_examples=10, deadline=None)
def test_every_prefix_has_each_share_to_within_one_sample(weights, far):
    mixing = Mixing(weights)
    parts, places = mixing.assign(np.arange(3000))
    ideal = np.array(weights) / sum(weights)
    counts = np.cumsum(parts[:, None] == np.arange(len(weights)), axis=0)
    assert np.abs(counts - np.arange(1, 3001)[:, None] * ideal).max() < 1 + 1e-9
    # Each part's places come one by one, wherever one looks.
    parts, places = mixing.assign(far + np.arange(3000))
    for part, share in enumerate(ideal):
        part_places = places[parts == part]
        assert np.array_equal(part_places, part_places[:1] + np.arange(len(part_places)))
        if len(part_places):
            assert mixing.index_of(part, int(part_places[0])) == far + int(
                np.flatnonzero(parts == part)[0]
            )
            assert abs(part_places[0] - far * share) < 1 + 1e-4 + far * 1e-15


def test_shares_are_exact_decimals_or_rounded_to_a_pattern():
    assert whole_shares([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_shares([3.0, 1.5]) == [2, 1]
    assert whole_shares([1e9]) == [1]
    for weights in (
        [0.123456789, 0.87654321],
        [1e-9, 1.0, 1.0],
        [1e-7] * 50 + [1.0],
        [1e12, 1e-12],
    ):
        shares = whole_shares(weights)
        assert sum(shares) == MAX_PATTERN and min(shares) >= 1
        ideal = np.array(weights) / sum(weights) * MAX_PATTERN
        assert np.abs(shares - ideal).max() <= max(1.0, len(weights))


def test_order_of_mixtures_never_changes():
    """A checkpoint relies on them."""
    assert Mixing([0.5, 0.3, 0.2]).assign(np.arange(10))[0].tolist() == PINNED
    parts, places = Mixing([0.7, 0.3]).assign(10**15 + np.arange(4))
    assert (parts.tolist(), (places - 10**14).tolist()) == PINNED_FAR


CHANGES = [(10, (1.0, 1.0)), (11, (1.0, 9.0)), (1000, (5.0, 1.0))]


def test_weight_changes_begin_at_an_index_and_parts_continue():
    mixing = Mixing((3.0, 1.0), CHANGES)
    parts, places = mixing.assign(np.arange(3000))
    for part in range(2):
        part_places = places[parts == part]
        assert np.array_equal(part_places, np.arange(len(part_places)))
        for place in (0, 2, 9, 300):
            assert mixing.index_of(part, place) == np.flatnonzero(parts == part)[place]
    for begin, end, weights in ((0, 10, (3, 1)), (11, 1000, (1, 9)), (1000, 3000, (5, 1))):
        alone = Mixing(weights).assign(np.arange(end - begin))[0]
        assert np.array_equal(parts[begin:end], alone)
    for index in (0, 1, 10, 11, 500, 1000, 2990):
        counts = np.bincount(parts[:index], minlength=2)
        assert mixing.counts(index).tolist() == counts.tolist()
        apart = [mixing.assign(np.array([i])) for i in range(index, index + 5)]
        assert [int(part[0]) for part, _ in apart] == parts[index : index + 5].tolist()


def test_samples_and_epochs_follow_changing_weights():
    mixture = replace(MIXTURE, changes=((105, (0.1, 0.1, 0.8)), (2000, (0.8, 0.1, 0.1))))
    batches = Batches(mixture, 10, seed=3)
    tokens, _ = batches.microbatch(0, 400)
    parts = tokens[:, 0] // 1000
    assert np.array_equal(parts[:10], Mixing((0.5, 0.2, 0.3)).assign(np.arange(10))[0])
    for begin, end, weights in ((10, 200, (1, 1, 8)), (200, 400, (8, 1, 1))):
        counts = np.bincount(parts[begin:end], minlength=3)
        assert np.abs(counts - (end - begin) * np.array(weights) / 10).max() <= 1
    epochs = np.bincount(parts[:250], minlength=3) / np.array([10, 4, 30])
    assert batches.epochs(250) == epochs.tolist()
    seen = tokens[parts == 2, 0] % 1000 // 10
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))


PINNED = [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
PINNED_FAR = ([0, 0, 1, 0], [6 * 10**14, 6 * 10**14 + 1, 2 * 10**14, 6 * 10**14 + 2])


def stream(first, num_tokens):
    return TokenStream(first + np.arange(num_tokens), np.array([0, num_tokens]))


MIXTURE = Mixture((stream(0, 101), stream(1000, 41), stream(2000, 301)), (0.5, 0.2, 0.3))


def test_each_part_repeats_in_its_own_shuffled_order():
    batches = Batches(MIXTURE, 10, seed=3)
    tokens, labels = batches.microbatch(0, 400)
    assert np.array_equal(labels, tokens + 1)
    seen = {part: tokens[tokens[:, 0] // 1000 == part, 0] % 1000 // 10 for part in range(3)}
    assert [len(seen[part]) for part in range(3)] == [200, 80, 120]
    for part, size in enumerate((10, 4, 30)):
        for epoch in seen[part].reshape(-1, size):
            assert sorted(epoch) == list(range(size))
    # The first part's order is that of a corpus of its own.
    assert np.array_equal(seen[0], sample_index(3, np.arange(200), 10))
    assert not np.array_equal(seen[0][:10], seen[0][10:20])


def test_parts_of_equal_length_have_different_orders():
    twice = Batches(Mixture((stream(0, 301), stream(1000, 301)), (1.0, 1.0)), 10, seed=0)
    tokens = twice.microbatch(0, 60)[0][:, 0]
    assert not np.array_equal(tokens[tokens < 1000], tokens[tokens >= 1000] - 1000)


@given(st.integers(0, 10**9), st.integers(1, 20))
@hypothesis_settings(max_examples=8, deadline=None)
def test_sample_depends_only_on_its_index(first, count):
    batches = Batches(MIXTURE, 10, seed=5)
    together = batches.microbatch(first, count)[0]
    apart = [batches.microbatch(first + i, 1)[0][0] for i in range(count)]
    assert np.array_equal(together, np.stack(apart))


def test_first_samples_are_distinct():
    batches = Batches(MIXTURE, 10, seed=3)
    tokens = batches.microbatch(0, 40)[0][:, 0]
    assert len(set(tokens[: batches.num_samples])) == batches.num_samples
    assert len(set(tokens[: batches.num_samples + 1])) == batches.num_samples


def test_part_shorter_than_a_sample_is_refused():
    def corpus(train, held_out):
        train_streams = Mixture((stream(0, 100), stream(0, train)), (0.5, 0.5))
        held_out_streams = Mixture((stream(0, 100), stream(0, held_out)), (0.5, 0.5))
        return Corpus(Path(), 10, 0, 1.0, train_streams, held_out_streams)

    check_length(corpus(20, 20), 10, 10)
    with pytest.raises(DataError, match=r"training part of data\.mixture\.1 has 8 tokens, fewer"):
        check_length(corpus(8, 20), 10, 9)
    with pytest.raises(DataError, match=r"held-out part of data\.mixture\.1 has 10 tokens, fewer"):
        check_length(corpus(20, 10), 10, 10)
    with pytest.raises(DataError, match=r"120 tokens = 10 samples .* fewer than the 11"):
        check_length(corpus(20, 20), 10, 11)


def documents_by_hand(tokens, end_of_text):
    """One token after the other."""
    result = []
    for sample in tokens:
        ordinal = 0
        row = []
        for token in sample:
            row.append(ordinal)
            if token == end_of_text:
                ordinal += 1
        result.append(row)
    return result


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_document_ordinals_equal_a_slow_loop(batch, seq, data):
    row = st.lists(st.integers(0, 2), min_size=seq, max_size=seq)
    tokens = np.array(data.draw(st.lists(row, min_size=batch, max_size=batch)))
    before = tokens.copy()
    ordinals = documents_of(tokens, 1)
    assert ordinals.dtype == np.int64 and ordinals.shape == tokens.shape
    assert ordinals.tolist() == documents_by_hand(tokens, 1)
    assert np.array_equal(tokens, before)


@pytest.fixture
def mixture(tmp_path):
    """Letters and digits, in files of different kinds; a row is in both."""
    rng = np.random.default_rng(0)

    def texts(alphabet, count):
        return ["".join(rng.choice(list(alphabet), 60)) for _ in range(count)]

    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts("abcdef ", 20)):
        (tmp_path / f"texts/{i}.txt").write_text(text)
    rows = [*texts("0123456789", 60), (tmp_path / "texts/0.txt").read_text()]
    lines = [json.dumps({"body": text}) for text in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    parts = (
        Settings(paths=(f"{tmp_path}/texts/*.txt",), weight=3.0),
        Settings("jsonl", (f"{tmp_path}/rows.jsonl",), text_field="body", weight=1.0),
    )
    return Settings("mixture", mixture=parts, cache=str(tmp_path / "cache"))


def test_mixture_is_prepared_and_read_back(mixture):
    corpus = prepare(mixture)
    assert corpus.num_documents == 81 and isinstance(corpus.train, Mixture)
    assert {part.vocab_size for part in corpus.parts} == {corpus.vocab_size}
    check_length(corpus, 8, 8)
    tokens, labels = Batches(corpus.train, 8, seed=0).microbatch(0, 400)
    letters = Batches(corpus.parts[0].train, 8, seed=0)
    is_letters = Mixing([3, 1]).assign(np.arange(400))[0] == 0
    assert np.array_equal(tokens[is_letters], letters.microbatch(0, 300)[0])
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    again = Corpus.open(str(corpus.directory))
    assert again.num_tokens == corpus.num_tokens and again.labels == corpus.labels
    assert corpus.key == corpus.directory.name  # which checkpoints from before hold
    described = corpus.summary()["mixture"]
    assert [part["weight"] for part in described] == [0.75, 0.25]
    assert [part["num_documents"] for part in described] == [20, 61]
    assert described[1]["label"].startswith("jsonl /")
    # By hand: the frequencies of both, weighted.
    weighted = np.zeros(corpus.vocab_size)
    for part, weight in zip(corpus.parts, (0.75, 0.25), strict=True):
        ids = np.concatenate([part.train.tokens, part.held_out.tokens])
        for token in ids:
            weighted[token] += weight / len(ids)
    seen = weighted[weighted > 0]
    assert corpus.unigram_entropy == pytest.approx(-(seen * np.log(seen)).sum(), rel=1e-12)
    assert min(part.unigram_entropy for part in corpus.parts) < corpus.unigram_entropy


def test_parts_are_shared_by_mixtures_of_the_same_tokenizer(mixture):
    tokenizer = str(prepare(mixture).tokenizer_directory)
    given_ = replace(mixture, tokenizer=tokenizer)
    first = prepare(given_)
    heavier = replace(mixture.mixture[1], weight=9.0)
    other = prepare(replace(given_, mixture=(mixture.mixture[0], heavier)))
    assert other.directory != first.directory
    assert [part.directory for part in other.parts] == [part.directory for part in first.parts]
    # A tokenizer that is trained is trained anew on other shares.
    trained = prepare(replace(mixture, mixture=(mixture.mixture[0], heavier)))
    assert trained.parts[0].directory not in [part.directory for part in first.parts]


def test_changing_weights_are_stored_with_the_corpus(mixture):
    first, second = mixture.mixture
    first = replace(first, weight=((0, 3.0), (800, 1.0)))
    second = replace(second, weight=((0, 1.0), (400, 3.0), (800, 3.0)))
    corpus = prepare(replace(mixture, mixture=(first, second)))
    assert corpus.train.weights == (0.75, 0.25)
    assert corpus.train.changes == ((400, (3.0, 3.0)), (800, (1.0, 3.0)))
    constant = prepare(mixture)
    assert constant.train.changes == () and constant.key != corpus.key
    assert [part.directory for part in constant.parts] == [p.directory for p in corpus.parts]
    epochs = [row["epochs"] for row in summarise(corpus, 900)["mixture"]]
    lengths = [len(part.train) for part in corpus.parts]
    assert epochs == pytest.approx([525 / lengths[0], 375 / lengths[1]], rel=0.01)


def test_mixture_is_prepared_deterministically(mixture, tmp_path):
    prepare(mixture)
    prepare(replace(mixture, cache=str(tmp_path / "other"), workers=2))
    for folder in ("corpora", "tokenizers"):
        assert contents(Path(mixture.cache) / folder) == contents(tmp_path / "other" / folder)


def test_no_document_is_both_trained_on_and_held_out(mixture):
    for fraction in (0.05, 0.4):
        corpus = prepare(replace(mixture, held_out_fraction=fraction))

        def texts(streams):
            return {document_of(s, i).tobytes() for s in streams for i in range(s.num_documents)}

        assert not texts(corpus.train.parts) & texts(corpus.held_out.parts)


def test_error_of_a_part_names_its_number(mixture, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": 1}')
    with pytest.raises(DataError, match=r'^data\.mixture\.1: .*line 1 has no field "body"'):
        prepare(mixture)


def test_damaged_part_is_rebuilt(mixture):
    corpus = prepare(mixture)
    (corpus.parts[0].directory / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match="has no complete corpus"):
        Corpus.open(corpus.directory)
    assert len(prepare(mixture).train) == len(corpus.train)
