"""The corpus: every document decodes back, split by content, and its cache keeps its promises."""

import json
import multiprocessing as mp
import os
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from parallel3d.base.errors import DataError
from parallel3d.data import corpus_folder
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import prepare
from parallel3d.mesh.device import settle_accelerator
from parallel3d.verify import local_ranks
from tests.data.documents import READ, TEXTS, contents, document_of

pytestmark = pytest.mark.gloo


def refuse_to_build(*args):
    pytest.fail("built again")


def test_documents_decode_to_the_bytes_of_their_files(settings):
    corpus = prepare(settings)
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_directory)
    decoded = []
    for part in (corpus.train, corpus.held_out):
        for index in range(part.num_documents):
            decoded.append(tokenizer.decode(document_of(part, index)))
    assert sorted(decoded) == sorted(READ.values())
    assert corpus.num_documents == len(TEXTS) and corpus.held_out.num_documents == 1


def test_end_of_text_stands_only_after_documents(settings):
    corpus = prepare(settings)
    for part in (corpus.train, corpus.held_out):
        assert part.tokens.dtype == np.uint16 and not part.tokens.flags.writeable
        ends = np.flatnonzero(part.tokens == corpus.end_of_text)
        assert ends.tolist() == (part.bounds[1:] - 1).tolist()


def test_entropy_and_summary_equal_counts_by_hand(settings):
    corpus = prepare(settings)
    tokens = [*corpus.train.tokens.tolist(), *corpus.held_out.tokens.tolist()]
    by_hand = -sum(n / len(tokens) * log(n / len(tokens)) for n in Counter(tokens).values())
    assert corpus.unigram_entropy == pytest.approx(by_hand, rel=1e-12)
    summary = json.loads(json.dumps(corpus.summary()))
    assert summary["num_tokens"] == len(tokens)
    assert summary["vocab_size"] == corpus.vocab_size == 300
    assert summary["num_documents"] == 6


