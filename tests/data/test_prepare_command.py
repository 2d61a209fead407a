"""launch/prepare.py: what scripts rely on, that is standard output, --json and exit codes."""

import json
import sys
from pathlib import Path

import pytest

import launch.prepare
from launch.prepare import as_text, summarise, tokens_of_run
from parallel3d.base.errors import DataError
from parallel3d.config import RunConfig
from parallel3d.data.batches import check_length
from parallel3d.data.prepare import prepare

pytestmark = pytest.mark.gloo

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


def test_json_is_the_only_standard_output(config, settings, monkeypatch, capfd):
    arguments = [str(PREPARE), "--config", str(config)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    assert launch.prepare.main() == 0
    printed, progress = capfd.readouterr()
    summary = json.loads(printed)
    assert summary["num_documents"] == 6 and summary["vocab_size"] == 300
    assert Path(summary["directory"]).is_relative_to(settings.cache)
    assert "tokenising documents: 6 of 6" in progress
    monkeypatch.setattr(sys, "argv", arguments)
    assert launch.prepare.main() == 0
    again = capfd.readouterr().out
    for name, value in summary.items():
        assert name in again or not value
        if isinstance(value, str):
            assert value in again


def test_manifest_of_a_local_source_is_refused(config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PREPARE), "--config", str(config), "--manifest"])
    assert launch.prepare.main() == 2
    refused = capsys.readouterr().err
    assert "parallel3d.data.stream = false: is required by --manifest; add" in refused


@pytest.fixture
def mixture(config, folder):
    """The documents, and rows of another kind, one to three."""
    rows = [json.dumps({"text": f"row {i} of some"}) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    raw = json.loads(config.read_text())
    data = raw["parallel3d"]["data"]
    parts = [
        {"source": "text", "paths": data.pop("paths"), "weight": 1.0},
        {"source": "jsonl", "paths": [str(folder / "rows.jsonl")], "weight": 3.0},
    ]
    data |= {"source": "mixture", "mixture": parts}
    config.write_text(json.dumps(raw))
    return config


def test_tokens_and_epochs_of_a_run_are_counted(mixture):
    def tokens(**changes):
        config = json.loads(mixture.read_text())
        config["parallel3d"] |= {"train": {"steps": 7}, **changes}
        return RunConfig.from_dict(config)

    corpus = prepare(tokens().data)
    assert tokens_of_run(tokens(), corpus) is None
    assert summarise(corpus, None)["mixture"][0]["epochs"] is None
    for part in summarise(corpus, 800)["mixture"]:
        training = part["num_tokens"] - part["num_held_out_tokens"]
        assert part["epochs"] == pytest.approx(800 * part["weight"] / training)
    shown = as_text(summarise(corpus, None))
    assert "jsonl " in shown and "epochs: unknown until" in shown
    assert tokens_of_run(tokens(mesh={"pp": 1, "dp": 4}), corpus) == 7 * 4 * 8
    assert tokens_of_run(tokens(train={"epochs": 2.0}), corpus) == 2 * len(corpus.train)
    assert tokens_of_run(tokens(train={"max_tokens": 999}), corpus) == 999


def test_too_short_corpus_is_refused_like_in_training(config, monkeypatch, capsys):
    for changes, expected in [
        ({"sequence_length": 100}, "the training part has"),
        ({"sequence_length": 55, "held_out_fraction": 0.01}, "the held-out part has"),
        ({"sequence_length": 55, "held_out_fraction": 0}, None),
    ]:
        raw = json.loads(config.read_text())
        raw["parallel3d"]["data"] |= changes
        config.write_text(json.dumps(raw | {"train_micro_batch_size_per_gpu": 2}))
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--config", str(config)])
        assert launch.prepare.main() == (2 if expected else 0), changes
        output = capsys.readouterr()
        if expected:
            assert expected in output.err and output.out == ""
            corpus = prepare(RunConfig.from_json(str(config)).data)
            with pytest.raises(DataError) as refused:
                check_length(corpus, changes["sequence_length"], 2)
            assert f"prepare: {refused.value}" in output.err


def test_ctrl_c_is_exit_code_3(config, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.prepare, "prepare", interrupt)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--config", str(config)])
    assert launch.prepare.main() == 3
    assert "interrupted" in capsys.readouterr().err
