"""The trained tokenizer is an ordinary, deterministic Hugging Face tokenizer; bad ones refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from parallel3d.data import build
from parallel3d.data import tokenizer as module
from parallel3d.data.tokenizer import (
    directory_digest,
    encode,
    load_tokenizer,
    num_tokens,
    tokenizer_directory,
    train_tokenizer,
)
from parallel3d.errors import DataError
from tests.data.documents import found, texts_of

pytestmark = pytest.mark.gloo

AWKWARD = [
    "",
    " ",
    "\r\n\t",
    "a . b , it 's",
    "你好 \U0001f600 \x00",
    "<|endoftext|> <|endoftext|>",
]


@pytest.fixture
def documents(folder):
    return found("text", [f"{folder}/**/*.txt"])


@pytest.fixture
def trained(documents, tmp_path):
    directory = tmp_path / "tokenizer"
    train_tokenizer(texts_of(documents), 300).save_pretrained(directory)
    return directory


def test_auto_tokenizer_loads_it_and_decodes_what_it_encodes(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    for text, ids in zip(AWKWARD, encode(tokenizer, AWKWARD), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids
    assert tokenizer.eos_token == "<|endoftext|>"
    assert num_tokens(tokenizer) == len(tokenizer) == 300


def test_training_twice_gives_the_same_bytes(folder, trained, tmp_path):
    # In another process: hash seeds and thread timing differ there.
    code = (
        "import sys; from tests.data.documents import found, texts_of;"
        "from parallel3d.data.tokenizer import train_tokenizer as train;"
        "train(texts_of(found('text', [sys.argv[1]])), 300).save_pretrained(sys.argv[2])"
    )
    again = tmp_path / "again"
    pattern = f"{folder}/**/*.txt"
    here = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, pattern, str(again)], check=True, cwd=here)
    assert sorted(path.name for path in again.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in again.iterdir():
        assert path.read_bytes() == (trained / path.name).read_bytes()


def test_a_large_corpus_is_sampled_evenly(documents):
    nothing, budgets = np.zeros(len(documents), bool), [200.0, 10**9]
    used = list(build._sample([documents] * 2, [nothing] * 2, budgets))
    stride = -(-documents.table["num_bytes"].sum() // 200)
    texts = texts_of(documents)
    assert stride > 1 and used == texts[::stride] + texts
    # What is held out stays unseen.
    nothing[0] = True
    assert list(build._sample([documents], [nothing], [10**9])) == texts[1:]


def test_a_vocabulary_too_small_for_bytes(documents):
    texts = texts_of(documents)
    assert num_tokens(train_tokenizer(texts, 257)) == 257
    with pytest.raises(DataError, match=r"data\.vocab_size=256 is too small.* at least 257"):
        train_tokenizer(texts, 256)


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"cannot be loaded by AutoTokenizer .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file(trained):
    (trained / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="cannot be loaded by AutoTokenizer"):
        load_tokenizer(trained)


def test_a_tokenizer_without_end_of_text(trained):
    settings = json.loads((trained / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (trained / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"has no end-of-text token.*set eos_token"):
        load_tokenizer(trained)


def test_code_that_comes_with_a_tokenizer_does_not_run(trained, tmp_path):
    settings = json.loads((trained / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Mine"
    settings["auto_map"] = {"AutoTokenizer": ["mine.Mine", None]}
    (trained / "tokenizer_config.json").write_text(json.dumps(settings))
    (trained / "mine.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "class Mine(PreTrainedTokenizer): pass\n"
    )
    try:
        load_tokenizer(trained)
    except DataError as error:
        assert "cannot be loaded" in str(error)
    assert not (tmp_path / "ran").exists()


def test_a_missing_directory_is_not_asked_of_the_hub(monkeypatch):
    monkeypatch.setattr(module, "load_tokenizer", lambda name: pytest.fail("asked"))
    for name in ("/no/such/place", "./nowhere", "../x", "~/nowhere-at-all", "a/b/c"):
        with (
            pytest.raises(DataError, match="is not a directory"),
            tokenizer_directory(name),
        ):
            pass


def test_a_name_is_known_by_its_content(trained, monkeypatch):
    def digest(name):
        with tokenizer_directory(name) as directory:
            return directory_digest(directory)

    monkeypatch.setattr(
        module, "load_tokenizer", lambda name: AutoTokenizer.from_pretrained(trained)
    )
    first = digest("someone/tokenizer")
    assert digest("tokenizer") == first
    text = (trained / "tokenizer.json").read_text()
    (trained / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end|>"))
    assert digest("tokenizer") != first


def test_weights_beside_a_tokenizer_are_not_part_of_it(trained):
    before = directory_digest(trained)
    (trained / "model.safetensors").write_bytes(b"\0" * 100)
    assert directory_digest(trained) == before
    (trained / "special_tokens_map.json").write_text("{}")
    assert directory_digest(trained) != before
