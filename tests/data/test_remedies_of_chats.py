"""Remedies about conversations, tokenizers and places of data, each applied as it is written."""

import json
import re

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from parallel3d.data.prepare import prepare
from parallel3d.data.remote import matching_urls, system_of
from parallel3d.data.shards import _check
from parallel3d.data.tokenizer import check_name
from parallel3d.train.open_corpus import corpus_lines
from tests.data import chats
from tests.data.test_remedies import TEXT, assert_read, lines_of, text_config, write
from tests.remedies import refused

pytestmark = pytest.mark.gloo


@pytest.fixture
def folder(tmp_path):
    return chats.save_tokenizer_with(chats.MARKED, tmp_path / "tokenizer")


def test_column_of_conversations_is_renamed(tmp_path, folder):
    path = tmp_path / "a.parquet"
    conversations = [chats.turns(f"what is {n}?", f"{n}")["messages"] for n in range(4)]
    parquet.write_table(pa.table({"talk": conversations}), path)
    with refused('it has "talk"; give the column of the conversations this name'):
        prepare(chats.config_of(path, folder))
    parquet.write_table(pa.table({"messages": conversations}), path)
    assert_read(chats.config_of(path, folder))


@pytest.mark.parametrize(
    "line",
    [
        {"text": "hello"},
        {"messages": [{"role": "user"}]},
        pytest.param({"messages": "hello"}, marks=pytest.mark.slow),
        pytest.param({"messages": ["hello"]}, marks=pytest.mark.slow),
        pytest.param({"messages": [{"role": "user", "content": 3}]}, marks=pytest.mark.slow),
    ],
)
def test_line_is_written_as_the_message_shows(tmp_path, folder, line):
    """With a turn of the assistant in place of the dots."""
    path = chats.write_lines(tmp_path / "a.jsonl", [line])
    with refused('write {"messages": ') as refusal:
        prepare(chats.config_of(path, folder))
    shown = re.search(r'write (\{"messages": .*?\}, \.\.\.\]\})', refusal.text)[1]
    answer = json.dumps({"role": "assistant", "content": "yes"})
    written = json.loads(shown.replace(", ...]", f", {answer}]"))
    chats.write_lines(path, [written] * 3)
    assert_read(chats.config_of(path, folder))


@pytest.mark.slow  # a tokenizer without Rust is slow to load
def test_tokenizer_of_conversations_has_its_json(tmp_path, folder):
    slow = ByT5Tokenizer()
    slow.chat_template = chats.MARKED
    slow.save_pretrained(tmp_path / "slow")
    path = chats.write_lines(tmp_path / "a.jsonl", chats.CONVERSATIONS)
    with refused("use one with a tokenizer.json"):
        prepare(chats.config_of(path, tmp_path / "slow"))
    assert (folder / "tokenizer.json").is_file()
    assert_read(chats.config_of(path, folder))


def test_whole_file_is_converted_or_left_out(tmp_path):
    write(tmp_path / "a.txt", TEXT)
    (tmp_path / "b.txt").write_bytes(f"café {TEXT}".encode("latin-1"))
    with refused("convert the file with iconv, or leave it out of data.paths"):
        prepare(text_config(tmp_path / "*.txt", tmp_path))
    assert assert_read(text_config(tmp_path / "a.txt", tmp_path)).num_documents == 1


def test_tokenizer_of_the_hub_is_downloaded_elsewhere(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("parallel3d.data.tokenizer.why_unreachable", lambda: "no answer")
    with refused("download the tokenizer elsewhere, and use its directory"):
        check_name("somebody/small")
    check_name(str(folder))
    path = write(tmp_path / "a.txt", TEXT)
    assert_read(text_config(path, tmp_path, tokenizer=str(folder)))


def test_tokenizer_that_knows_the_text_is_used(tmp_path):
    """The warning of the run's corpus, which `prepare --show` prints in other words."""
    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<end>": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")
    own.save_pretrained(tmp_path / "words")
    path = write(tmp_path / "a.txt", TEXT)
    for tokenizer, is_warned in ((str(tmp_path / "words"), True), ("train", False)):
        corpus = prepare(text_config(path, tmp_path, tokenizer=tokenizer))
        lines = " ".join(corpus_lines(corpus))
        assert ("WARNING: the tokenizer does not know" in lines) == is_warned
        assert is_warned == bool(corpus.facts.unknown_share)


@pytest.mark.slow  # the package of S3 is slow to import
def test_url_is_that_of_a_file_or_a_glob(tmp_path):
    """And its protocol is one whose package is installed, as `remote` of pyproject.toml has."""
    no_package = refused("run `pip install parallel3d[remote]`, or install fsspec's package")
    with no_package, system_of("abfs://container/a.npy"):
        pass
    with system_of("s3://bucket/a.npy") as (_, inner):
        assert inner == "bucket/a.npy"
    url = f"file://{tmp_path}"
    with refused("use the URL of a file, or a glob"):
        matching_urls(f"{url}/none.npy")
    write(tmp_path / "a.npy", "ids")
    for pattern in (f"{url}/a.npy", f"{url}/*.npy"):
        assert matching_urls(pattern) == [f"{url}/a.npy"]


def test_fewer_workers_go_on_after_a_killed_one(tmp_path):
    with refused("lower data.workers"):
        _check([None, -9])
    rows = lines_of(*[{"text": f"{number} {TEXT}"} for number in range(40)])
    path = write(tmp_path / "a.jsonl", rows)
    assert_read(text_config(path, tmp_path, source="jsonl", workers=1))


@pytest.mark.parametrize(
    ("file", "text", "remedy"),
    [
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "fetch it"),
        ("tokenizer_config.json", "", "remove auto_map in a copy of it"),
        ("tokenizer.json", '{"model": 1}', "mend its files, or use the directory of another"),
    ],
)
def test_tokenizer_that_cannot_be_loaded_is_mended(tmp_path, folder, file, text, remedy):
    path = folder / file
    whole = path.read_text()
    if not text:
        code = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
        text = json.dumps(json.loads(whole) | code)
        whole = json.dumps(json.loads(whole) | {"tokenizer_class": "Mine"})
    path.write_text(text)
    corpus = write(tmp_path / "a.txt", TEXT)
    with refused(remedy) as refusal:
        prepare(text_config(corpus, tmp_path, tokenizer=str(folder)))
    assert "or for text use 'train'" in refusal.text
    assert_read(text_config(corpus, tmp_path, tokenizer="train"))
    path.write_text(whole)
    assert_read(text_config(corpus, tmp_path, tokenizer=str(folder)))


def test_documents_in_both_parts_are_removed_from_one(tmp_path):
    shared = write(tmp_path / "a.jsonl", lines_of(*[{"text": f"{n} {TEXT}"} for n in range(4)]))
    own = write(tmp_path / "b.jsonl", lines_of({"text": f"another {TEXT}"}))

    def warnings(path):
        mine = {"source": "jsonl", "paths": [str(path)]}
        config = text_config(shared, tmp_path, source="jsonl", validation={"mine": mine})
        return [line for line in corpus_lines(prepare(config)) if line.startswith("WARNING")]

    (warning,) = warnings(shared)
    assert "remove them from one of the two" in warning
    assert not warnings(own)
