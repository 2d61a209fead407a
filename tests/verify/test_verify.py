"""`verify` keeps the settings that change numbers, sees a planted fault, and reports it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import verify as launch_verify
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.models import layers
from parallel3d.verify import reference, table
from parallel3d.verify.local_ranks import RanksHung
from parallel3d.verify.measure import ReferenceErrors
from parallel3d.verify.shrink import (
    MESHES,
    MICROBATCHES,
    Extent,
    parse_meshes,
    shrink,
    why_not,
)
from parallel3d.verify.table import features
from tests.verify.configs import MODELS, config_of

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
KEYS_OF_A_CASE = {
    "mesh",
    "schedule",
    "zero_stage",
    "offload",
    "passed",
    "loss_error",
    "grad_norm_error",
    "weight_error",
    "beyond",
    "resumed_from",
    "sequence_length",
    "precision",
    "error",
}
SETTINGS = {
    "zero": 3,
    "offload": "cpu+cpu",
    "schedule": "interleaved",
    "stages_per_rank": 2,
    "reduction": "per_microbatch",
    "checkpointing": "selective",
    "sequence_parallel": True,
    "isolate": True,
}


@pytest.mark.parametrize("model", MODELS)
def test_only_sizes_shrink(model):
    config = RunConfig.from_dict(config_of(model=model, precision="bf16", **SETTINGS))
    small = shrink(config, MESHES)
    for mesh, made in small.items():
        assert made.mesh.sizes == mesh
        assert made.mesh.sequence_parallel and made.data.isolate_documents
        assert made.pipeline == config.pipeline
        assert made.bf16 == config.bf16
        zero = made.zero_optimization
        before = config.zero_optimization
        assert (zero.stage, zero.offload_param) == (before.stage, before.offload_param)
        assert zero.offload_optimizer == before.offload_optimizer
        for name in ("family", "tie_word_embeddings", "attention_bias", "qk_norm", "mlp_bias"):
            assert getattr(made.model, name, None) == getattr(config.model, name, None)
        assert made.model.num_hidden_layers + 2 >= 8  # every stage of pp=4 has a layer
        assert sum(layer.num_params for layer in layers(made.model)) < 250_000
    first, *others = [(m.model, m.global_batch_size, m.train) for m in small.values()]
    assert all(other == first for other in others), "one model and one data for every mesh"


def test_microbatches_that_depend_on_the_mesh():
    """Without gradient_accumulation_steps their number follows from dp."""
    raw = config_of(schedule="one_f_one_b")
    raw |= {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}
    del raw["gradient_accumulation_steps"]
    config = RunConfig.from_dict(raw)
    assert all(why_not(config, mesh) is None for mesh in MESHES)
    small = shrink(config, MESHES)
    assert {config.num_microbatches for config in small.values()} == {MICROBATCHES}


def test_each_test_that_is_named_is_there():
    """For a config that has all that a config can have."""
    raw = config_of(precision="fp16", **SETTINGS)
    raw["gradient_clipping"] = 1.0
    raw["scheduler"] = {"type": "WarmupLR", "params": {}}
    raw["parallel3d"]["model"] |= {"resid_pdrop": 0.1}
    raw["parallel3d"]["train"] |= {"on_nonfinite": "skip"}
    raw["parallel3d"]["train"]["check_bits"] = {"every": 1}
    raw["parallel3d"]["checkpoint"] = {"in_memory_every": 1}
    config = RunConfig.from_dict(raw)
    small = shrink(config, MESHES[:1])[MESHES[0]]
    listed = features(config, small)
    assert {feature.state for feature in listed} == {"proved", "tested elsewhere", "not proved"}
    for feature in listed:
        assert (feature.state == "tested elsewhere") == bool(feature.test), feature
        assert not feature.test or (ROOT / feature.test).is_file(), feature


def ratio(model):
    return model.num_attention_heads // model.num_key_value_heads


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
def test_ratio_of_heads_to_key_value_heads_is_kept(kv_heads):
    raw = config_of(model="llama")
    raw["parallel3d"]["model"]["num_key_value_heads"] = kv_heads
    config = RunConfig.from_dict(raw)
    for made in shrink(config, MESHES).values():
        assert ratio(made.model) == ratio(config.model)


def test_meshes_are_read_or_refused():
    assert parse_meshes("1x1x1, 2x1x4") == (MeshSizes(), MeshSizes(pp=2, tp=4))
    assert parse_meshes("1x2x4x1") == (MeshSizes(dp=2, cp=4),)
    for text in ("2x2", "0x1x1", "axbxc", ""):
        with pytest.raises(ConfigError, match="must be pp x dp x tp"):
            parse_meshes(text)


def as_a_process(arguments, monkeypatch, capsys):
    run = [sys.executable, "launch/verify.py", *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def in_this_process(arguments, monkeypatch, capsys):
    """With the ranks forked from where torch is loaded already, and few words in the long case."""
    monkeypatch.setattr(reference, "LONG", reference.LONG._replace(vocab_size=300))
    monkeypatch.setattr(sys, "argv", ["verify", *arguments])
    return (launch_verify.main(), *capsys.readouterr())


FEW_MICROBATCHES = ["--gradient_accumulation_steps", "2"]


@pytest.mark.parametrize(
    "command", [in_this_process, pytest.param(as_a_process, marks=pytest.mark.slow)]
)
def test_command_reports_cases_and_features(command, monkeypatch, capsys):
    asked = ["--config", "ds.json", "--meshes", "1x1x1,2x1x1", "--json", *FEW_MICROBATCHES]
    code, printed, errors = command(asked, monkeypatch, capsys)
    assert code == 0, errors
    report = json.loads(printed)
    assert report["passed"] and report["tolerance"] == 1e-5
    assert [(case["mesh"], case["resumed_from"]) for case in report["cases"]] == [
        ("1x1x1", None),
        ("2x1x1", None),
        ("2x1x1", "1x1x1"),
        ("1x1x1", None),
    ]
    assert [case["sequence_length"] for case in report["cases"]] == [16, 16, 16, 320]
    for case in report["cases"]:
        assert case.keys() == KEYS_OF_A_CASE
        assert case["beyond"] == {}
        assert 0 < case["weight_error"] < 1e-5
    assert "2x1x1" in errors
    states = {feature["name"]: feature["state"] for feature in report["features"]}
    assert states["train.lr_schedule.type = cosine"] == "proved"
    assert states["held-out losses"] == states["saves while training goes on"] == "proved"
    assert states["bits per byte"] == "tested elsewhere"
    assert "not proved" in states.values() and "not proved: the model" in errors


QUICK = ["--config", "ds.json", "--meshes", "1x1x1", "--json", *FEW_MICROBATCHES]
QUICK += ["--zero_optimization.stage", "1", "--gradient_clipping", "0"]
QUICK += ["--zero_optimization.offload_optimizer.device", "none"]


@pytest.fixture
def quick(monkeypatch):
    """Shorten the long case, and look for no idle settings: the command above has both."""
    monkeypatch.setattr(reference, "LONG", Extent(1, 20, 300, 0.15))
    monkeypatch.setattr(table, "idle_settings", lambda *_: frozenset())


@pytest.mark.usefixtures("quick")
def test_half_precision_is_also_compared_in_fp32(monkeypatch, capsys):
    """As if the resumed and the long case were right, which the command above has."""
    compare = table.checked

    def compare_whole_runs(config, reference, task, counters=None):
        if task.resumes or task is table.LONG_TASK:
            return ReferenceErrors(loss=1e-7, grad_norm=1e-7, weight=1e-7), {}
        return compare(config, reference, task, counters=counters)

    monkeypatch.setattr(table, "checked", compare_whole_runs)
    asked = [*QUICK, "--bf16.enabled", "true"]
    code, printed, errors = in_this_process(asked, monkeypatch, capsys)
    assert code == 0, errors
    cases = [(case["mesh"], case["precision"]) for case in json.loads(printed)["cases"]]
    assert cases[-1] == ("1x1x1", "fp32")
    assert {precision for _, precision in cases[:-1]} == {"bf16"}
    assert errors.count(" fp32 ") == 1
    assert "equal to one process in bf16, within 0." in errors
    assert "equal to one process in fp32, within 1e-05: 1x1x1\n" in errors


@pytest.mark.parametrize(
    ("meshes", "message"),
    [
        ("2x2", "'2x2': must be pp x dp x tp"),
        ("\uff12x1x1", "'\uff12x1x1': must be pp x dp x tp"),
        ("0x1x1", "'0x1x1': must be pp x dp x tp"),
        ("1x1x1,64x64x64", "'64x64x64': needs 262,144 processes"),
    ],
)
def test_meshes_that_cannot_run_are_refused(meshes, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verify", "--config", "ds.json", "--meshes", meshes])
    assert launch_verify.main() == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err


def test_museum_option_names_the_new_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verify", "--museum"])
    with pytest.raises(SystemExit, match="2"):
        launch_verify.main()
    assert "python -m tests.museum" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_difference_ends_with_exit_code_1(monkeypatch, capsys):
    """As if all but the long case had found a gradient norm that is off by a ten-thousandth.

    Real cases see real differences in tests/museum/test_museum.py.
    """

    def compare(config, reference, task, counters=None):
        off = 0.0 if task is table.LONG_TASK else 1e-4
        return ReferenceErrors(loss=1e-7, grad_norm=off, weight=1e-7), {}

    monkeypatch.setattr(table, "checked", compare)
    monkeypatch.setattr(sys, "argv", ["verify", *QUICK])
    assert launch_verify.main() == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["passed"] is False
    assert [case["passed"] for case in report["cases"]] == [False, False, True]
    assert report["cases"][0]["grad_norm_error"] == 1e-4
    assert printed.err.count("DIFFERS (grad_norm)") == 2 and "NOT EQUAL" in printed.err


@pytest.mark.usefixtures("quick")
def test_lost_rank_is_a_failure_and_not_a_difference(monkeypatch, capsys):
    """Its infinite errors were printed as `Infinity`, which is not JSON."""

    def lose_a_rank(*args, **options):
        raise RanksHung("rank 0 of 1 did not end in time")

    monkeypatch.setattr(table, "checked", lose_a_rank)
    monkeypatch.setattr(sys, "argv", ["verify", *QUICK])
    assert launch_verify.main() == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out, parse_constant=pytest.fail)
    assert {case["error"] for case in report["cases"]} == {"rank 0 of 1 did not end in time"}
    assert report["cases"][0]["loss_error"] is None
    assert printed.err.count("FAILED") == 3 and "DIFFERS" not in printed.err
