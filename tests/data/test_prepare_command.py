"""launch/prepare.py: what scripts rely on, that is standard output, --json and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = Path(__file__).parents[2] / "launch/prepare.py"


@pytest.fixture
def config(settings, tmp_path):
    """A config file for the awkward documents."""
    section = {"source": "text", "paths": settings.paths, "cache": settings.cache}
    data = {**section, "vocab_size": 300, "sequence_length": 8, "held_out_fraction": 0.2}
    path = tmp_path / "ds.json"
    model = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    block = {"model": model, "data": data, "train": {"steps": 1}}
    engine = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    path.write_text(json.dumps({**engine, "parallel3d": block}))
    return path


def run(config, *arguments):
    command = [sys.executable, str(PREPARE), "--config", str(config), *arguments]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)


def test_json_is_one_object_alone_on_standard_output(config, settings):
    done = run(config, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["num_documents"] == 6 and summary["vocab_size"] == 300
    assert Path(summary["directory"]).is_relative_to(settings.cache)
    assert "tokenising documents: 6 of 6" in done.stderr
    again = run(config)
    assert again.returncode == 0
    for name, value in summary.items():
        assert name in again.stdout
        if isinstance(value, str):
            assert value in again.stdout


def test_bad_data_and_bad_config_exit_with_2_and_no_traceback(config, folder):
    (folder / "empty.txt").touch()
    for arguments, message in [
        ((), "empty.txt is empty"),
        (("--parallel3d.data.vocab_size", "260", "--json"), "empty.txt is empty"),
        (("--parallel3d.data.vocab_size", "-1"), "vocab_size"),
        (("--parallel3d.data.no_such_key", "1"), "no_such_key"),
    ]:
        done = run(config, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert message in done.stderr and "Traceback" not in done.stderr
