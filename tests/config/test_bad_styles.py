"""Bad files and command lines around other people's configs: one message each, exit code 2.

Each case is the change to a file that is right, or the words on a command line, and what its one
problem must say beside place and value: the rule and the remedy.
"""

import json

import pytest

from launch import plan
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from tests.config.configs import LLAMA, REMOVED, raw

pytestmark = pytest.mark.pure

ON = {"enabled": True}
TRACKERS, LR = "parallel3d.run.trackers", "parallel3d.train.lr_schedule"
AC, NAME = "activation_checkpointing", "parallel3d.run.name"
SWITCH = "write true or false without quotes"
KNOWN = 'write "tensorboard", "csv", "wandb", "comet", "mlflow"'
PASTE = '"params": {"lr": 0.0003, "betas": [0.9, 0.95], "weight_decay": 0.1}'

# by kind: the path that is changed and its value; rule; remedy
FILES = {
    "monitor": [
        ("tensorboard", True, "block of settings", "{...}"),
        ("tensorboard", [], "block of settings", "{...}"),
        ("tensorboard", {"enabled": "true"}, "true or false", SWITCH),
        ("wandb", {"enabled": 1}, "true or false", SWITCH),
        ("tensorboard", ON | {"jobname": "x"}, "no setting", '"job_name"'),
        ("tensorboard", ON | {"output_path": 5}, "a string", "double quotes"),
        ("csv_monitor", ON | {"output_path": "a\0b"}, "U+0000", "write it without"),
        ("csv_monitor", ON | {"job_name": "a\nb"}, "U+000A", "write it without"),
        ("wandb", ON | {"entity": "x"}, "no setting", "group, team, project"),
        ("wandb", ON | {"project": None}, "must be a string", "double quotes"),
        ("comet", ON | {"mode": "make"}, 'must be "get"', '"get_or_create"'),
        ("comet", ON | {"samples_log_interval": -1}, "at least 0", "0 or more"),
        ("flops_profiler", ON | {"profile_step": 0}, "greater than 0", "raise it"),
        ("flops_profiler", ON | {"top_modules": 1.5}, "an integer", "whole number"),
        ("comms_logger", ON | {"prof_ops": "all_reduce"}, "must be a list", "[...]"),
        ("comms_logger", ON | {"verbos": True}, "no setting", '"verbose"'),
        ("wall_clock_breakdown", "true", "true or false", SWITCH),
        ("steps_per_print", 0, "greater than 0", "raise it"),
        ("log_level", "loud", "kept to errors", "remove it"),
    ],
    "trackers": [
        (TRACKERS, "wandb", "must be a list", "[...]"),
        (TRACKERS, ["csv", "tensorbord"], "must be", KNOWN),
        (TRACKERS, ["WandB"], "must be", KNOWN),
        (TRACKERS, ["comet_ml"], "must be", KNOWN),
        (TRACKERS, ["all"], "must be", KNOWN),
        (TRACKERS, [None], "must be", KNOWN),
        (TRACKERS, {"wandb": True}, "must be a list", "[...]"),
        ("trackers", ["csv"], "no setting here", "parallel3d.run.trackers?"),
        ("parallel3d.run.tracker", ["csv"], "no setting", '"trackers"'),
        ("parallel3d.wandb", ON, "no setting here", "did you mean wandb, outside"),
    ],
    "optimizer": [
        ("optimizer.type", "OneBitAdam", "to one bit", 'use "AdamW"'),
        ("optimizer.type", "zerooneadam", "to one bit", 'use "AdamW"'),
        ("optimizer.type", "OneBitLamb", "to one bit", 'use "AdamW"'),
        ("optimizer.type", "FusedLamb", 'must be "AdamW"', 'write "AdamW"'),
        ("optimizer.type", "fused_adam", 'must be "AdamW"', '"Adam"'),
        ("optimizer", REMOVED, "is required", PASTE),
        ("optimizer", None, "block of settings", PASTE),
        ("optimizer", {"type": "FusedAdam"}, "is required", PASTE),
        ("optimizer.lr", 0.001, "no setting here", "did you mean optimizer.params.lr?"),
        ("optimizer.params", {"lr": 0.001, "adam_w_mode": False}, "decoupled", "remove it"),
    ],
    "refused": [
        ("prescale_gradients", True, "reduces the gradients itself", "remove it"),
        ("gradient_predivide_factor", 2.0, "gradients itself", "remove it"),
        ("hybrid_engine", ON, "for RLHF", "remove it"),
        ("hybrid_engine", {"enabled": "auto"}, "for RLHF", "remove it"),
        ("elasticity", ON, "removed from DeepSpeed", "train_micro_batch"),
        ("curriculum_learning", ON, "removed from", "remove it"),
        (AC, {"partition_activations": True}, "not cut over tp", "sequence_parallel"),
        (AC, {"cpu_checkpointing": True}, "stay on the device", '"full"'),
        (AC, {"contiguous_memory_optimization": True}, "no buffer", "remove it"),
        (AC, {"granularity": "full"}, "is not used", "set parallel3d.pipeline"),
        (AC, True, "is not used", "set parallel3d.pipeline"),
        ("pipeline", {"stages": 4}, "own pipeline does not run", "set parallel3d.pipeline"),
        ("checkpoint", {"every": 5}, "writes its own files", "set parallel3d.checkpoint"),
        ("zero_optimization", None, "block of settings", "{...}"),
        ("zero_optimization", {"_a": 1}, "is required", "shards nothing"),
        ("parallel3d._why", "x", "no setting", "mesh, plan, pipeline"),
    ],
    "place": [
        ("mesh", {"pp": 2}, "no setting here", "did you mean parallel3d.mesh?"),
        ("train", {"steps": 5}, "no setting here", "did you mean parallel3d.train?"),
        ("lr", 0.001, "no setting here", "did you mean optimizer.params.lr?"),
        ("parallel3d.train_batch_size", 8, "no setting here", "outside the block"),
        ("parallel3d.model", LLAMA | {"embd_pdrop": 0.1}, 'of family "gpt" alone', "has: from_"),
        ("parallel3d.model.rope_theta", 10000.0, 'of family "llama" alone', "this block has"),
    ],
    "name": [
        (NAME, "..", "no folder of its own", "run-1"),
        (NAME, "-rf", "begins as an option", "letter or a digit"),
        (NAME, "a\nb", "U+000A", "write it without"),
        (NAME, "a\0b", "U+0000", "write it without"),
        (NAME, "x" * 300, "300 characters", "at most 100"),
        ("parallel3d.run.directory", "a\0b", "U+0000", "write it without"),
    ],
    "length": [
        (f"{LR}.warmup_steps", 1.5, "must be an integer", "whole number"),
        (LR, {"type": "wsd", "warmup_steps": 20, "decay_steps": 12}, "longer than", "10 or less"),
    ],
}  # fmt: skip
# words on the command line of the default config
WORDS = [
    ("--mesh.ppp 2", "parallel3d.mesh.ppp = 2", "no setting", 'nearest one is "pp"'),
    ("--mseh.pp 2", 'mseh = {"pp": 2}', "no setting here", "did you mean parallel3d.mesh?"),
    ("--MESH.pp 2", 'MESH = {"pp": 2}', "no setting here", "did you mean parallel3d.mesh?"),
    ("--mesh 2x2", 'parallel3d.mesh = "2x2"', "block of settings", "{...}"),
    ("--mesh.pp.x 2", "--mesh.pp.x: 'pp' holds 1", "which has no settings", ""),
    ("--mesh..pp 2", "--mesh..pp", "has a dot too many", "--dotted.path value"),
    ("--mesh.pp", "--mesh.pp", "has no value", "write --mesh.pp value"),
    ("mesh.pp 2", "'mesh.pp'", "sets nothing", "--dotted.path value"),
    ("-mesh.pp 2", "'-mesh.pp'", "sets nothing", "--dotted.path value"),
    ("--model.hidden_size big", 'hidden_size = "big"', "must be an integer", "whole number"),
    ("--model.hiden_size 8", "parallel3d.model.hiden_size = 8", "no setting", '"hidden_size"'),
    ("--run.name ..", 'parallel3d.run.name = ".."', "no folder of its own", "run-1"),
    ("--run.name -rf", 'parallel3d.run.name = "-rf"', "begins as an option", "a letter"),
    ("--run.trackers wandb", f'{TRACKERS} = "wandb"', "must be a list", "[...]"),
    ('--run.trackers ["x"]', f'{TRACKERS}.0 = "x"', "must be", KNOWN),
    ("--run x", 'parallel3d.run = "x"', "block of settings", "{...}"),
    ("--checkpoint.every -1", "parallel3d.checkpoint.every = -1", "at least 0", "0 or more"),
    ("--checkpoint.evry 1", "parallel3d.checkpoint.evry = 1", "no setting", '"every"'),
    ("--checkpoint.writer x", 'checkpoint = {"writer": "x"}', "own files", "set parallel3d.che"),
    ("--pipeline.schedule 1f1b", '.schedule = "1f1b"', "names no file", "one_f_one_b"),
    ("--pipeline.partition 1", 'pipeline = {"partition": 1}', "does not run", "set parallel3d.pip"),
    ("--train.steps 0", "parallel3d.train.steps = 0", "greater than 0", "raise it"),
    ("--train.stpes 6", "parallel3d.train.stpes = 6", "no setting", '"steps"'),
    ("--steps 6", "steps = 6", "no setting here", "did you mean parallel3d.train.steps?"),
    ("--wandb true", "wandb = true", "block of settings", "{...}"),
    ("--tensorboard.enabled yes", 'tensorboard.enabled = "yes"', "true or false", SWITCH),
]  # fmt: skip


