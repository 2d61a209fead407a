"""launch/convert.py: what it prints, and its exit codes."""

import json

import pytest

from launch import convert
from parallel3d import models
from tests.huggingface.checkpoints import checkpoint_of, small

pytestmark = pytest.mark.gloo

DONE = 0
FAILED = 1
BAD_INPUT = 2


@pytest.fixture
def run(tmp_path):
    return checkpoint_of(small("gpt"), tmp_path)


@pytest.fixture
def command(called):
    def command(*words, does="export"):
        return called(convert.main, "launch/convert.py", does, *words)

    return command


def test_run_and_checkpoint_export_the_same_folder(run, command, tmp_path):
    out = tmp_path / "out"
    code, printed, _ = command(run, "--to", out, "--dtype", "bf16", "--shard-size", "20KB")
    assert code == DONE
    assert printed.startswith("GPT2LMHeadModel, 28 tensors, ") and str(out) in printed
    assert printed.count("proved  ") == 4 and "not compared  tokenizer: there is none" in printed
    step = run / "checkpoints/step-10"
    code, printed, _ = command(
        step, "--to", tmp_path / "again", "--dtype", "bf16", "--shard-size", "20KB", "--json"
    )
    report = json.loads(printed)
    assert code == DONE and report["ok"] and report["architecture"] == "GPT2LMHeadModel"
    assert len(report["checked"]) == 4 and report["differs"] == []
    names = {path.name for path in out.iterdir()}
    assert {"model.safetensors.index.json", "config.json", "README.md"} <= names
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    weights = [path for path in out.iterdir() if path.suffix == ".safetensors"]
    assert len(weights) > 2 and max(path.stat().st_size for path in weights) < 30_000
    assert sum(path.stat().st_size for path in weights) > report["bytes"]


def test_working_directory_is_accepted_as_target(run, command, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert command(run, "--to", ".")[0] == DONE
    assert {path.name for path in tmp_path.iterdir()} == {"run", "here"}
    assert (tmp_path / "here/model.safetensors").is_file()


def test_failed_check_exits_with_1_and_leaves_no_folder(run, command, tmp_path, monkeypatch):
    family = models.huggingface("gpt")
    right = family.to_huggingface

    def negative(config, weights):
        return {name: -value for name, value in right(config, weights).items()}

    monkeypatch.setattr(family, "to_huggingface", negative)
    code, printed, _ = command(run, "--to", tmp_path / "out", "--json")
    report = json.loads(printed)
    assert code == FAILED and not report["ok"] and "logits: differ by up to" in report["differs"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "--to", "{run}"], "run: exists and is not empty; remove it, or name another"),
        (["{run}/none", "--to", "{run}/out"], "none: no checkpoint there"),
        (
            ["{run}", "--to", "{run}/out", "--shard-size", "big"],
            "--shard-size = big: must be a size",
        ),
        (
            ["{run}", "--to", "{run}/out", "--architecture", "LlamaForCausalLM"],
            "this model cannot be a LlamaForCausalLM; use GPT2LMHeadModel",
        ),
    ],
)
def test_wrong_input_exits_with_2(words, message, run, command):
    code, printed, errors = command(*(word.format(run=run) for word in words))
    assert (code, printed) == (BAD_INPUT, "")
    assert message in errors and "Traceback" not in errors
    assert not (run / "out").exists()


def test_published_model_is_imported(run, command, tmp_path):
    assert command(run, "--to", tmp_path / "model", "--dtype", "bf16")[0] == DONE
    code, printed, _ = command(tmp_path / "model", "--to", tmp_path / "start", does="import")
    assert code == DONE and printed.startswith("GPT2LMHeadModel, 28 tensors, ")
    assert printed.count("proved  ") == 3
    code, printed, _ = command(
        tmp_path / "start", "--to", tmp_path / "again", "--json", does="import"
    )
    report = json.loads(printed)
    assert code == DONE and report["ok"] and report["tensors"] == 28 and report["differs"] == []
    names = {path.name for path in (tmp_path / "model").iterdir()}
    for name in names:
        files = [(tmp_path / where / name).read_bytes() for where in ("model", "start", "again")]
        assert len({*files}) == 1, name


def test_failed_import_exits_with_1_and_wrong_folder_with_2(run, command, tmp_path, monkeypatch):
    assert command(run, "--to", tmp_path / "model")[0] == DONE
    family = models.huggingface("gpt")
    right = family.to_huggingface

    def negative(config, weights):
        return {name: -value for name, value in right(config, weights).items()}

    monkeypatch.setattr(family, "to_huggingface", negative)
    words = tmp_path / "model", "--to", tmp_path / "start"
    code, printed, _ = command(*words, "--json", does="import")
    report = json.loads(printed)
    assert code == FAILED and not report["ok"] and "is torch.float32" in report["differs"][0]
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/pytorch_model.bin")
    code, printed, errors = command(*words, does="import")
    assert (code, printed) == (
        BAD_INPUT,
        "",
    ) and "is a pickle, which can run code and is never read" in errors
    assert not (tmp_path / "start").exists() and not (tmp_path / "start.partial").exists()
