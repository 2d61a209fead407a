"""A run whose corpus is at a URL with a password: no file or log of it has the password."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.ids import locked, writers
from tests.launch.launching import TRAIN, environment

pytestmark = [pytest.mark.drill, pytest.mark.slow]


def test_password_is_masked_and_the_run_resumes(tmp_path):
    documents = [[*ids, writers.END] for ids in writers.some_documents()]
    url = f"{locked.OPEN}{writers.numpys(tmp_path / 'ids.npy', documents)}"
    data = {"source": "tokens", "tokenizer": "none", "vocab_size": 300, "sequence_length": 8}
    data |= {"paths": [url], "end_of_text_id": writers.END, "cache": str(tmp_path / "cache")}
    data |= {"stream": True, "manifest": str(tmp_path / "manifest")}
    model = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel3d": {"model": model, "data": data, "train": {"steps": 2}, "run": {"name": "a"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    # Python imports it at its start: so the processes know the protocol.
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import tests.data.ids.locked\n")
    path = f"{Path(TRAIN).parents[1]}:{tmp_path / 'site'}"

    def run(command, file, *arguments):
        return subprocess.run(
            [sys.executable, command, "--config", file, *arguments],
            cwd=tmp_path,
            text=True,
            env=environment() | {"PYTHONPATH": path},
            capture_output=True,
            timeout=200,
        )

    def check(done, code):
        assert done.returncode == code, done.stderr
        assert "secret" not in done.stdout + done.stderr
        written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
        assert not [path for path in written if b"secret" in path.read_bytes()]

    prepare = Path(TRAIN).with_name("prepare.py")
    check(run(prepare, "ds.json", "--manifest"), 0)
    paths = ("--data.paths", json.dumps([url]))
    done = run(TRAIN, "ds.json", *paths)
    check(done, 0)
    assert "user:***@host" in done.stderr
    resolved = tmp_path / "runs/a/config.json"
    assert "user:***@host" in resolved.read_text()
    # The manifest has the URLs that the run needs.
    done = run(TRAIN, resolved, "--train.steps", "3")
    check(done, 0)
    assert "step-2: step 2 of 3" in done.stderr