CASES = [case for cases in FILES.values() for case in cases]


def place_of(path, value, message):
    """Where the problem is said to be: the setting, or the last one in the block."""
    inside = next(reversed(value)) if isinstance(value, dict) and value else ""
    if isinstance(value, list):
        inside = next((n for n, item in enumerate(value) if item != "csv"), "")
    if inside != "" and f"{path}.{inside} = " in message:
        path, value = f"{path}.{inside}", value[inside]
    if value is REMOVED or f"{path}.params: is required" in message or f"{path}.stage: " in message:
        return path
    shown = json.dumps(value)
    return f"{path} = {shown if len(shown) <= 80 else shown[:76]}"


def check(message, place, rule, remedy):
    assert "Traceback" not in message
    lines = message.splitlines()
    assert len(lines) <= 2  # one problem, below the line that counts them
    _, found, after = lines[-1].partition(place)
    assert found and rule in after and remedy in after, lines[-1]
    if len(lines) == 2:
        assert "1 problem in " in lines[0]


@pytest.mark.parametrize(("path", "value", "rule", "remedy"), CASES)
def test_a_bad_file_has_one_message(path, value, rule, remedy):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw(**{"parallel3d.mesh.dp": 1, path: value}))
    message = str(caught.value)
    check(message, place_of(path, value, message), rule, remedy)