def test_vocabulary_above_65536_has_wider_tokens(settings, tmp_path):
    # Ids may have gaps.
    tokenizer = Tokenizer(WordLevel({"<unknown>": 0, "<end>": 70_000}, unk_token="<unknown>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(tmp_path / "wide")
    corpus = prepare(replace(settings, tokenizer=str(tmp_path / "wide")))
    assert corpus.train.tokens.dtype == np.uint32 and corpus.vocab_size == 70_001
    assert corpus.train.tokens.tolist() == [0, 70_000] * corpus.train.num_documents


def test_cache_is_found_by_content(settings, folder, tmp_path, monkeypatch):
    first = prepare(settings)
    before = contents(Path(settings.cache))
    for path in folder.rglob("*.txt"):
        os.utime(path, (1, 1))
    moved = folder.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(corpus_folder.Recipe, "fill", refuse_to_build)
    same = replace(settings, paths=(f"{moved}/**/*.txt",), sequence_length=99)
    assert prepare(same).directory == first.directory
    assert contents(Path(settings.cache)) == before


def test_content_tokenizer_and_split_each_make_another_corpus(settings, folder, tmp_path):
    tokenizer = str(prepare(settings).tokenizer_directory)
    variants = [
        settings,
        replace(settings, vocab_size=290),
        replace(settings, held_out_fraction=0.5),
        replace(settings, tokenizer=tokenizer),
    ]
    directories = [prepare(variant).directory for variant in variants]
    (folder / "a.txt").write_text("other")
    directories.append(prepare(settings).directory)
    assert len(set(directories)) == 5


DEFAULT = [
    ("truncated", "tokens.bin"),
    ("longer", "bounds.bin"),
    ("removed", "bounds.bin"),
    ("flipped", "tokenizer/tokenizer.json"),
]
FILES = ("tokens.bin", "bounds.bin", "tokenizer/tokenizer.json")
DAMAGES = list(product(("truncated", "removed", "longer", "flipped"), FILES))
OTHERS = [pytest.param(*each, marks=pytest.mark.slow) for each in DAMAGES if each not in DEFAULT]


@pytest.mark.parametrize(("damage", "name"), [*DEFAULT, *OTHERS])
def test_damaged_corpus_is_rebuilt(settings, name, damage):
    directory = prepare(settings).directory
    before = contents(directory)
    path = directory / name
    data = path.read_bytes()
    path.unlink()
    damaged = {
        "truncated": data[:-1],
        "longer": data + b"\0",
        "flipped": bytes([data[0] ^ 1]) + data[1:],
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
    # Bits are compared by `prepare` alone.
    opened = pytest.raises(DataError, match="has no complete corpus")
    with nullcontext() if damage == "flipped" else opened:
        Corpus.open(directory)
    prepare(settings)
    assert contents(directory) == before


@pytest.mark.parametrize("text", ["{", "{}"])
def test_corpus_with_broken_manifest_is_rebuilt(settings, text):
    directory = prepare(settings).directory
    (directory / "files.json").write_text(text)
    before = contents(directory)
    assert contents(prepare(settings).directory) != before


def test_open_needs_no_sources(settings, folder):
    corpus = prepare(settings)
    for path in folder.rglob("*.txt"):
        path.unlink()
    again = Corpus.open(str(corpus.directory))
    assert np.array_equal(again.train.tokens, corpus.train.tokens)
    # What was left out of the sources is not known without them.
    nothing = {"skipped": {}, "skipped_first": []}
    assert {**again.summary(), **nothing} == corpus.summary()


def errors_before_the_cache(folder, settings):
    """Return settings that are refused, each with its message."""
    no_end = folder.parent / "no end"
    source = prepare(settings).tokenizer_directory
    no_end.mkdir()
    for path in source.iterdir():
        text = path.read_text().replace('"eos_token": "<|endoftext|>",', "")
        (no_end / path.name).write_text(text)
    return [
        (replace(settings, source="jsonl"), "a.txt, line 1 is not JSON"),
        (replace(settings, paths=("nothing.txt",)), "matches no file"),
        (replace(settings, paths=(f"{folder}/a.txt",)), "one document, but"),
        (replace(settings, tokenizer="/no/such/place"), "is not a directory"),
        (
            replace(settings, tokenizer=str(folder)),
            r"AutoTokenizer cannot load it .*tokenizer\.json",
        ),
        (replace(settings, tokenizer=str(no_end)), r"no end-of-text token.*set eos_token"),
    ]


def test_errors_leave_nothing_in_the_cache(settings, folder):
    cases = errors_before_the_cache(folder, settings)
    before = contents(Path(settings.cache) / "corpora")
    for refused, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(refused)
        assert contents(Path(settings.cache) / "corpora") == before, message
        assert {path.name for path in Path(settings.cache).iterdir()} <= {"corpora", "indexes"}


def test_token_beyond_the_vocabulary_is_refused_with_document_and_id(settings, monkeypatch):
    prepare(settings)
    before = contents(Path(settings.cache))
    monkeypatch.setattr(corpus_folder, "num_tokens", lambda tokenizer: 200)
    with pytest.raises(DataError, match=r"document .*\.txt has the token id \d+, outside .* 200;"):
        prepare(replace(settings, vocab_size=299))
    assert contents(Path(settings.cache)) == before


def test_interrupt_leaves_nothing_in_the_cache(settings):
    def interrupt(phase, done, total):
        if phase == "tokenising documents":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(settings, interrupt)
    assert contents(Path(settings.cache)) == {"corpora": None}


def test_unwritable_cache_is_refused(settings, folder):
    with pytest.raises(DataError, match=r"cannot be written .* set data\.cache"):
        prepare(replace(settings, cache=str(folder / "a.txt")))


def test_full_cache_is_refused(settings, monkeypatch):
    """The package tokenizers tells of it in an exception of no kind."""

    def save(tokenizer, folder):
        (folder / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); set data"):
        prepare(settings)
    assert contents(Path(settings.cache)) == {"corpora": None}


def prepare_aloud(settings, hangs, pipe):
    phases = set()

    def progress(phase, done, total):
        if phase.startswith("waiting") and "waiting" not in phases:
            pipe.send("waiting")
            phases.add("waiting")
        phases.add(phase)
        if hangs and phase == "tokenising documents":
            pipe.send("hanging")
            time.sleep(600)

    corpus = prepare(settings, progress)
    pipe.send((corpus.directory, phases))


@contextmanager
def started(settings, hangs=False):
    """Yield a process that prepares, and the pipe of its messages."""
    settle_accelerator()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(local_ranks.PRELOAD)
    messages, theirs = context.Pipe(duplex=False)
    process = context.Process(target=prepare_aloud, args=(settings, hangs, theirs))
    process.start()
    theirs.close()
    try:
        yield process, messages
    finally:
        process.kill()
        process.join()


def test_preparation_after_kill_9_works_and_cleans_up(settings):
    corpora = Path(settings.cache) / "corpora"
    with started(settings, hangs=True) as (_, messages):
        assert messages.recv() == "hanging"
    left = sorted(path.suffix for path in corpora.iterdir())
    assert left == [".lock", ".partial"]
    # Another corpus finds the leftovers too: the first may never be asked for again.
    other = prepare(replace(settings, vocab_size=280)).directory
    assert list(corpora.iterdir()) == [other]
    first = prepare(settings).directory
    assert sorted(corpora.iterdir()) == sorted([first, other])


def test_running_writer_is_waited_for_and_keeps_its_files(settings):
    """Two at once give one corpus; a third, of something else, does not disturb them."""
    corpora = Path(settings.cache) / "corpora"
    with started(settings, hangs=True) as (hanging, messages):
        assert messages.recv() == "hanging"
        prepare(replace(settings, vocab_size=280))
        assert len(list(corpora.glob("*.partial"))) == 1
        with started(settings) as (_, second), started(settings) as (_, third):
            assert second.recv() == third.recv() == "waiting"
            assert len(list(corpora.glob("*.partial"))) == 1
            hanging.kill()
            (one, *first) = second.recv()
            (other, *last) = third.recv()
    assert one == other
    built = ["tokenising documents" in phases for [phases] in (first, last)]
    assert sorted(built) == [False, True]
    assert len(list(corpora.iterdir())) == 2
