"""The default corpus: made without a network, opened at once when it is cached."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gloo

SCRIPT = """
import json, socket, sys, time
calls = []
def no_network(*args, **kwargs):
    calls.append(str(args))
    raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = no_network

from types import SimpleNamespace
from parallel3d.data.prepare import prepare
corpus = prepare(SimpleNamespace(
    source="python-stdlib", paths=(), tokenizer="train", vocab_size=4096,
    held_out_fraction=0.01, workers="auto", cache="auto"))
print(json.dumps({
    **corpus.summary(), "calls": calls, "cpu_seconds": time.process_time(),
    "heavy": sorted({"torch", "datasets", "transformers", "tokenizers"} & set(sys.modules))}))
"""


def prepare_default(home):
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_the_default_corpus_cold_and_cached(tmp_path):
    cold = prepare_default(tmp_path)
    assert cold["calls"] == []
    assert cold["num_tokens"] > 1_000_000 and cold["vocab_size"] == 4096
    assert 5.5 < cold["unigram_entropy"] < 7.5
    assert cold["directory"].startswith(str(tmp_path / ".cache/parallel3d/corpora"))
    # Nothing of ours, or of the libraries', lies anywhere else.
    assert [str(path) for path in (tmp_path / ".cache").iterdir()] == [
        str(tmp_path / ".cache/parallel3d")
    ]
    cached = prepare_default(tmp_path)
    assert cached["heavy"] == [] and cached["cpu_seconds"] < 1.0
    assert {key: cached[key] for key in cold if key not in ("heavy", "cpu_seconds")} == {
        key: cold[key] for key in cold if key not in ("heavy", "cpu_seconds")
    }
