"""Fill-in-the-middle: the right share of documents, all their tokens, and the rest untouched."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError, DataError
from parallel3d.config import RunConfig
from parallel3d.config.data import FimConfig
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Mixture, TokenStream
from parallel3d.data.fim import ROOM, Fim
from parallel3d.data.packing import Packing
from parallel3d.data.prepare import prepare
from parallel3d.data.tokenizer import load_tokenizer, save_tokenizer

pytestmark = pytest.mark.gloo

END = 0
LENGTH = 48
BEFORE = 1
AFTER = 2
BETWEEN = 3
SPECIAL = (BEFORE, AFTER, BETWEEN)


def stream(packed, seed=0, longest=70):
    """Documents with ids that occur once."""
    lengths = np.random.default_rng(seed).integers(2, longest, 400)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(10, 10 + bounds[-1])
    ids[bounds[1:] - 1] = END
    packing = Packing.make(bounds, LENGTH, ROOM) if packed else None
    return TokenStream(ids, bounds, packing=packing)


def batches_of(text, seed=7, **settings):
    fim = Fim(FimConfig(**settings), SPECIAL, END, seed)
    return Batches(text, LENGTH, seed=5, fim=fim), Batches(text, LENGTH, seed=5)


def original(ids):
    """A rearranged document in its first order, and whether its suffix came first."""
    after = ids.index(AFTER)
    between = ids.index(BETWEEN)
    assert ids[0] == BEFORE and after < between
    if after == 1:  # SPM: the middle follows the prefix, so the suffix moves to the end
        return ids[between + 1 :] + ids[after + 1 : between], True
    return ids[1:after] + ids[between + 1 :] + ids[after + 1 : between], False


def documents_in(batches, plain):
    """Each document of an epoch: its plain ids, and its ids as it was read, with the labels."""
    count = batches.num_samples
    tokens, labels = batches.microbatch(0, count)
    weights = batches.weights(0, count)
    before = plain.microbatch(0, count)
    _, places, pieces = batches.places(0, count)
    if not batches.is_packed:
        ends = np.cumsum(before[0] == END, axis=1)
        pieces = np.hstack([np.zeros((count, 1), int), ends[:, :-1]])
    for row in range(count):
        for number in range(pieces[row].max() + 1):
            is_counted = (pieces[row] == number) & (weights[row] == 1)
            old = (pieces[row] == number) & (places[row] >= 0)
            ids = [array[row][is_counted].tolist() for array in (tokens, labels)]
            if old.any():
                yield [array[row][old].tolist() for array in before], *ids


@pytest.mark.parametrize("by", ["document", "fragment"])
def test_packed_documents_keep_all_tokens_at_the_requested_rates(by):
    batches, plain = batches_of(stream(True), rate=0.4, spm_rate=0.25, by=by)
    num_eligible = 0
    num_changed = 0
    num_suffix_first = 0
    for (old, old_labels), ids, labels in documents_in(batches, plain):
        ends = old[-1] == END
        is_whole = ends and (old[0] - 10 in batches.streams[0].bounds)
        is_eligible = is_whole or by == "fragment"
        if is_eligible:
            num_eligible += 1
        if not set(SPECIAL) & set(ids):
            assert (ids, labels) == (old, old_labels)
            continue
        assert is_eligible
        assert Counter(ids) == Counter(old) + Counter(SPECIAL)
        restored, is_suffix_first = original(ids[:-1] if ends else ids)
        assert restored == (old[:-1] if ends else old)
        assert labels == [*ids[1:], old_labels[-1] if ends else END]
        num_changed += 1
        if is_suffix_first:
            num_suffix_first += 1
    shares = ((num_changed, num_eligible, 0.4), (num_suffix_first, num_changed, 0.25))
    for count, total, rate in shares:
        assert total > 100 and abs(count - rate * total) < 3 * (total * rate * (1 - rate)) ** 0.5


def test_unpacked_document_loses_its_last_tokens_to_the_special_ones():
    batches, plain = batches_of(stream(False), rate=0.5, by="fragment")
    num_changed = 0
    for (old, old_labels), ids, labels in documents_in(batches, plain):
        assert len(ids) == len(old)
        if not set(SPECIAL) & set(ids):
            assert (ids, labels) == (old, old_labels)
            continue
        num_changed += 1
        ends = old[-1] == END
        restored, _ = original(ids[:-1] if ends else ids)
        assert restored == (old[:-1] if ends else old)[:-ROOM]
        assert labels == [*ids[1:], old_labels[-1] if ends else END]
    assert num_changed > 100


def first_prefix_ids(tokens):
    """Return the ids that follow the token before a prefix."""
    return {i for row in tokens for i in row[np.roll(row == BEFORE, 1)]}


def test_rearrangement_depends_only_on_seed_and_index():
    text = Mixture((stream(True, 1), stream(True, 2)), (2.0, 1.0))
    batches, _ = batches_of(text)
    tokens = batches.microbatch(30, 40)[0]
    apart = [batches_of(text)[0].microbatch(30 + i, 1)[0][0] for i in range(40)]
    assert np.array_equal(tokens, np.stack(apart))
    assert not np.array_equal(tokens, batches_of(text, seed=8)[0].microbatch(30, 40)[0])
    one, _ = batches_of(stream(True))
    first = first_prefix_ids(one.microbatch(0, one.num_samples)[0])
    second = first_prefix_ids(one.microbatch(one.num_samples, one.num_samples)[0])
    assert len(first - second) > 20


def test_rate_0_changes_no_document_and_rate_1_changes_all():
    never, plain = batches_of(stream(True), rate=0)
    assert np.array_equal(never.microbatch(0, 50), plain.microbatch(0, 50))
    always, _ = batches_of(stream(True, longest=LENGTH - ROOM), rate=1, spm_rate=0)
    tokens = always.microbatch(0, always.num_samples)[0]
    assert (tokens == BETWEEN).sum() == 399  # the stream ends within the last one


def test_fim_uses_tokens_of_the_tokenizer_or_names_missing_ones(settings, tmp_path):
    tokenizer = load_tokenizer(prepare(settings).tokenizer_directory)
    names = ["<fim_suffix>", "<fim_middle>", "<fim_prefix>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    (tmp_path / "own").mkdir()
    save_tokenizer(tokenizer, tmp_path / "own")
    with_fim = replace(settings, tokenizer=str(tmp_path / "own"), fim=FimConfig())
    corpus = prepare(with_fim)
    ids = [tokenizer.convert_tokens_to_ids(names[n]) for n in (2, 0, 1)]
    assert Fim.of(FimConfig(), corpus).special == tuple(ids)
    chosen = FimConfig(tokens=("<fim_middle>", "<fim_suffix>", "<fim_prefix>"))
    assert Fim.of(chosen, corpus).special == (ids[2], ids[1], ids[0])
    for fim in (FimConfig(tokens=("a", "<no such>", "b")), FimConfig()):
        with pytest.raises(DataError, match=r"data\.fim\.tokens = .*: the tokenizer does not have"):
            prepare(replace(settings if fim.tokens == "auto" else with_fim, fim=fim))


def test_fim_with_weights_or_without_tokenizer_is_refused():
    data = {"source": "parquet", "paths": ["a"], "token_field": "x", "weight_field": "y"}
    data |= {"sequence_length": 7, "tokenizer": "none", "fim": {"tokens": ["a", "b", "c"]}}
    with pytest.raises(ConfigError) as raised:
        RunConfig.from_dict({"parallel3d": {"data": data}})
    message = str(raised.value)
    assert "fim" in message and "combined with label_field, weight_field" in message
    assert "7: is too short for fim" in message and '"none": has no tokens for fim' in message
