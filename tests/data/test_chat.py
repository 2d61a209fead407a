"""Conversations: ids and weights are transformers', and reach the microbatches unchanged."""

import gzip
import io
import json
import re
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from parallel3d.base.errors import DataError
from parallel3d.data import chat
from parallel3d.data.batches import Batches
from parallel3d.data.ids.spans import Spans, TokenWeights
from parallel3d.data.prepare import prepare
from parallel3d.data.show import samples, show_samples
from parallel3d.data.tokenizer import load_tokenizer
from tests.data import chats
from tests.data.chats import CONVERSATIONS, MARKED, REWRITING, UNMARKED, config_of, turns
from tests.train.test_feed import feed_of

pytestmark = pytest.mark.gloo


@pytest.fixture
def marked(tmp_path):
    return chats.save_tokenizer_with(MARKED, tmp_path / "marked")


def by_transformers(tokenizer, conversations):
    """Each conversation's ids and weights by transformers, with the end-of-text that it lacks."""
    loaded = load_tokenizer(tokenizer)
    rows = []
    for one in conversations:
        encoded = loaded.apply_chat_template(
            one["messages"],
            tools=one.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = list(encoded["input_ids"])
        mask = list(encoded["assistant_masks"])
        if ids[-1] != loaded.eos_token_id:
            ids.append(loaded.eos_token_id)
            mask.append(0)
        rows.append((ids, mask))
    return rows


def assert_trains_on(corpus, expected):
    """Compare the documents of a corpus with (ids, weights), and the labels of its samples."""
    stream = corpus.stream("train")
    read = []
    for first, end in pairwise(np.asarray(stream.bounds).tolist()):
        read.append((stream.tokens[first:end].tolist(), stream.weights[first:end].tolist()))
    assert read == expected
    ids = np.concatenate([ids for ids, _ in expected])
    mask = np.concatenate([mask for _, mask in expected])
    batches = Batches(stream, 16, seed=1)
    assert batches.weighs
    _, starts = batches.windows(0, batches.num_samples)
    labels = batches.microbatch(0, batches.num_samples)[1]
    weights = batches.weights(0, batches.num_samples)
    for start, own_labels, own_weights in zip(starts, labels, weights, strict=True):
        assert own_labels.tolist() == ids[start + 1 : start + 17].tolist()
        assert own_weights.tolist() == mask[start + 1 : start + 17].tolist()


LINE = "<|end|>{{ '\\n' }}{% endgeneration %}"
ENDED = MARKED.replace(LINE, "<|end|>{% endgeneration %}")


@pytest.mark.parametrize(
    ("template", "end", "weight"),
    [(MARKED, "<|end|>", 0), (MARKED, "<|endoftext|>", 0), (ENDED, "<|end|>", 1)],
)
def test_ids_and_weights_are_those_of_transformers(tmp_path, template, end, weight):
    """`weight`: of the last token, which the template writes, or which is added."""
    tokenizer = chats.save_tokenizer_with(template, tmp_path / "tokenizer", end)
    path = chats.write_lines(tmp_path / "a.jsonl", CONVERSATIONS)
    expected = by_transformers(tokenizer, CONVERSATIONS)
    assert any(any(mask) and not all(mask) for _, mask in expected)
    assert {mask[-1] for _, mask in expected} == {weight}
    corpus = prepare(config_of(path, tokenizer))
    assert_trains_on(corpus, expected)
    assert corpus.name(1) == f"{path}, line 2"
    loaded = load_tokenizer(corpus.tokenizer_directory)
    assert loaded.chat_template == template and loaded.eos_token == end


def test_marks_may_be_missing(tmp_path, marked):
    """The turns by prefix are those that the same template marks."""
    unmarked = chats.save_tokenizer_with(UNMARKED, tmp_path / "unmarked")
    path = chats.write_lines(tmp_path / "a.jsonl", CONVERSATIONS)
    assert_trains_on(prepare(config_of(path, unmarked)), by_transformers(marked, CONVERSATIONS))


def test_rows_of_parquet_and_packed_lines(tmp_path, marked):
    import pyarrow as pa
    from pyarrow import parquet

    plain = CONVERSATIONS[1:]
    expected = by_transformers(marked, plain)
    path = tmp_path / "rows"
    parquet.write_table(pa.Table.from_pylist(plain), path)
    assert_trains_on(prepare(config_of(path, marked)), expected)
    lines = "".join(f"{json.dumps(one)}\n\n" for one in plain)
    path.write_bytes(gzip.compress(lines.encode()))
    corpus = prepare(config_of(path, marked))
    assert_trains_on(corpus, expected)
    assert corpus.facts.skipped == {"empty": len(plain)}


def test_end_of_text_within_a_conversation_ends_no_document(tmp_path, marked):
    path = chats.write_lines(tmp_path / "a.jsonl", CONVERSATIONS)
    corpus = prepare(config_of(path, marked))
    stream = corpus.stream("train")
    assert (stream.tokens[:] == corpus.end_of_text).sum() > 3 * len(CONVERSATIONS)
    feed, _ = feed_of(corpus, isolate_documents=True)
    with closing(feed):
        step = feed.training(0)
    _, starts = Batches(stream, 8, seed=3).windows(0, 8)
    bounds = np.asarray(stream.bounds)
    for number, microbatch in enumerate(step):
        lengths = []
        for start in starts[2 * number : 2 * number + 2]:
            within = bounds[(bounds > start) & (bounds < start + 8)]
            lengths += np.diff([start, *within, start + 8]).tolist()
        assert list(microbatch.segments.lengths) == lengths


def test_unfit_conversations_are_counted(tmp_path, marked):
    unfit = [
        {"messages": []},
        turns("hello", "there", "and?"),
        turns("x" * 600, "long"),
        {"messages": [*turns("a", "b")["messages"], {"role": "tool", "content": "3"}]},
    ]
    path = chats.write_lines(tmp_path / "a.jsonl", [*unfit, *CONVERSATIONS])
    corpus = prepare(config_of(path, marked))
    assert corpus.facts.skipped == {
        "empty": 1,
        "ends with the user": 2,
        "longer than a sample": 1,
    }
    assert corpus.num_documents == len(CONVERSATIONS)
    with pytest.raises(DataError, match=r"no conversation is left to train on \(1 empty\)"):
        prepare(config_of(chats.write_lines(tmp_path / "b.jsonl", unfit[:1]), marked))


BAD = {
    "the chat template fails (no role bad, please)": {
        "messages": [{"role": "bad", "content": "x"}, {"role": "assistant", "content": "y"}]
    },
    'has no field "messages"': {"text": "hello"},
    "messages must be a list": {"messages": "hello"},
    "message 2 must be an object with a role": {"messages": [*turns("a")["messages"], "b"]},
    "message 1 has no content": {"messages": [{"role": "user"}, *turns("a", "b")["messages"]]},
    "the content of message 1 must be text": turns(3, "b"),
    "tools must be a list": {**turns("a", "b"), "tools": "add"},
}


def test_bad_lines_are_named(tmp_path, marked):
    path = chats.write_lines(tmp_path / "a.jsonl", [*CONVERSATIONS, *BAD.values(), turns("a", "b")])
    config = config_of(path, marked)
    with pytest.raises(DataError) as caught:
        prepare(config)
    _, *lines = str(caught.value).splitlines()
    for number, (line, message) in enumerate(zip(lines, BAD, strict=True)):
        assert line.strip().startswith(f"{path}, line {len(CONVERSATIONS) + 1 + number}")
        assert message in line
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not left, "nothing half-written stays"
    skipping = {"on_error": "skip", "max_skipped": 0.5}
    corpus = prepare(config.model_copy(update=skipping))
    assert sum(corpus.facts.skipped.values()) == len(BAD)
    assert corpus.num_documents == len(CONVERSATIONS) + 1


def test_template_that_rewrites_turns_needs_marks(tmp_path):
    tokenizer = chats.save_tokenizer_with(REWRITING, tmp_path / "tokenizer")
    path = chats.write_lines(tmp_path / "a.jsonl", [turns("a", "b", "c", "d")])
    with pytest.raises(DataError, match=r"line 1: .* put \{% generation %\}"):
        prepare(config_of(path, tokenizer))


def test_tokenizer_without_a_template_is_refused(tmp_path):
    tokenizer = chats.save_tokenizer_with(None, tmp_path / "tokenizer")
    path = chats.write_lines(tmp_path / "a.jsonl", CONVERSATIONS)
    with pytest.raises(DataError, match="has no chat template"):
        prepare(config_of(path, tokenizer))


def test_shown_samples_mark_what_is_trained(tmp_path, marked):
    path = chats.write_lines(tmp_path / "a.jsonl", CONVERSATIONS)
    corpus = prepare(config_of(path, marked))
    shown = samples(corpus, 256, 0, 2)
    out = io.StringIO()
    show_samples(corpus, shown, Console(file=out, width=200))
    text = out.getvalue()
    for sample in shown:
        for part in sample["fragments"]:
            assert part["marked"].replace("⟦", "").replace("⟧", "") == part["text"]
    assert re.search(r"assistant *\n *⟦", text) and re.search(r"user *\n *what is ", text)


def shift_weights(monkeypatch):
    read = TokenWeights.__getitem__
    monkeypatch.setattr(TokenWeights, "__getitem__", lambda self, key: read(self, shifted(key)))


def shifted(key):
    """The places before these."""
    if isinstance(key, slice):
        return slice(max(0, key.start - 1), key.stop - 1)
    return np.maximum(np.asarray(key) - 1, 0)


def train_on_the_prompt(monkeypatch):
    """The turn begins before the generation prompt."""
    text = chat.Template._text
    monkeypatch.setattr(chat.Template, "_text", lambda self, *own, prompt=False: text(self, *own))


def count_the_added_end(monkeypatch):
    """The end-of-text has weight 1, as after documents of other programs."""
    make = Spans.__init__

    def made(self, *, end_of_text, **own):
        make(self, end_of_text=1 if end_of_text is None else end_of_text, **own)

    monkeypatch.setattr(Spans, "__init__", made)


@pytest.mark.parametrize("plant", [shift_weights, train_on_the_prompt, count_the_added_end])
def test_planted_bug_is_seen(tmp_path, monkeypatch, marked, plant):
    unmarked = chats.save_tokenizer_with(UNMARKED, tmp_path / "unmarked")
    path = chats.write_lines(tmp_path / "a.jsonl", CONVERSATIONS)
    expected = by_transformers(marked, CONVERSATIONS)
    assert_trains_on(prepare(config_of(path, unmarked)), expected)
    plant(monkeypatch)
    config = config_of(path, unmarked)
    with pytest.raises(AssertionError):
        assert_trains_on(
            prepare(config.model_copy(update={"cache": str(tmp_path / "other")})), expected
        )
