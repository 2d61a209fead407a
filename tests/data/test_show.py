"""prepare.py --show: the samples of a run, with their documents, and what these are like."""

import io
import json
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from launch import prepare as command
from parallel3d.data.batches import Batches
from parallel3d.data.prepare import prepare
from parallel3d.data.show import document_statistics, samples, show_samples
from tests.data.documents import READ, Settings
from tests.data.ids.test_formats import config_of

pytestmark = pytest.mark.gloo


@pytest.fixture
def mixture(tmp_path, settings):
    """The awkward documents, and rows of which a third repeats others."""
    rows = [{"text": f"row {i % 20} \x1b[31m of some"} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = (
        Settings("text", settings.paths, weight=1.0),
        Settings("jsonl", (str(tmp_path / "rows.jsonl"),), weight=3.0),
    )
    return replace(settings, source="mixture", paths=(), mixture=parts)


def test_shown_samples_are_those_of_training(mixture, settings):
    for config in (mixture, settings):
        corpus = prepare(config)
        tokens, _ = Batches(corpus.train, 8, seed=5).microbatch(0, 40)
        shown = samples(corpus, 8, 5, 40)
        for sample, row in zip(shown, tokens, strict=True):
            assert [token for part in sample["fragments"] for token in part["ids"]] == row.tolist()
            ends = np.flatnonzero(row == corpus.end_of_text)
            assert sum(part["ends"] for part in sample["fragments"]) == len(ends)
            for before, after in pairwise(sample["fragments"]):
                assert before["ends"] and after["begins"]
            assert sum(part["num_tokens"] for part in sample["fragments"]) == 8
        assert {sample["part"] for sample in shown} == set(corpus.labels or [""])
    # Of the last ones, the awkward documents: what a token cuts in two is no text of theirs.
    texts = [part["text"] for sample in shown for part in sample["fragments"]]
    texts = [text for text in texts if text.isascii()]
    assert texts and all(any(part in text for text in READ.values()) for part in texts)


def test_document_statistics_count_lengths_and_repeats(mixture, tmp_path):
    text, rows = document_statistics(prepare(mixture))["parts"]
    assert rows["num_documents"] == 30 and rows["num_repeated_documents"] == 10
    assert text["num_repeated_documents"] == 0 and text["document_tokens"]["shortest"] == 1
    lengths = rows["document_tokens"]
    assert lengths["shortest"] <= lengths["median"] <= lengths["longest"]
    size = sum(len(f"row {i % 20} \x1b[31m of some") for i in range(30))
    assert rows["bytes_per_token"] == pytest.approx(size / (rows["num_tokens"] - 30))


def test_terminal_output_shows_bounds_and_escapes_control_characters(mixture):
    corpus = prepare(mixture)
    out = io.StringIO()
    shown = samples(corpus, 40, 0, 6)
    console = Console(file=out, width=60, force_terminal=True, color_system=None)
    show_samples(corpus, shown, console)
    text = out.getvalue()
    assert "\x1b[31m" not in text and "\\x1b[31m of some" in text
    assert "end of text" in text and "(continued)" in text and "continues" in text
    assert "rows.jsonl, line " in text and "repeated documents" in text


def test_corpus_without_a_tokenizer_is_shown_as_ids(tmp_path):
    ids = np.tile(np.array([5, 6, 7, 9], dtype="<u2"), 30)
    ids[::8] = np.arange(15)
    np.save(tmp_path / "a.npy", ids)
    config = config_of("tokens", tmp_path / "a.npy", vocab_size=300, end_of_text_id=9)
    corpus = prepare(config)
    shown = samples(corpus, 8, 0, 2)
    [first, _] = json.loads(json.dumps(shown))
    assert first["fragments"][0]["text"] is None and first["fragments"][0]["ids"]
    assert document_statistics(corpus)["bytes_per_token"] is None
    out = io.StringIO()
    show_samples(corpus, shown, Console(file=out, width=80))
    assert "5 6 7" in out.getvalue()


def test_command_shows_samples_as_text_and_json(tmp_path, settings, monkeypatch, capsys):
    data = {"source": "text", "paths": list(settings.paths), "cache": settings.cache}
    model = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    block = {"model": model, "train": {"steps": 1}}
    block["data"] = {**data, "vocab_size": 300, "sequence_length": 8, "held_out_fraction": 0.2}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "parallel3d": block}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    arguments = ["prepare.py", "--config", str(tmp_path / "ds.json"), "--show", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 0
    assert "sample 1: 8 tokens from " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    assert command.main() == 0
    assert len(json.loads(capsys.readouterr().out)["show"]["samples"]) == 2
