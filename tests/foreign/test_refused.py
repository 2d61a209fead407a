"""A checkpoint that lacks something is refused in one message, and nothing is left behind."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.foreign.continuing import assert_no_checkpoint, convert_checkpoint
from tests.foreign.plain import SEEN, Run
from tests.foreign.sources import RATE, write_config

pytestmark = pytest.mark.gloo


@pytest.fixture
def assert_refused(tmp_path, capsys):
    """Convert, and compare the message's words; return it."""
    config = write_config(tmp_path, warmup=0)

    def check(folder, *words, options=SEEN):
        capsys.readouterr()
        run = tmp_path / "runs" / "new"
        assert convert_checkpoint(folder, run, config, *options) == 2
        message = capsys.readouterr().err.split("convert: ", 1)[1]
        assert len(message.strip().splitlines()) == 1, message
        for word in (str(folder), *words):
            assert word in message, message
        assert_no_checkpoint(run)
        return message

    return check


def test_position_is_asked_for_by_name(assert_refused, folder):
    assert_refused(folder, "does not say it", "--samples-seen N", options=())


def test_position_that_contradicts_is_refused(assert_refused, folder):
    assert_refused(folder, "--step = 4", "says 3", options=("--step", "4", *SEEN))


def test_other_settings_are_refused_until_they_are_accepted(tmp_path, assert_refused, folder):
    message = assert_refused(folder, options=(*SEEN, "--optimizer.params.lr", "0.01"))
    assert "learning rate is 0.001" in message and "0.01" in message
    message = assert_refused(folder, options=(*SEEN, "--optimizer.params.weight_decay", "0.1"))
    assert "weight decay 0" in message
    run = tmp_path / "runs" / "accepted"
    options = (*SEEN, "--optimizer.params.lr", "0.01", "--accept-changes")
    assert convert_checkpoint(folder, run, tmp_path / "ds.json", *options) == 0
    assert (run / "checkpoints" / "step-3").is_dir()


def test_existing_run_is_not_touched(tmp_path, capsys, folder):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    assert convert_checkpoint(folder, run, write_config(tmp_path, warmup=0), *SEEN) == 2
    assert "exists (metrics.jsonl)" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_other_model_is_refused(assert_refused, folder):
    bigger = ("--parallel3d.model.num_hidden_layers", "3")
    assert_refused(folder, "21 parameters", "fit the 30 of the model", options=(*SEEN, *bigger))
    smaller = ("--parallel3d.model.num_hidden_layers", "1")
    assert_refused(folder, "fit the 12 of the model", options=(*SEEN, *smaller))
    wider = ("--parallel3d.model.intermediate_size", "64")
    assert_refused(folder, "do not fit", options=(*SEEN, *wider))


def test_weights_alone_are_refused(tmp_path, assert_refused):
    Run().save(tmp_path / "weights", whole=False)
    assert_refused(tmp_path / "weights", "has no moments")


def test_other_optimizer_is_refused(tmp_path, assert_refused):
    def sgd(weights):
        return torch.optim.SGD(weights, lr=RATE, momentum=0.9)

    Run(make=sgd).save(tmp_path / "sgd")
    assert_refused(tmp_path / "sgd", "momentum_buffer", "AdamW")


def test_radam_whose_state_is_adams_is_refused(tmp_path, assert_refused):
    def radam(weights):
        return torch.optim.RAdam(weights, lr=RATE)

    Run(make=radam).save(tmp_path / "radam")
    assert_refused(tmp_path / "radam", "not AdamW's")


def test_folder_of_several_steps_is_refused(tmp_path, assert_refused):
    for step in ("step-1", "step-3"):
        Run().save(tmp_path / "steps" / step)
    assert_refused(tmp_path / "steps", "name the folder of one step")


def test_other_optimizer_of_deepspeed_is_refused(tmp_path, assert_refused):
    """LAMB's state has the keys of Adam's."""
    folder = tmp_path / "lamb"
    folder.mkdir()
    settings = {"optimizer": {"type": "Lamb", "params": {}}}
    state = {"module": {}, "global_steps": 3, "global_samples": 12, "ds_config": settings}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    assert_refused(folder, "trained with Lamb", options=())


def test_amsgrad_is_refused(tmp_path, assert_refused):
    def amsgrad(weights):
        return torch.optim.AdamW(weights, lr=RATE, amsgrad=True)

    Run(make=amsgrad).save(tmp_path / "amsgrad")
    assert_refused(tmp_path / "amsgrad", "max_exp_avg_sq")


def test_moments_in_bf16_are_refused(tmp_path, assert_refused):
    run = Run()
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    run.save(tmp_path / "bf16")
    assert_refused(tmp_path / "bf16", "first moment", "bfloat16", "from_pretrained")


def test_missing_file_is_named(tmp_path, assert_refused):
    Run().save(tmp_path / "lost")
    (tmp_path / "lost" / "__0_0.distcp").unlink()
    assert_refused(tmp_path / "lost", "__0_0.distcp: is missing")


def test_truncated_file_is_named(tmp_path, assert_refused):
    Run().save(tmp_path / "short")
    file = tmp_path / "short" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert_refused(tmp_path / "short", "__0_0.distcp", "copy it again")


def test_trainer_without_its_optimizer_is_refused(tmp_path, assert_refused):
    Run().save_as_trainer(tmp_path / "theirs")
    (tmp_path / "theirs" / "optimizer.pt").unlink()
    assert_refused(tmp_path / "theirs", "optimizer.pt: is missing", "save_only_model")


def test_tied_weights_that_differ_are_refused(tmp_path, assert_refused):
    folder = tmp_path / "theirs"
    Run(tied=True).save_as_trainer(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.25
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tied = (*SEEN, "--parallel3d.model.tie_word_embeddings", "true")
    assert_refused(folder, "one tied weight", "0.25", options=tied)


def test_files_of_another_layout_are_refused(tmp_path, assert_refused):
    Run().save_as_trainer(tmp_path / "theirs")
    torch.save({"states": []}, tmp_path / "theirs" / "optimizer.pt")
    assert_refused(tmp_path / "theirs", "unknown layout", "param_groups")


def test_folder_without_a_checkpoint_is_refused(tmp_path, assert_refused):
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "has no checkpoint of DeepSpeed")
    assert_refused(tmp_path / "nowhere", "does not exist")


def test_json_says_what_was_taken(tmp_path, capsys, folder):
    config = write_config(tmp_path, warmup=0)
    run = tmp_path / "runs" / "new"
    assert convert_checkpoint(folder, run, config, *SEEN, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] and shown["step"] == 3 and shown["samples"] == 12
    assert shown["folder"] == str(run / "checkpoints" / "step-3")
