"""The trained tokenizer is an ordinary, deterministic Hugging Face tokenizer; bad ones refused."""

import json
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from parallel3d.base import hub_access
from parallel3d.base.errors import DataError
from parallel3d.data import corpus_folder
from parallel3d.data import tokenizer as module
from parallel3d.data.prepare import prepare
from parallel3d.data.tokenizer import (
    copy_unwritten,
    directory_digest,
    encode,
    load_tokenizer,
    lost_share,
    num_tokens,
    save_tokenizer,
    tokenizer_directory,
    train_tokenizer,
)
from parallel3d.verify.local_ranks import run_locally
from tests.data.documents import read_source, texts_of

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
    return read_source("text", [f"{folder}/**/*.txt"])


@pytest.fixture
def trained(documents, tmp_path):
    directory = tmp_path / "tokenizer"
    train_tokenizer(texts_of(documents), 300).save_pretrained(directory)
    return directory


def test_trained_tokenizer_decodes_its_encodings(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    for text, ids in zip(AWKWARD, encode(tokenizer, AWKWARD), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids
    assert tokenizer.eos_token == "<|endoftext|>"
    assert num_tokens(tokenizer) == len(tokenizer) == 300


def train_on_rank(rank, pattern, directory):
    train_tokenizer(texts_of(read_source("text", [pattern])), 300).save_pretrained(directory)


def test_tokenizer_training_is_deterministic(folder, trained, tmp_path):
    # In a process of another server: hash seeds and thread timing differ there.
    again = tmp_path / "again"
    run_locally(train_on_rank, 1, f"{folder}/**/*.txt", again)
    names = sorted(path.name for path in again.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    for path in again.iterdir():
        assert path.read_bytes() == (trained / path.name).read_bytes()


def test_large_corpus_is_sampled_evenly(documents):
    nothing = np.zeros(len(documents), bool)
    stride = -(-documents.table["num_bytes"].sum() // 200)
    texts = texts_of(documents)
    assert stride > 1
    assert list(corpus_folder._sample(documents, nothing, 200.0)) == texts[::stride]
    assert list(corpus_folder._sample(documents, nothing, 10**9)) == texts
    # What is held out stays unseen.
    nothing[0] = True
    assert list(corpus_folder._sample(documents, nothing, 10**9)) == texts[1:]


def test_code_of_a_tokenizer_does_not_run(trained, tmp_path):
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
        assert "AutoTokenizer cannot load it" in str(error)
    assert not (tmp_path / "ran").exists()


def test_missing_directory_is_not_looked_up_on_the_hub(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # beside it is no x
    monkeypatch.setattr(module, "load_tokenizer", lambda name: pytest.fail("asked"))
    for name in ("/no/such/place", "./nowhere", "../x", "~/nowhere-at-all", "a/b/c"):
        with pytest.raises(DataError, match="is not a directory"), tokenizer_directory(name):
            pass


def test_file_instead_of_a_directory_is_refused(trained, monkeypatch, settings):
    monkeypatch.chdir(trained.parent)
    for name in (str(trained / "tokenizer.json"), "tokenizer/tokenizer.json"):
        with pytest.raises(DataError, match=r"is a file; use the directory .*tokenizer'$"):
            prepare(replace(settings, tokenizer=name))


def test_tokenizer_is_loaded_before_the_corpus_is_read_and_once(trained, monkeypatch, settings):
    own = replace(settings, tokenizer=str(trained))
    text = (trained / "tokenizer.json").read_text()
    (trained / "tokenizer.json").write_text(text[: len(text) // 2])
    with monkeypatch.context() as patched:
        patched.setattr("parallel3d.data.prepare.find_documents", lambda *args: pytest.fail("read"))
        with pytest.raises(DataError, match="AutoTokenizer cannot load it"):
            prepare(own)
    (trained / "tokenizer.json").write_text(text)
    corpus = prepare(own)
    monkeypatch.setattr(module, "load_tokenizer", lambda name: pytest.fail("loaded again"))
    assert prepare(own).key == corpus.key


@pytest.mark.parametrize("answers", [False, True])
def test_hub_that_accepts_and_is_silent_is_unreachable(monkeypatch, answers):
    for name in hub_access.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_access, "getproxies", dict)
    monkeypatch.setattr(hub_access, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if answers:
            threading.Thread(target=refuse_requests, args=(server,), daemon=True).start()
        reason = hub_access.why_unreachable.__wrapped__()
    assert reason == "" if answers else "sent nothing for 0.3 s" in reason


def refuse_requests(server):
    """Answer every request with an error; those that are empty are a check of the port."""
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            if connection.recv(2**12):
                connection.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n")
            connection.close()


def test_unreachable_hub_is_reported_at_once(monkeypatch, settings, tmp_path):
    """Before the corpus is read, and not after a minute of the library's retries."""

    def no_network(*args, **kwargs):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(hub_access.socket, "create_connection", no_network)
    for name in hub_access.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_access, "getproxies", dict)
    monkeypatch.setattr(module, "why_unreachable", hub_access.why_unreachable.__wrapped__)
    unread = replace(settings, tokenizer="gpt2", paths=("/no/such/text",))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"unreachable \(huggingface.co: Name or serv"):
        prepare(unread)
    assert time.monotonic() - started < 1
    # A copy in the cache is taken in the hub's place.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--gpt2/snapshots").mkdir(parents=True)
    module.check_name("gpt2")


def test_hanging_look_up_is_not_waited_for(monkeypatch):
    def waits(*_, **__):
        time.sleep(3)
        raise TimeoutError

    monkeypatch.setattr(hub_access.socket, "create_connection", waits)
    monkeypatch.setattr(hub_access, "OFFLINE", ())
    monkeypatch.setattr(hub_access, "getproxies", dict)
    started = time.monotonic()
    assert "no answer from huggingface.co within" in hub_access.why_unreachable.__wrapped__()
    assert time.monotonic() - started < 2


def test_tokenizer_that_does_not_cover_the_text_is_reported(tmp_path, monkeypatch, settings):
    words = {"[UNK]": 0, "the": 1, "cat": 2, "<end>": 3}
    known = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    # Without an unknown token, what is not known vanishes.
    silent = Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 2}, []))
    cases = {
        "known": (known, "[UNK]", "the cat", "the cat xyz qq"),
        "silent": (silent, None, "a b ab", "abcd"),
    }
    for name, (backend, unknown, covered_text, other_text) in cases.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<end>", unk_token=unknown
        )
        assert lost_share(tokenizer, [covered_text]) == 0
        assert lost_share(tokenizer, [other_text]) >= 0.4
        tokenizer.save_pretrained(tmp_path / name)
        phases = []

        def progress(phase, done, total, phases=phases):
            phases.append(phase)

        corpus = prepare(replace(settings, tokenizer=str(tmp_path / name)), progress)
        assert corpus.facts.unknown_share > 0.5
        assert any("does not cover" in phase for phase in phases)
    assert prepare(settings).facts.unknown_share is None


def test_digest_of_a_name_depends_on_its_content(trained, monkeypatch):
    def digest(name):
        with tokenizer_directory(name) as directory:
            return directory_digest(directory)

    monkeypatch.setattr(
        module, "load_tokenizer", lambda name: AutoTokenizer.from_pretrained(trained)
    )
    monkeypatch.setattr(module, "why_unreachable", lambda: "")
    first = digest("someone/tokenizer")
    assert digest("tokenizer") == first
    text = (trained / "tokenizer.json").read_text()
    (trained / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end|>"))
    assert digest("tokenizer") != first


def test_digest_ignores_weights_beside_a_tokenizer(trained):
    before = directory_digest(trained)
    (trained / "model.safetensors").write_bytes(b"\0" * 100)
    assert directory_digest(trained) == before
    (trained / "special_tokens_map.json").write_text("{}")
    assert directory_digest(trained) != before


def test_digest_covers_further_chat_templates(trained):
    """Else a run has the tokenizer of an earlier one, whose corpus it finds in the cache."""
    before = directory_digest(trained)
    (trained / "additional_chat_templates").mkdir()
    template = trained / "additional_chat_templates/tool_use.jinja"
    template.write_text("{{ messages }}")
    with_template = directory_digest(trained)
    template.write_text("{{ tools }}")
    assert len({before, with_template, directory_digest(trained)}) == 3


def test_saved_tokenizer_says_nothing_of_how_it_was_loaded(trained, tmp_path):
    save_tokenizer(load_tokenizer(trained), tmp_path / "saved")
    settings = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert not settings.keys() & {"local_files_only", "is_local"}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.X", null]}}', "auto_map in"),
        ("tokenizer.json", '{"model": 1}', "mend its files"),
    ],
)
def test_remedy_fits_why_a_tokenizer_cannot_be_loaded(trained, tmp_path, file, text, words):
    folder = tmp_path / "broken"
    shutil.copytree(trained, folder)
    (folder / file).write_text(text)
    with pytest.raises(DataError, match="AutoTokenizer cannot load it") as caught:
        load_tokenizer(folder)
    assert words in str(caught.value) and "a directory that contains" not in str(caught.value)


def test_files_of_the_hubs_cache_are_copied_unless_they_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--somebody--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(commit)
    snapshot = cached / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("tokenizer_config.json", "tokenizer.model", "merges.txt", "model.safetensors"):
        (snapshot / name).write_text("published")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "merges.txt").write_text("written")
    copy_unwritten("somebody/small", saved)
    copy_unwritten("somebody/other", saved)
    assert {path.name: path.read_text() for path in saved.iterdir()} == {
        "merges.txt": "written",
        "tokenizer.model": "published",
    }
