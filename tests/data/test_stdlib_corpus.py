"""The default corpus: made without a network, opened at once when it is cached."""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare

pytestmark = pytest.mark.gloo

SCRIPT = """
import json, pathlib, socket, sys, sysconfig, time
calls = []
def no_network(*args, **kwargs):
    calls.append(str(args))
    raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = no_network
if len(sys.argv) > 1:
    sysconfig.get_path = lambda name: sys.argv[1]

from types import SimpleNamespace
from parallel3d.data.prepare import prepare
corpus = prepare(SimpleNamespace(
    source="python-stdlib", token_field=None, paths=(), tokenizer="train", vocab_size=4096,
    held_out_fraction="auto", held_out_seed=0, validation={}, validation_split="validation",
    mixture=(), on_error="stop", max_skipped=0.1, workers="auto", cache="auto",
    max_line_bytes=1000, stream=False, streams=(), packing="none", fim=None))
print(json.dumps({
    **corpus.summary(), "calls": calls, "cpu_seconds": time.process_time(),
    "heavy": sorted({"torch", "datasets", "transformers", "tokenizers"} & set(sys.modules))}))
"""


@pytest.fixture
def some_files(tmp_path):
    """Some of the library's files, in a folder that looks like its own."""
    library = Path(sysconfig.get_path("stdlib"))
    (tmp_path / "lib").mkdir()
    for path in sorted(library.glob("*.py"))[:11]:
        shutil.copy(path, tmp_path / "lib")
    return tmp_path / "lib"


def prepare_here(home, library, monkeypatch):
    """Prepare the default corpus in this process; return its summary, and the calls of a network.

    This saves the seconds in which the libraries are loaded.
    """
    calls = []

    def no_network(*args, **kwargs):
        calls.append(str(args))
        raise OSError("no network in this test")

    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(socket.socket, "connect", no_network)
        patch.setattr(socket, "getaddrinfo", no_network)
        patch.setattr(sysconfig, "get_path", lambda name: str(library))
        settings = RunConfig.from_json("ds.json", ["--data.vocab_size", "4096"]).data
        return {**prepare(settings).summary(), "calls": calls}


def prepare_default(home, *library):
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", SCRIPT, *map(str, library)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_default_corpus_is_prepared_and_then_cached(tmp_path):
    cold = prepare_default(tmp_path)
    check_cold_and_cached(cold, tmp_path)
    assert cold["num_tokens"] > 1_000_000
    assert 5.5 < cold["unigram_entropy"] < 7.5


def test_part_of_the_default_corpus_is_prepared_and_then_cached(tmp_path, some_files, monkeypatch):
    cold = prepare_here(tmp_path, some_files, monkeypatch)
    check_cold_and_cached(cold, tmp_path, some_files)
    assert cold["num_documents"] == 11


def check_cold_and_cached(cold, tmp_path, *library):
    """Check the summary of the first preparation of the default corpus, and prepare it again."""
    assert cold["calls"] == [] and cold["vocab_size"] == 4096
    assert cold["directory"].startswith(str(tmp_path / ".cache/parallel3d/corpora"))
    # Nothing of ours, or of the libraries', lies anywhere else.
    assert [path.name for path in (tmp_path / ".cache").iterdir()] == ["parallel3d"]
    cached = prepare_default(tmp_path, *library)
    assert cached["heavy"] == [] and cached["cpu_seconds"] < 5.0
    for key in cold.keys() - {"heavy", "cpu_seconds"}:
        assert cached[key] == cold[key], key
