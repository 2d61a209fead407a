"""Each remedy of the messages about data is applied as it is written, and the data are read."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from parallel3d.config.data import DataConfig
from parallel3d.data import documents
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import prepare
from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer
from tests.data import chats
from tests.remedies import refused

pytestmark = pytest.mark.gloo

TEXT = "the cat sat on the mat and the dog sat on the log. "


def text_config(paths, folder: Path, **changes) -> DataConfig:
    """Settings of a corpus whose tokenizer is trained, by default of text files."""
    settings = {"source": "text", "vocab_size": 300, "sequence_length": 8}
    settings |= {"held_out_fraction": 0, "cache": str(folder / "cache"), **changes}
    return DataConfig(paths=(str(paths),), **settings)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lines_of(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def assert_read(config: DataConfig) -> Corpus:
    corpus = prepare(config)
    assert len(corpus.train) > 0
    return corpus


# Paths and files


@pytest.mark.parametrize(
    ("source", "name", "text"),
    [
        ("text", "a.txt", TEXT),
        ("jsonl", "a.jsonl", lines_of({"text": TEXT})),
        ("parquet", "a.parquet", ""),
    ],
)
def test_folder_is_named_by_the_glob_that_the_message_shows(tmp_path, source, name, text):
    path = write(tmp_path / "corpus/below" / name, text)
    if source == "parquet":
        parquet.write_table(pa.table({"text": [TEXT]}), path)
    folder = tmp_path / "corpus"
    glob = f"{folder}/**/*{path.suffix}"
    with refused(f"use a glob such as {glob}"):
        prepare(text_config(folder, tmp_path, source=source))
    assert_read(text_config(glob, tmp_path, source=source))


def test_pipe_is_copied_to_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with refused("copy the contents to one"):
        prepare(text_config(tmp_path / "pipe", tmp_path))
    (tmp_path / "pipe").unlink()
    write(tmp_path / "pipe", TEXT)
    assert_read(text_config(tmp_path / "pipe", tmp_path))


def test_path_that_matches_nothing_becomes_a_path_or_a_glob(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "corpus/a.txt", TEXT)
    with refused("use the path of a file, or a glob such as corpus/**/*.txt"):
        prepare(text_config("corpus/b.txt", tmp_path))
    assert_read(text_config("corpus/a.txt", tmp_path))
    assert_read(text_config("corpus/**/*.txt", tmp_path))


def test_files_without_text_get_some(tmp_path):
    path = write(tmp_path / "a.txt", "")
    with refused("use files with text"):
        prepare(text_config(path, tmp_path))
    write(path, TEXT)
    assert_read(text_config(path, tmp_path))


def test_file_that_cannot_be_read_is_made_readable_or_left_out(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    write(tmp_path / "b.txt", TEXT)
    with refused("make it readable, or leave it out"):
        prepare(text_config(tmp_path / "*.txt", tmp_path))
    assert_read(text_config(tmp_path / "b.txt", tmp_path))
    write(tmp_path / "gone", TEXT)
    assert_read(text_config(tmp_path / "*.txt", tmp_path))


def test_file_that_changes_is_prepared_again(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", lines_of({"text": TEXT}))
    find = documents.find_documents

    def change_after(*arguments, **settings):
        documents_before = find(*arguments, **settings)
        write(path, lines_of({"text": "another text"}))
        return documents_before

    with monkeypatch.context() as planted, refused("run it again"):
        planted.setattr("parallel3d.data.prepare.find_documents", change_after)
        prepare(text_config(path, tmp_path, source="jsonl"))
    assert_read(text_config(path, tmp_path, source="jsonl"))


def test_cache_that_cannot_be_written_is_moved(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    blocked = write(tmp_path / "blocked", "a file")
    with refused("set data.cache to a writable directory"):
        prepare(text_config(path, tmp_path, cache=str(blocked / "cache")))
    assert_read(text_config(path, tmp_path, cache=str(tmp_path / "other")))


# Rows


ROWS = {
    "is not JSON": ('{"text": "a"', "write one object"),
    "list": ('["a"]', '{"text": "..."}'),
    "number": ('{"text": 3}', "fix or remove"),
    "bytes": (b'{"text": "caf\xe9"}', "iconv"),
    "other field": ('{"body": "a"}', "set text_field"),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_line_is_fixed_removed_or_skipped(tmp_path, name):
    line, remedy = ROWS[name]
    path = tmp_path / "a.jsonl"
    good = lines_of(*[{"text": TEXT}] * 12).encode()
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    config = text_config(path, tmp_path, source="jsonl")
    with refused(remedy):
        prepare(config)
    with refused('set data.on_error to "skip"'):
        prepare(config)
    skipping = config.model_copy(update={"on_error": "skip"})
    assert sum(assert_read(skipping).facts.skipped.values()) == 1
    with refused("fix them, or raise it"):
        prepare(skipping.model_copy(update={"max_skipped": 0.05}))
    if name == "bytes":
        path.write_bytes(path.read_bytes().decode("latin-1").encode())
        assert assert_read(config).num_documents == 13
    path.write_bytes(good)
    assert assert_read(config).num_documents == 12


def test_skipping_is_a_remedy_only_where_it_helps(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of({"text": TEXT}, 3, 4))
    config = text_config(path, tmp_path, source="jsonl")
    with refused('set data.on_error to "skip" and data.max_skipped to 0.67 or more'):
        prepare(config)
    assert_read(config.model_copy(update={"on_error": "skip", "max_skipped": 0.67}))
    write(path, lines_of(3))
    with refused("1 document cannot be used; fix it: ") as refusal:
        prepare(config)
    assert 'on_error to "skip"' not in refusal.text
    write(path, lines_of({"text": TEXT}))
    assert_read(config)


def test_text_field_is_set_to_one_that_the_message_shows(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of({"id": 3, "meta": {"body": TEXT}}))
    with refused('it has "meta.body"; set text_field'):
        prepare(text_config(path, tmp_path, source="jsonl"))
    assert_read(text_config(path, tmp_path, source="jsonl", text_field="meta.body"))


def test_column_is_named_or_cast(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [TEXT.encode()], "body": [TEXT]}), path)
    config = text_config(path, tmp_path, source="parquet")
    with refused("cast it to string if it is text, or set text_field to the column"):
        prepare(config)
    assert_read(config.model_copy(update={"text_field": "body"}))
    parquet.write_table(pa.table({"text": [TEXT]}), path)
    assert_read(config)
    parquet.write_table(pa.table({"text": [TEXT, None]}), path)
    with refused("fill in or remove the row, or set text_field"):
        prepare(config)
    parquet.write_table(pa.table({"text": [TEXT, "filled"]}), path)
    assert_read(config)


def test_long_line_is_allowed_or_split(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of({"text": TEXT * 40}))
    config = text_config(path, tmp_path, source="jsonl", max_line_bytes=1000)
    with refused("raise data.max_line_bytes, or split it"):
        prepare(config)
    assert_read(config.model_copy(update={"max_line_bytes": 10_000}))
    write(path, lines_of({"text": TEXT * 10}, {"text": TEXT * 11}))
    assert_read(config)


# Length and split


def test_corpus_shorter_than_a_step_gets_smaller_steps_or_text(tmp_path):
    path = write(tmp_path / "a.txt", TEXT * 3)
    config = text_config(path, tmp_path)
    with refused("add text, or lower sequence_length, or the samples of a step"):
        check_length(prepare(config), 8, global_batch=100)
    check_length(prepare(config), 8, global_batch=2)
    check_length(prepare(config), 1, global_batch=20)
    write(path, TEXT * 1000)
    check_length(prepare(config), 8, global_batch=100)


def test_set_shorter_than_a_sample_is_left_out(tmp_path):
    """By the setting that names it: there are four kinds."""
    write(tmp_path / "short.txt", "a b")
    for name in ("a", "b"):
        write(tmp_path / f"long/{name}.txt", f"{name} {TEXT}" * 40)
    long = text_config(tmp_path / "long/*.txt", tmp_path)
    check_length(prepare(long), 64, 1)
    held_out = text_config(tmp_path / "*.txt", tmp_path, held_out_fraction=0.4)
    write(tmp_path / "other.txt", TEXT * 100)
    with refused("set data.held_out_fraction to 0"):
        check_length(prepare(held_out), 64, 1)
    check_length(prepare(held_out.model_copy(update={"held_out_fraction": 0})), 64, 1)

    short = {"source": "text", "paths": (str(tmp_path / "short.txt"),)}
    validated = text_config(tmp_path / "long/*.txt", tmp_path, validation={"mine": short})
    with refused("remove data.validation.mine"):
        check_length(prepare(validated), 64, 1)
    check_length(prepare(validated.model_copy(update={"validation": {}})), 64, 1)

    parts = [{"source": "text", "paths": (str(tmp_path / "long/*.txt"),)}, short]
    settings = {"cache": str(tmp_path / "cache"), "vocab_size": 300, "held_out_fraction": 0}
    settings |= {"sequence_length": 64}
    mixture = DataConfig(source="mixture", mixture=tuple(parts), **settings)
    with refused("remove data.mixture.1"):
        check_length(prepare(mixture), 64, 1)
    check_length(prepare(DataConfig(source="mixture", mixture=(parts[0],), **settings)), 64, 1)


@pytest.mark.slow
def test_data_set_s_short_validation_split_is_left_out(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"text": [TEXT * 40]})
    short = datasets.Dataset.from_dict({"text": ["a b"]})
    datasets.DatasetDict(train=table, validation=short).save_to_disk(tmp_path / "set")
    settings = {"cache": str(tmp_path / "cache"), "vocab_size": 300, "held_out_fraction": 0}
    settings |= {"sequence_length": 64}
    config = DataConfig(source="hub", name=str(tmp_path / "set"), **settings)
    with refused("set data.validation_split to null"):
        check_length(prepare(config), 64, 1)
    check_length(prepare(config.model_copy(update={"validation_split": None})), 64, 1)


def test_single_document_is_divided_or_nothing_is_held_out(tmp_path):
    path = write(tmp_path / "a.txt", f"{TEXT}\nanother line\n\nand more\n")
    config = text_config(path, tmp_path, held_out_fraction=0.3)
    with refused('data.documents = "blank_line" or "line"'):
        prepare(config)
    for how in ("blank_line", "line"):
        assert_read(config.model_copy(update={"documents": how}))
    with refused("or hold out nothing with data.held_out_fraction = 0"):
        prepare(config)
    assert_read(config.model_copy(update={"held_out_fraction": 0}))


# Tokenizers


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    save_tokenizer(train_tokenizer([TEXT], 290), folder)
    return folder


def test_file_of_a_tokenizer_is_replaced_by_its_folder(tmp_path, tokenizer):
    path = write(tmp_path / "a.txt", TEXT)
    with refused(f"such as '{tokenizer}'"):
        prepare(text_config(path, tmp_path, tokenizer=str(tokenizer / "tokenizer.json")))
    assert_read(text_config(path, tmp_path, tokenizer=str(tokenizer)))


@pytest.mark.parametrize("name", ["/no/such/place", "empty"])
def test_missing_tokenizer_is_replaced(tmp_path, tokenizer, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    path = write(tmp_path / "a.txt", TEXT)
    with refused("use a directory that contains tokenizer.json"):
        prepare(text_config(path, tmp_path, tokenizer=name))
    assert_read(text_config(path, tmp_path, tokenizer=str(tokenizer)))
    assert_read(text_config(path, tmp_path, tokenizer="train"))


def test_end_of_text_is_set_in_the_file_that_the_message_names(tmp_path, tokenizer):
    path = tokenizer / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    end = settings.pop("eos_token")
    path.write_text(json.dumps(settings))
    text = write(tmp_path / "a.txt", TEXT)
    with refused("set eos_token in its tokenizer_config.json"):
        prepare(text_config(text, tmp_path, tokenizer=str(tokenizer)))
    path.write_text(json.dumps(settings | {"eos_token": end}))
    assert_read(text_config(text, tmp_path, tokenizer=str(tokenizer)))


def test_special_tokens_of_infilling_are_named_or_added(tmp_path, tokenizer):
    path = write(tmp_path / "a.txt", TEXT)
    config = text_config(path, tmp_path, tokenizer=str(tokenizer), fim={"rate": 0.5})
    with refused("name its special tokens before prefix, suffix and middle, or use a tokenizer"):
        prepare(config)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    own = ["<before>", "<after>", "<between>"]
    loaded.add_special_tokens({"extra_special_tokens": own})
    loaded.save_pretrained(tmp_path / "special")
    fim = {"rate": 0.5, "tokens": own}
    settings = {"tokenizer": str(tmp_path / "special"), "fim": fim}
    assert_read(text_config(path, tmp_path, **settings))


def test_tokens_outside_the_vocabulary(tmp_path, monkeypatch):
    """A tokenizer whose highest id is not in its table; the vocabulary is the tokenizer's."""
    words = {"the": 0, "cat": 1, "<end>": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="the"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(
        tmp_path / "words"
    )
    path = write(tmp_path / "a.txt", TEXT)
    config = text_config(path, tmp_path, tokenizer=str(tmp_path / "words"))
    assert assert_read(config).vocab_size == 3


# Conversations


def test_chat_template_is_put_beside_the_tokenizer(tmp_path):
    folder = chats.save_tokenizer_with(None, tmp_path / "tokenizer")
    path = chats.write_lines(tmp_path / "a.jsonl", chats.CONVERSATIONS)
    with refused("use a folder with the tokenizer and a chat_template.jinja"):
        prepare(chats.config_of(path, folder))
    write(folder / "chat_template.jinja", chats.MARKED)
    assert_read(chats.config_of(path, folder))


def test_marks_are_put_around_turns_that_are_rewritten(tmp_path):
    folder = chats.save_tokenizer_with(chats.REWRITING, tmp_path / "tokenizer")
    path = chats.write_lines(tmp_path / "a.jsonl", [chats.turns("a", "b", "c", "d")])
    with refused("put {% generation %} and {% endgeneration %} around them"):
        prepare(chats.config_of(path, folder))
    turn = "{{ m.content }}"
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    write(folder / "chat_template.jinja", chats.REWRITING.replace(turn, marked))
    assert_read(chats.config_of(path, folder))


def test_conversations_are_written_as_the_message_shows(tmp_path):
    folder = chats.save_tokenizer_with(chats.MARKED, tmp_path / "tokenizer")
    path = chats.write_lines(tmp_path / "a.jsonl", [{"messages": []}])
    with refused('write lines such as {"messages": [{"role": "user", "content": "..."}, ...]}'):
        prepare(chats.config_of(path, folder))
    messages = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
    chats.write_lines(path, [{"messages": messages}])
    assert_read(chats.config_of(path, folder))


def test_bad_conversation_is_mended_or_skipped(tmp_path):
    folder = chats.save_tokenizer_with(chats.MARKED, tmp_path / "tokenizer")
    bad = [{"role": "bad", "content": "x"}, {"role": "assistant", "content": "y"}]
    path = chats.write_lines(tmp_path / "a.jsonl", [*chats.CONVERSATIONS, {"messages": bad}])
    config = chats.config_of(path, folder)
    with refused("mend the conversation or the template"):
        prepare(config)
    with refused('fix it, or set data.on_error to "skip"'):
        prepare(config)
    assert_read(config.model_copy(update={"on_error": "skip"}))
    bad[0]["role"] = "user"
    chats.write_lines(path, [*chats.CONVERSATIONS, {"messages": bad}])
    assert_read(config)
