"""A run that streams its corpus takes the steps of a run with a local one, and shows no keys."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer
from tests.data.ids import writers
from tests.data.stores import http_store
from tests.launch.launching import TRAIN, environment, torchrun

pytestmark = [pytest.mark.drill, pytest.mark.slow]

KEY = "token=a-secret-key"
PREPARE = str(Path(TRAIN).with_name("prepare.py"))
PYTHON = [sys.executable]


def write_config(name, data, steps):
    model = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    run = {"name": Path(name).stem, "save_weights": False}
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel3d": {
            "model": model,
            "data": data,
            "train": {"steps": steps},
            "run": run,
            "mesh": {"dp": "auto"},
            "checkpoint": {"every": 2},
        },
    }
    Path(name).write_text(json.dumps(config))


def losses(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


class Runs:
    """Launches in a folder that stream the same shards from `urls`, or read them from the disk."""

    def __init__(self, folder, urls, paths):
        self.folder = folder
        self.output = ""
        self.data = {"source": "tokens", "tokenizer": "none", "vocab_size": writers.SIZE}
        self.data |= {"sequence_length": 8, "end_of_text_id": writers.END, "cache": "cache"}
        self.data |= {"paths": paths, "held_out_fraction": 0}
        self.stream = {"stream": True, "manifest": "manifest", "paths": urls}

    def run(self, name, *arguments, launcher=PYTHON, script=TRAIN, steps=4, **settings):
        write_config(self.folder / f"{name}.json", self.data | settings, steps)
        done = subprocess.run(
            [*launcher, script, "--config", f"{name}.json", *arguments],
            cwd=self.folder,
            text=True,
            env=environment(),
            capture_output=True,
            timeout=200,
        )
        is_stopped = done.returncode == 3 or "exitcode  : 3" in done.stderr
        assert done.returncode == 0 or is_stopped, done.stderr
        self.output += done.stdout + done.stderr


@pytest.fixture
def runs(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(8):
        documents = [[*x, writers.END] for x in writers.some_documents(12, seed=number)]
        writers.numpys(shards / f"{number}.npy", documents)
    with http_store(shards) as server:
        names = [f"{number}.npy" for number in range(8)]
        urls = [f"{server.url}/{name}?{KEY}" for name in names]
        runs = Runs(tmp_path, urls, [f"shards/{name}" for name in names])
        runs.run("a", "--manifest", script=PREPARE, **runs.stream)
        yield runs


def test_streamed_run_equals_a_local_one(runs, tmp_path):
    runs.run("local")
    runs.run("streamed", **runs.stream, stream_window="all")
    assert losses(tmp_path, "streamed") == losses(tmp_path, "local")
    assert "a-secret-key" not in runs.output
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not [path for path in written if b"a-secret-key" in path.read_bytes()]
    config = (tmp_path / "runs/streamed/config.json").read_text()
    assert "?token=***" in config


def test_as_read_text_resumes_on_another_mesh_without_counts(runs, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(6):
        texts = [" ".join(map(str, x)) for x in writers.some_documents(9, seed=number)]
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"text/{number}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(train_tokenizer(["0 1 2 3"], 300), tmp_path / "tokenizer")
    runs.data = {"source": "jsonl", "paths": "text/*.jsonl", "tokenizer": "tokenizer"}
    runs.data |= {
        "sequence_length": 16,
        "cache": "cache",
        "stream": True,
        "manifest": "text-manifest",
    }
    runs.data |= {"count": "as-read", "stream_window": 2}
    runs.run("a", "--manifest", script=PREPARE)
    runs.run("whole", steps=40)
    runs.run("moved", "--train.stop_after", "22", steps=40, launcher=torchrun(2))
    assert [*(tmp_path / "text-manifest/counts").iterdir()]
    shutil.rmtree(tmp_path / "text-manifest/counts")
    shutil.rmtree(tmp_path / "cache")
    runs.run("moved", steps=40)
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "whole"), rel=1e-5)


def test_stream_resumes_on_another_mesh_with_the_same_samples(runs, tmp_path):
    settings = runs.stream | {"stream_window": 2, "stream_cache_bytes": 100_000}
    runs.run("whole", steps=40, **settings)
    runs.run("moved", "--train.stop_after", "10", steps=40, launcher=torchrun(2), **settings)
    runs.run("moved", steps=40, **settings)
    runs.run("other", steps=40, **settings | {"stream_window": 8})
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "whole"), rel=1e-5)
    assert losses(tmp_path, "other") != pytest.approx(losses(tmp_path, "whole"), rel=1e-5)
