"""Long texts, encoded piece by piece, have the ids that the whole text has."""

import json
import random
import re
import sysconfig
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from parallel3d.data import corpus_folder, long_text
from parallel3d.data.long_text import LongText
from parallel3d.data.prepare import prepare
from parallel3d.data.tokenizer import Backend, encode
from tests.data.documents import Settings, found

pytestmark = pytest.mark.gloo

HOUR = pytest.mark.timeout(3600)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def prose():
    root = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(errors="ignore") for path in sorted(root.glob("[a-d]*.py")))
    return text + "你好世界 ünïcödé \u00a0 e\u0301 " * 20


def trained(model, trainer, pre_tokenizer, normalizer=None):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    text = prose()[-60_000:]
    tokenizer.train_from_iterator([text[i : i + 2000] for i in range(0, len(text), 2000)], trainer)
    return tokenizer


def byte_level(pre_tokenizer):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, show_progress=False, initial_alphabet=alphabet)
    return trained(models.BPE(), trainer, pre_tokenizer)


def split_by(pattern):
    inner = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), inner])


def sentencepiece_bpe():
    trainer = trainers.BpeTrainer(
        vocab_size=800, show_progress=False, special_tokens=["<unk>"], limit_alphabet=200
    )
    model = models.BPE(unk_token="<unk>", fuse_unk=True)
    return trained(model, trainer, pre_tokenizers.Metaspace())


def llama2():
    """A normalizer in the pre-tokenizer's place: the whole text is one word."""
    spec = json.loads(sentencepiece_bpe().to_str())
    spec["pre_tokenizer"] = None
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    return Tokenizer.from_str(json.dumps(spec))


def unigram(normalizer=None):
    trainer = trainers.UnigramTrainer(
        vocab_size=800, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizer)


def word_piece():
    trainer = trainers.WordPieceTrainer(
        vocab_size=800, show_progress=False, special_tokens=["[UNK]"]
    )
    model = models.WordPiece(unk_token="[UNK]")
    return trained(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


NFKC = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
KINDS = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "roberta": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: byte_level(split_by(LLAMA3)),
    "llama2": llama2,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
    "unigram, nfkc": lambda: unigram(NFKC),
    "wordpiece": word_piece,
}


@cache
def tokenizer(kind):
    return Backend(KINDS[kind]())


def texts(size):
    drawn = random.Random(0)
    alphabet = [*"abcdefghij", *map(chr, range(0x4E00, 0x4E40)), *"ßéö", "\U0001f600"]
    once = prose() * (2 * size // len(prose()) + 1)
    return {
        "prose": once[:size],
        "one line": once[:size].replace("\n", " "),
        "no white space": re.sub(r"\s+", "", once)[:size],
        "letters": "".join(drawn.choices(alphabet, k=size)),
        "digits": "".join(drawn.choices("0123456789", k=size)),
        "spaces": " " * size,
        "one letter": "a" * size,
    }


def check(kind, name, size):
    text = texts(size)[name]
    long = LongText(tokenizer(kind))
    # Chunks of any size.
    chunks = (text[i : i + size // 3 + 1] for i in range(0, size, size // 3 + 1))
    pieces = list(long.ids(chunks))
    assert len(pieces) > 1
    assert [token for ids in pieces for token in ids] == encode(tokenizer(kind), [text])[0]
    assert long.num_uncertain == 0


@pytest.fixture
def short_pieces(monkeypatch):
    for name, value in {"PIECE": 2**12, "OVERLAP": 2**9, "MIDDLE": 2**9, "LONGEST": 2**14}.items():
        monkeypatch.setattr(long_text, name, value)


# A word of 100 characters and more is unknown to WordPiece, as one; a normalizer that makes one
# space of many has one for all: see below.
CASES = [
    (kind, name)
    for kind in KINDS
    for name in texts(1)
    if name in ("prose", "one line") or kind != "wordpiece"
    if name != "spaces" or kind != "unigram, nfkc"
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_pieces_have_the_ids_of_the_whole(kind, name, short_pieces):
    check(kind, name, 40_000)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_pieces_of_the_size_that_is_used(kind, name):
    check(kind, name, long_text.LONGEST + long_text.PIECE)


def test_where_a_tokenizer_splits_nowhere_it_is_counted(short_pieces):
    long = LongText(tokenizer("wordpiece"))
    ids = [token for piece in long.ids(["a" * 60_000]) for token in piece]
    # The whole is one unknown word; each piece of LONGEST characters is one, too.
    assert long.num_uncertain == 2 and len(ids) == 3 == len(set(ids)) + 2


def test_the_trainer_gets_a_bounded_sample(tmp_path, monkeypatch):
    lines = [" ".join(f"word{i}" for i in range(400_000)), "b" * 3_000_000, "short one"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    documents = found("jsonl", [tmp_path / "a.jsonl"])
    nothing = corpus_folder.np.zeros(3, bool)
    total = documents.table["num_bytes"].sum()
    sample = list(corpus_folder._sample([documents], [nothing], [total / 4]))
    assert max(map(len, sample)) <= 2**18 + 1 and sum(map(len, sample)) <= total / 4 + 10
    assert sample[0].startswith("word0 word1 ") and sample[-1] == "short one"
    assert {text for text in sample if text.startswith("b")} == {"b" * corpus_folder.LONG_WORD}


def peak_bytes():
    """The most memory that this process has held since it was last asked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = [line for line in lines if line.startswith("VmHWM")]
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1]) * 1024


def grown(tmp_path, size):
    """What a preparation of a line of so many bytes takes at most, beside what is there before."""
    words = json.dumps("a line of some words, again and again \u20ac, ")[1:-1]
    path, count = tmp_path / f"{size}.jsonl", size // len(words)
    with open(path, "w") as file:
        file.write('{"text": "to hold out"}\n{"id": [1], "text": "')
        for first in range(0, count, 1000):
            file.write(words * min(1000, count - first))
        file.write('"}\n')
    settings = Settings("jsonl", (str(path),), cache=str(tmp_path / "cache"), workers=1)
    few = prepare(replace(settings, paths=(str(tmp_path / "few.jsonl"),)))
    if size < 10**8:
        # Training on 64 MB is the same, but takes its time.
        settings = replace(settings, tokenizer=str(few.tokenizer_directory))
    peak_bytes()
    before = peak_bytes()
    corpus = prepare(settings)
    assert corpus.num_tokens > count and corpus.num_documents == 2
    return peak_bytes() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="tells no peak of memory")
@pytest.mark.parametrize(
    ("size", "most"),
    [
        (10_000_000, 200_000_000),
        pytest.param(4 * 10**8, 500_000_000, marks=[pytest.mark.slow, HOUR]),
    ],
)
def test_memory_is_bounded_whatever_the_length_of_a_line(tmp_path, size, most):
    (tmp_path / "few.jsonl").write_text("".join(f'{{"text": "few {i}"}}\n' for i in range(9)))
    assert grown(tmp_path, size) < most
