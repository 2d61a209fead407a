"""Best-fit packing: whole documents in samples, each token predicted once, from a file."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.data.batches import Batches, check_length, tokens_of_epoch
from parallel3d.data.corpus import Mixture, TokenStream
from parallel3d.data.facts import Facts
from parallel3d.data.packing import Packing
from parallel3d.data.prepare import prepare
from parallel3d.data.show import samples
from tests.data.documents import Settings, contents
from tests.data.plain_packing import pack

pytestmark = pytest.mark.gloo

END = 0


def corpus_of(seed, most=60):
    """The ids of documents of random lengths, and their bounds; only END ends a document."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.geometric(random.uniform(0.03, 0.9), random.integers(1, most)), 99)
    lengths[0] += 1  # a stream has two tokens or more
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, bounds[-1] + 1)
    ids[bounds[1:] - 1] = END
    return ids, bounds


def stream(seed, length):
    ids, bounds = corpus_of(seed)
    return TokenStream(ids, bounds, packing=Packing.make(bounds, length))


def test_packing_equals_the_plain_definition():
    for seed in range(80):
        ids, bounds = corpus_of(seed)
        length = int(np.random.default_rng(seed).integers(1, 50))
        packing = Packing.make(bounds, length)
        places, _ = packing.positions(np.arange(len(packing)))
        assert places.tolist() == pack(ids.tolist(), END, length), seed


@pytest.mark.parametrize("length", [1, 7, 32])
def test_each_token_is_predicted_once_and_fitting_documents_are_not_cut(length):
    packed = stream(3, length)
    batches = Batches(packed, length, seed=5)
    tokens, labels = batches.microbatch(0, batches.num_samples)
    counts = batches.weights(0, batches.num_samples) == 1
    pairs = Counter(zip(tokens[counts].tolist(), labels[counts].tolist(), strict=True))
    expected = zip(packed.tokens[:-1].tolist(), packed.tokens[1:].tolist(), strict=True)
    assert pairs == Counter(expected)
    assert not tokens[~counts].any() and not labels[~counts].any()
    assert (~counts).sum() == batches.padding(0, batches.num_samples)
    _, places, pieces = batches.places(0, batches.num_samples)
    for begin, end in zip(packed.bounds[:-1], packed.bounds[1:], strict=True):
        inside = (places >= begin) & (places < min(end, len(packed) - 1))
        document_pieces = {(row, pieces[row, column]) for row, column in np.argwhere(inside)}
        assert len(document_pieces) == -(-int(inside.sum()) // length)
        for row, piece in document_pieces:  # which is only of this document
            assert inside[row][pieces[row] == piece].all()


def test_sample_depends_only_on_its_index_and_keeps_weights():
    parts = tuple(replace(stream(seed, 16), weights=np.arange(9999.0)) for seed in (1, 2))
    batches = Batches(Mixture(parts, (3.0, 1.0)), 16, seed=0)
    tokens, _ = batches.microbatch(40, 30)
    for i in range(30):
        alone = Batches(Mixture(parts, (3.0, 1.0)), 16, seed=0)
        assert alone.microbatch(40 + i, 1)[0].tolist() == tokens[i : i + 1].tolist()
    _, places, _ = batches.places(40, 30)
    assert batches.weights(40, 30).tolist() == np.where(places < 0, 0, places + 1).tolist()


@pytest.fixture
def packed(tmp_path, settings):
    """A mixture of texts of many lengths."""
    (tmp_path / "rows.txt").write_text("\n\n".join("word " * n for n in range(1, 60)))
    rows = Settings("text", (str(tmp_path / "rows.txt"),), documents="blank_line", weight=2.0)
    parts = (Settings("text", settings.paths), rows)
    return replace(
        settings, source="mixture", paths=(), mixture=parts, sequence_length=24, packing="best_fit"
    )


def test_packing_index_is_cached_for_the_training_part(packed):
    corpus = prepare(packed)
    folder = Path(packed.cache) / "packings"
    before = contents(folder), [path.stat().st_mtime_ns for path in sorted(folder.rglob("*.npy"))]
    again = prepare(packed)
    assert before[0] == contents(folder) and len(before[1]) == 6
    assert before[1] == [path.stat().st_mtime_ns for path in sorted(folder.rglob("*.npy"))]
    for part, other in zip(corpus.parts, again.parts, strict=True):
        for name in ("starts", "lengths", "firsts"):
            made = getattr(part.train.packing, name)
            read = getattr(other.train.packing, name)
            assert isinstance(read, np.memmap) and np.array_equal(made, read)
        assert part.held_out.packing is None
    shorter = prepare(replace(packed, sequence_length=12))
    assert shorter.parts[1].train.packing.lengths.max() <= 12
    assert prepare(replace(packed, packing="none")).parts[1].train.packing is None


def test_facts_match_the_length_of_an_epoch(packed):
    corpus = prepare(packed)
    check_length(corpus, 24, 4)
    count = 0
    for part in corpus.summary()["mixture"]:
        count += part["packed_samples"]
        assert 0 < part["packed_padding_share"] < 0.5 and 0 < part["packed_cut_share"] < 1
    assert (tokens_of_epoch(corpus.train, 24) - 1) // 24 == count


def test_show_has_the_samples_of_the_run(packed):
    corpus = prepare(packed)
    batches = Batches(corpus.train, 24, seed=5)
    tokens, _ = batches.microbatch(0, 30)
    counts = batches.weights(0, 30) == 1
    for row, sample in enumerate(samples(corpus, 24, 5, 30)):
        shown = [token for part in sample["fragments"] for token in part["ids"]]
        assert shown == tokens[row][counts[row]].tolist()
        for part in sample["fragments"]:
            is_whole = part["begins"] and part["ends"]
            assert is_whole or part["num_tokens"] in range(1, 25)


def test_stream_of_one_token_has_no_sample():
    packing = Packing.make(np.array([0, 1]), 8)
    assert len(packing) == 0
    assert packing.add_facts(Facts(), np.array([0, 1])).packed_samples == 0


def test_packing_of_streams_is_refused(tmp_path):
    data = {"source": "tokens", "paths": ["a.npy"], "stream": True, "manifest": "m"}
    data |= {"sequence_length": 8, "tokenizer": "gpt2", "packing": "best_fit"}
    with pytest.raises(ConfigError, match=r'data\.packing = "best_fit": cannot be combined with'):
        RunConfig.from_dict({"parallel3d": {"data": data}})
