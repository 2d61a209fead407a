"""Each remedy of a checkpoint of another program that is refused is applied, and it is taken."""

import json
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.foreign.continuing import convert_checkpoint
from tests.foreign.plain import SEEN, STEPS, Run, adamw
from tests.foreign.sources import BATCH, RATE, write_config

pytestmark = pytest.mark.gloo


@pytest.fixture
def convert(tmp_path, capsys):
    """Convert into a new run; return the message of a refusal, "" if it was taken."""
    config = write_config(tmp_path, warmup=0)
    numbers = iter(range(100))

    def command(folder, *options, changes=(), to=None, config_file=config):
        run = to or tmp_path / "runs" / f"new-{next(numbers)}"
        code = convert_checkpoint(folder, run, config_file, *(changes or SEEN), *options)
        errors = capsys.readouterr().err
        assert code in (0, 2), errors
        return errors if code else ""

    return command


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_position_is_said_once(convert, folder):
    assert "add --samples-seen N" in convert(folder, changes=("--step", str(STEPS)))
    seen = ("--samples-seen", str(STEPS * BATCH))
    assert "leave it out" in convert(folder, "--step", "4")
    assert not convert(folder, changes=seen)


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_settings_are_those_of_the_source_or_accepted(convert, folder):
    other = ("--optimizer.params.lr", "0.01")
    message = convert(folder, *other)
    assert "Write those of the source, or add --accept-changes" in message
    assert not convert(folder, "--optimizer.params.lr", str(RATE))
    assert not convert(folder, *other, "--accept-changes")


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_existing_run_is_removed_or_another_is_named(convert, folder, tmp_path):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    assert "remove it, or name another run" in convert(folder, to=run)
    assert not convert(folder, to=tmp_path / "runs" / "other")
    (run / "metrics.jsonl").unlink()
    run.rmdir()
    assert not convert(folder, to=run)


def test_config_has_what_a_conversion_needs(convert, folder):
    muon = ("--optimizer", '{"type": "Muon", "params": {"lr": 0.001}}')
    assert 'use "AdamW"' in convert(folder, *muon)
    mup = ("--parallel3d.model.parametrization", '{"type": "mup", "base_width": 16}')
    assert 'use "standard"' in convert(folder, *mup)
    assert not convert(folder, "--parallel3d.model.parametrization", '{"type": "standard"}')
    message = convert(folder, "--parallel3d.mesh", "plan")
    assert """--parallel3d.mesh '{"pp": 1, "dp": 1, "tp": 1}'""" in message
    assert not convert(folder, "--parallel3d.mesh", '{"pp": 1, "dp": 1, "tp": 1}')
    any_dp = ("--parallel3d.mesh", '{"pp": 1, "tp": 1}', "--train_batch_size", "null")
    message = convert(folder, *any_dp)
    assert "train_batch_size: the source does not say it" in message and "set it" in message
    assert not convert(folder, *any_dp[:2], "--train_batch_size", str(BATCH))


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_other_model_is_set_to_that_of_the_run(convert, folder):
    deeper = ("--parallel3d.model.num_hidden_layers", "3")
    assert "set parallel3d.model to that of the run" in convert(folder, *deeper)
    assert not convert(folder, "--parallel3d.model.num_hidden_layers", "2")


def test_config_beside_the_weights_is_followed(convert, tmp_path):
    theirs = tmp_path / "theirs"
    Run().save_as_trainer(theirs)
    message = convert(theirs, "--parallel3d.model.rms_norm_eps", "0.1")
    assert "parallel3d.model.rms_norm_eps = 0.1" in message
    assert "says 1e-05; set it to that" in message
    assert not convert(theirs, "--parallel3d.model.rms_norm_eps", "1e-5")


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_optimizer_is_saved_beside_the_model(convert, tmp_path):
    Run().save(tmp_path / "theirs", whole=False)
    message = convert(tmp_path / "theirs")
    assert "save the optimizer beside the model, or name the folder that has both" in message
    Run().save(tmp_path / "whole")
    assert not convert(tmp_path / "whole")


