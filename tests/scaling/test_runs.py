"""Folders of runs as launch/train.py leaves them."""

import json

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.extras.scaling import data_constrained
from parallel3d.extras.scaling.data_constrained import fit_decays
from parallel3d.extras.scaling.estimator import Estimator, SumModel
from parallel3d.extras.scaling.points import points_of
from parallel3d.extras.scaling.runs import read_runs, settings

pytestmark = pytest.mark.pure

WIDTH = 32
LAYERS = 2
VOCAB = 4096
POSITIONS = 64
SEQ = 16


def write_run(folder, name, *, steps=10, reached=10, width=WIDTH, **last):
    """Write a finished run; keywords replace its values."""
    model = {
        "family": "gpt",
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
    }
    block = {
        "mesh": {"dp": 1},
        "pipeline": {"schedule": "gpipe"},
        "model": model,
        "data": {"source": "python-stdlib", "sequence_length": SEQ},
        "train": {"steps": steps},
    }
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel3d": block,
    }
    config = RunConfig.from_dict(raw).resolve(1)
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(config.to_dict()))
    lines = [
        {"step": step, "loss": 6 - 0.1 * step, "tokens": step * 4 * SEQ}
        for step in range(1, reached + 1)
    ]
    if lines:
        lines[-1] |= {"held_out_loss": 5.1} | last
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def error_of(value):
    """As metrics.jsonl has a held-out loss's error."""
    return {"held_out": {"loss": 5.1, "standard_error": value, "tokens": 640, "documents": 9}}


def test_run_is_read_with_parameters_tokens_and_loss(tmp_path):
    write_run(tmp_path, "small")
    table = read_runs(tmp_path)
    (row,) = table.rows
    # GPT-2's arithmetic: 12 h^2 + 13 h a block, a final norm, tied embeddings.
    blocks = LAYERS * (12 * WIDTH**2 + 13 * WIDTH)
    head = 2 * WIDTH + VOCAB * WIDTH
    assert row["transformer"] == blocks and row["with_head"] == blocks + head
    assert row["total"] == blocks + head + POSITIONS * WIDTH
    assert (row["tokens"], row["held_out_loss"], row["batch_tokens"]) == (
        10 * 4 * SEQ,
        5.1,
        4 * SEQ,
    )
    assert row["lr"] == 1e-3
    # 6 N D and attention's scores, forward and backward, over each of its tokens.
    attention = 3 * LAYERS * 4 * SEQ * WIDTH
    matrices = 6 * (LAYERS * 12 * WIDTH**2 + VOCAB * WIDTH)
    assert row["exact_flops"] == pytest.approx((matrices + attention) * 640, rel=0.01)
    points = points_of(table, {})
    assert points.params[0] == blocks + head and points.standard_error is None


def test_unfinished_runs_are_skipped_by_name(tmp_path):
    write_run(tmp_path, "done", validation=error_of(0.01))
    torn = write_run(tmp_path, "torn", validation=error_of(0.02))
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    write_run(tmp_path, "stopped", reached=7)
    write_run(tmp_path, "empty", reached=0)
    (write_run(tmp_path, "gone") / "metrics.jsonl").unlink()
    (write_run(tmp_path, "broken") / "config.json").write_text('{"parallel3d": 3}')
    write_run(tmp_path, "diverged", held_out_loss=None)
    table = read_runs(tmp_path)
    assert table.names == ("diverged", "done", "torn")
    left_out = dict(table.left_out)
    assert left_out.pop("stopped") == "not finished: step 7 of 10"
    assert left_out.pop("empty") == left_out.pop("gone") == "not finished: step 0 of 10"
    assert "config.json: cannot be used" in left_out.pop("broken")
    assert not left_out
    points = points_of(table, {})
    # "diverged" has no standard error, so none is read; it is dropped, and listed with the others.
    assert points.names == ("done",) and points.standard_error is None
    reasons = dict(points.dropped)
    assert "not a finite number" in reasons["diverged"] and reasons["torn"] == "is equal to done"
    assert "not finished" in reasons["stopped"]


def test_standard_errors_are_read_if_all_runs_have_them(tmp_path):
    write_run(tmp_path, "a", validation=error_of(0.01))
    write_run(tmp_path, "b", width=64, validation=error_of(0.02))
    assert points_of(read_runs(tmp_path), {}).standard_error.tolist() == [0.01, 0.02]


def test_settings_list_all_values_of_the_runs(tmp_path):
    for steps in (1000, 200, 30):
        write_run(tmp_path, f"of-{steps}", steps=steps, reached=0)
    values = settings(tmp_path)
    assert values["steps"] == "30, 200, 1000"
    assert values["batch, tokens"] == str(4 * SEQ) and values["vocabulary"] == str(VOCAB)
    assert values["learning-rate schedule"] == "constant" and values["seeds"] == "0"


def test_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no finished runs; name a table"):
        read_runs(tmp_path)
    write_run(tmp_path, "stopped", reached=7)
    with pytest.raises(ConfigError, match="stopped: not finished: step 7 of 10; name"):
        read_runs(tmp_path)


def test_corpus_size_of_a_ladder_gives_the_unique_tokens(tmp_path, monkeypatch):
    # A fit searches from few starts, which is most of its time; test_frontier has all of them.
    monkeypatch.setattr(data_constrained, "_GRID", data_constrained._GRID[1::3])
    starts = SumModel.starts
    monkeypatch.setattr(
        SumModel, "starts", lambda model, weights, each=None: starts(model, weights, 2)
    )
    for width in (16, 32, 48):
        for steps in (10, 20, 40, 80, 160):
            name = f"{width}-{steps}"
            tokens = 64 * steps
            run = write_run(tmp_path, name, steps=steps, reached=steps, width=width)
            # What is repeated is worth nothing here: D counts up to the unique tokens.
            loss = 2 + 40 / width**0.5 + 30 / min(tokens, 2560) ** 0.3
            last = {"step": steps, "tokens": tokens, "loss": loss, "held_out_loss": loss}
            (run / "metrics.jsonl").write_text(f"{json.dumps(last)}\n")
    assert points_of(read_runs(tmp_path), {}).unique is None
    (tmp_path / "corpus.json").write_text('{"training_tokens": 2560}')
    points = points_of(read_runs(tmp_path), {})
    assert set(points.unique) == {2560.0}
    # A run's own record is nearer.
    for name in ("16-10", "48-160"):
        (tmp_path / name / "corpus.json").write_text('{"training_tokens": 2000}')
    assert sorted(points_of(read_runs(tmp_path), {}).unique) == [2000.0] * 2 + [2560.0] * 13
    fitted = fit_decays(points, Estimator(), draws=0)
    assert fitted.parameters["R_D_star"] < 0.1 and fitted.parameters["beta"] == pytest.approx(
        0.3, rel=1e-3
    )
