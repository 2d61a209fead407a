"""Long texts are encoded in pieces cut at white space; a tokenizer is trained on a sample."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.data import corpus_folder, tokenizer
from parallel3d.data.prepare import prepare
from parallel3d.data.tokenizer import cut_long, encode, train_tokenizer
from tests.data.documents import Settings, read_source

pytestmark = pytest.mark.gloo
HOUR = pytest.mark.timeout(3600)

PROSE = "The quick brown fox, 27 times:\n  it jumps over the lazy dog. " * 200


@pytest.mark.parametrize("size", [1, 700, 10**6])
def test_pieces_have_the_token_ids_of_the_whole_text(size, monkeypatch):
    monkeypatch.setattr(tokenizer, "LONGEST", 1000)
    bpe = train_tokenizer([PROSE], 300)
    chunks = [(PROSE[i : i + size], False) for i in range(0, len(PROSE), size)]
    texts = [text for text, _ in cut_long([*chunks, ("", True)])]
    assert len(texts) > 5
    assert [token for ids in encode(bpe, texts) for token in ids] == encode(bpe, [PROSE])[0]


def test_text_without_white_space_is_cut(monkeypatch):
    monkeypatch.setattr(tokenizer, "LONGEST", 1000)
    texts = [text for text, _ in cut_long([("a" * 5500, False), ("", True)])]
    assert max(map(len, texts)) <= 2000 and "".join(texts) == "a" * 5500


def test_tokenizer_training_sample_is_bounded(tmp_path, monkeypatch):
    lines = [" ".join(f"word{i}" for i in range(400_000)), "b" * 3_000_000, "short one"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    documents = read_source("jsonl", [tmp_path / "a.jsonl"])
    nothing = corpus_folder.np.zeros(3, bool)
    total = documents.table["num_bytes"].sum()
    sample = list(corpus_folder._sample(documents, nothing, total / 4))
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
    """Bytes of memory that preparing a text of `size` bytes takes beyond what was held before."""
    words = "a line of some words, again and again \u20ac, "
    path = tmp_path / f"{size}.txt"
    count = size // len(words)
    (tmp_path / "a.txt").write_text("to hold out")
    with open(path, "w") as file:
        for first in range(0, count, 1000):
            file.write(words * min(1000, count - first))
    paths = (str(path), str(tmp_path / "a.txt"))
    settings = Settings("text", paths, cache=str(tmp_path / "cache"), workers=1)
    few = prepare(replace(settings, paths=(f"{tmp_path}/few*.txt",)))
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
        (1_500_000, 200_000_000),  # 437 MB if the text is encoded in one piece
        pytest.param(4 * 10**8, 500_000_000, marks=[pytest.mark.slow, HOUR]),
    ],
)
def test_memory_does_not_depend_on_the_length_of_a_text(tmp_path, size, most):
    for i in range(9):
        (tmp_path / f"few{i}.txt").write_text(f"few {i}")
    assert grown(tmp_path, size) < most