@pytest.mark.parametrize(("words", "place", "rule", "remedy"), WORDS)
def test_bad_words_on_the_command_line_have_one_message(words, place, rule, remedy):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_json("ds.json", words.split())
    check(str(caught.value), place, rule, remedy)


def test_there_are_enough():
    assert len(CASES) + len(WORDS) >= 90
    assert all(len(FILES[kind]) >= 10 for kind in ("monitor", "trackers", "optimizer", "refused"))


@pytest.mark.parametrize("case", CASES[::7])
def test_a_command_ends_with_2_and_the_message_alone(case, tmp_path, monkeypatch, capsys):
    path, value, *said = case
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(raw(**{path: value})))
    monkeypatch.setattr("sys.argv", ["plan.py", "--config", str(file)])
    assert plan.main() == plan.BAD_INPUT == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 2
    check(captured.err, place_of(path, value, captured.err), *said)


def test_what_is_off_may_hold_anything():
    """Of what is not supported, too; and what logs refuses nothing that DeepSpeed would take."""
    off = {"enabled": False, "whatever": [1, {"x": None}]}
    names = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger")
    names += ("hybrid_engine", "elasticity", "autotuning", "curriculum_learning", "amp", "nebula")
    assert RunConfig.from_dict(raw(**dict.fromkeys(names, off))) == RunConfig.from_dict(raw())