@pytest.mark.slow
def test_optimizer_is_adamw(convert, tmp_path):
    def amsgrad(weights):
        return torch.optim.AdamW(weights, lr=RATE, amsgrad=True)

    def radam(weights):
        return torch.optim.RAdam(weights, lr=RATE)

    for name, make in {"amsgrad": amsgrad, "radam": radam, "adamw": adamw}.items():
        Run(make=make).save(tmp_path / name)
    assert "continue a run of AdamW or Adam without amsgrad" in convert(tmp_path / "amsgrad")
    assert "continue a run of AdamW or Adam" in convert(tmp_path / "radam")
    assert not convert(tmp_path / "adamw")


@pytest.mark.slow
def test_one_step_of_a_folder_is_named(convert, tmp_path):
    for step in ("step-1", "step-3"):
        Run().save(tmp_path / "steps" / step)
    assert "name the folder of one step" in convert(tmp_path / "steps")
    assert not convert(tmp_path / "steps/step-3")


@pytest.mark.slow
def test_moments_are_kept_in_fp32(convert, tmp_path):
    run = Run()
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    run.save(tmp_path / "theirs")
    assert "keep it in fp32" in convert(tmp_path / "theirs")
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float()
    run.save(tmp_path / "again")
    assert not convert(tmp_path / "again")


@pytest.mark.parametrize(
    "damage",
    ["missing", *(pytest.param(x, marks=pytest.mark.slow) for x in ("short", "no index"))],
)
def test_distributed_checkpoint_is_copied_again(convert, folder, tmp_path, damage):
    theirs = tmp_path / "theirs"
    copytree(folder, theirs)
    file = theirs / (".metadata" if damage == "no index" else "__0_0.distcp")
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2])
    assert "copy" in convert(theirs)
    file.write_bytes(data)
    assert not convert(theirs)


def test_optimizer_of_the_trainer_is_saved(convert, tmp_path):
    theirs = tmp_path / "theirs"
    Run().save_as_trainer(theirs)
    data = (theirs / "optimizer.pt").read_bytes()
    (theirs / "optimizer.pt").unlink()
    assert "save without save_only_model" in convert(theirs)
    (theirs / "optimizer.pt").write_bytes(data[:100])
    assert "copy it again" in convert(theirs)
    torch.save({"states": []}, theirs / "optimizer.pt")
    assert "save it with a current version of its program" in convert(theirs)
    (theirs / "optimizer.pt").write_bytes(data)
    state = (theirs / "trainer_state.json").read_text()
    (theirs / "trainer_state.json").write_text("{}")
    assert "copy the whole folder" in convert(theirs)
    (theirs / "trainer_state.json").write_text(state)
    assert not convert(theirs)


@pytest.mark.slow
def test_weights_alone_are_where_a_run_may_start(tmp_path):
    """The other remedy of a folder without moments: its model block is the folder's."""
    from parallel3d.config import RunConfig

    Run().save_as_trainer(tmp_path / "theirs")
    raw = json.loads(write_config(tmp_path, warmup=0).read_text())
    raw["parallel3d"]["model"] = {"family": "llama", "from_pretrained": str(tmp_path / "theirs")}
    assert RunConfig.from_dict(raw).model.num_hidden_layers == 2


@pytest.mark.slow  # by default it is refused (test_hostile.py)
def test_pickled_object_is_left_out(convert, tmp_path):
    theirs = tmp_path / "theirs"
    run = Run()
    run.save_as_trainer(theirs)
    state = run.optimizer.state_dict()
    torch.save(state | {"mine": Run}, theirs / "optimizer.pt")
    assert "save the checkpoint again without it" in convert(theirs)
    torch.save(state, theirs / "optimizer.pt")
    assert not convert(theirs)


def test_tensor_that_is_not_contiguous_is_saved_again(convert, tmp_path):
    theirs = tmp_path / "theirs"
    run = Run()
    run.save_as_trainer(theirs)
    state = run.optimizer.state_dict()
    moments = state["state"][1]
    moments["exp_avg"] = moments["exp_avg"].T.contiguous().T
    torch.save(state, theirs / "optimizer.pt")
    assert "save it again with .contiguous()" in convert(theirs)
    moments["exp_avg"] = moments["exp_avg"].contiguous()
    torch.save(state, theirs / "optimizer.pt")
    assert not convert(theirs)


def save_by_name(run, path, optimizers=("optimizer",), without=()):
    """Save a distributed checkpoint whose moments have the names of their weights."""
    from torch.distributed.checkpoint import save

    weights = {k: v for k, v in run.model.state_dict().items() if k not in without}
    names = [name for name, _ in run.model.named_parameters()]
    states = {}
    for name, state in zip(names, run.optimizer.state.values(), strict=True):
        states |= {f"state.{name}.{key}": value for key, value in state.items()}
    entries = {"model": weights} | dict.fromkeys(optimizers, states)
    save(entries, checkpoint_id=path, no_dist=True)
    return path


TIED = "--parallel3d.model.tie_word_embeddings"


@pytest.mark.slow
def test_tied_weights_that_differ_are_two(convert, tmp_path):
    theirs = save_by_name(Run(tied=False), tmp_path / "theirs")
    message = convert(theirs, TIED, "true")
    assert "set parallel3d.model.tie_word_embeddings = false if the run had two" in message
    assert not convert(theirs, TIED, "false")


@pytest.mark.slow
def test_head_that_is_tied_is_said_to_be(convert, tmp_path):
    theirs = save_by_name(Run(tied=True), tmp_path / "theirs", without=("lm_head.weight",))
    message = convert(theirs, TIED, "false")
    assert "set parallel3d.model.tie_word_embeddings = true if it is tied" in message, message
    assert not convert(theirs, TIED, "true")


@pytest.mark.slow
def test_one_of_several_optimizers_is_saved(convert, tmp_path):
    several = save_by_name(Run(), tmp_path / "several", ("first", "second"))
    message = convert(several)
    assert "has several optimizers" in message and "save one of them" in message
    assert not convert(save_by_name(Run(), tmp_path / "one", ("first",)))


@pytest.mark.slow
def test_weights_are_saved_in_fp32(convert, tmp_path):
    theirs = tmp_path / "theirs"
    Run().save_as_trainer(theirs)
    weights = load_file(theirs / "model.safetensors")
    eight_bits = {name: value.to(torch.float8_e4m3fn) for name, value in weights.items()}
    save_file(eight_bits, theirs / "model.safetensors", metadata={"format": "pt"})
    assert "use fp32" in convert(theirs)
    save_file(weights, theirs / "model.safetensors", metadata={"format": "pt"})
    assert not convert(theirs)


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_folder_with_a_checkpoint_is_named(convert, folder, tmp_path):
    assert "name the folder of a checkpoint" in convert(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "name the folder that has one" in convert(tmp_path / "empty")
    assert not convert(folder)


FROM_WEIGHTS = (
    "start from the weights alone: export them to a transformers folder, and name it in "
    "parallel3d.model.from_pretrained"
)


def test_unreadable_run_begins_from_its_weights_alone(convert, tmp_path):
    """Experts in files of their own, and a tensor with a name of the program's own."""
    from parallel3d.config import RunConfig

    theirs = tmp_path / "theirs"
    Run().save_as_trainer(theirs)
    experts = tmp_path / "experts"
    experts.mkdir()
    for name in ("mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"):
        (experts / name).write_bytes(b"")
    assert FROM_WEIGHTS in convert(experts)
    named = tmp_path / "named"
    copytree(theirs, named)
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.layers.0.mine.weight"] = tensors.pop("model.layers.0.mlp.down_proj.weight")
    own = {f"mine.{name}": value for name, value in tensors.items()}
    save_file(own, named / "model.safetensors", metadata={"format": "pt"})
    assert convert(named)
    raw = json.loads(write_config(tmp_path, warmup=0).read_text())
    raw["parallel3d"]["model"] = {"from_pretrained": str(theirs)}
    assert RunConfig.from_dict(raw).model.num_hidden_layers == 2


def test_files_of_older_torch_are_saved_again(convert, tmp_path):
    theirs = tmp_path / "theirs"
    Run().save_as_trainer(theirs)
    state = torch.load(theirs / "optimizer.pt", weights_only=True)
    torch.save(state, theirs / "optimizer.pt", _use_new_zipfile_serialization=False)
    assert "load and save it with torch again" in convert(theirs)
    state = torch.load(theirs / "optimizer.pt", weights_only=True)
    torch.save(state, theirs / "optimizer.pt")
    assert not convert(theirs)


@pytest.mark.slow  # by default it is refused (test_refused.py)
def test_sizes_are_those_of_the_run(convert, folder):
    wider = ("--parallel3d.model.intermediate_size", "64")
    assert "set " in convert(folder, *wider)
    assert not convert(folder)
