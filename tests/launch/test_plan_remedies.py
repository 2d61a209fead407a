"""Remedies of the planner and of its command line, each applied as it is written."""

import importlib.util
import json
import re
import shlex
from copy import deepcopy

import pytest

from launch import draw, plan
from parallel3d.config import RunConfig
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.vocabulary import with_vocabulary
from tests.launch.test_plan_bad import DESCRIBED
from tests.remedies import refused

pytestmark = pytest.mark.pure

SMALL = ("--config", "gpt2-124m.json", "--rows", "1")
FIXED = ("--fix", "pp=1", "tp=1", "schedule=gpipe", "zero_stage=1", "micro_batch=4")
ON_ONE = (*SMALL, "--hardware", "h100", "--devices", "1", *FIXED)


@pytest.fixture
def planned(called):
    """Calls `plan`; gives its exit code and all that it prints, in one line."""

    def run(*words):
        code, out, err = called(plan.main, "plan.py", *words)
        return code, " ".join(f"{out} {err}".split())

    return run


# Words of a command line: what is wrong, what the message says, and what it asks for.
WORDS = [
    (("--devices", "two"), "use 1 or more", ("--devices", "1")),
    (("--devices", "0"), "use 1 or more", ("--devices", "1")),
    (("--devices", "99999999"), "use 10,000,000 or less", ("--devices", "8")),
    (("--devices",), "write --devices VALUE", ("--devices", "1")),
    (("--json=yes",), "takes no value; write --json", ("--json",)),
    (("--rows", "0"), "use 1 or more", ("--rows", "1")),
    (("--explain", "9"), "must be at most 1", ("--explain", "1")),
    (("--explain", "1", "--svg", "/"), "name a file in it", ("--explain", "1", "--svg", "a.svg")),
    (("--fix", "pp"), "write NAME=VALUE", ("--fix", "pp=1")),
    (("--fix", "zero_stage=9"), "must be at most 3", ("--fix", "zero_stage=1")),
    (("--fix", "schedule=zz"), "choose from breadth_first, gpipe", ("--fix", "schedule=gpipe")),
    (("--fix", "schedul=gpipe"), 'the nearest one is "schedule"', ("--fix", "schedule=gpipe")),
    (("train_batch_size", "512"), "write --dotted.path value", ("--train_batch_size", "512")),
    (("--config", "no.json"), "or one of those in configs/", ("--config", "gpt2-124m.json")),
    (("--config", "gpt2-124m.json", "--deepspeed", "no.json"), "keep one of them", ()),
    (
        ("--parallel3d.model.num_hidden_layers", "1000000000"),
        "use 2,000 or less",
        ("--parallel3d.model.num_hidden_layers", "6"),
    ),
]


@pytest.mark.parametrize(("wrong", "remedy", "right"), WORDS, ids=range(len(WORDS)))
def test_words_are_written_as_the_message_says(
    planned, tmp_path, monkeypatch, wrong, remedy, right
):
    monkeypatch.chdir(tmp_path)
    base = ON_ONE if wrong[0] != "--fix" else ON_ONE[: -len(FIXED)]
    if "--config" in wrong:
        base = base[2:]
    code, text = planned(*wrong, *base)
    assert code == 2 and remedy in text, text
    if not right:
        right = wrong[:2]
    if right[0] == "--devices":
        base = (*base[: base.index("--devices")], *FIXED)
    code, text = planned(*right, *base)
    assert code == 0, text


def test_validation_is_a_command_of_a_checkout(planned):
    _, text = planned("--validate", "a.csv")
    named = re.search(r"run `python -m ([\w.]+) FILE`", text)
    assert importlib.util.find_spec(named[1])


def test_forwards_of_a_drawing_are_fewer(called):
    code, _, err = called(draw.main, "draw.py", "--pp", "4", "--microbatches", "99999")
    assert code == 2 and "lower --microbatches, --pp or --stages-per-rank" in err
    assert called(draw.main, "draw.py", "--pp", "4", "--microbatches", "8")[0] == 0


# What does not fit


LARGE = ("--config", "llama-8b.json", "--hardware", "rtx4090", "--rows", "1")
NO_OFFLOAD = ("--fix", "offload_optimizer=none", "offload_param=none")


@pytest.mark.slow  # three searches of two seconds
def test_more_devices_or_memory_fit(planned):
    mesh = ("--parallel3d.mesh", "plan", "--train_batch_size", "64")
    code, text = planned(*LARGE, "--devices", "2", *NO_OFFLOAD, *mesh)
    assert code == 1 and "use fewer fixed choices" in text and "more devices, or" in text, text
    assert planned(*LARGE, "--devices", "32", *NO_OFFLOAD, *mesh)[0] == 0
    larger = ("--config", "llama-8b.json", "--hardware", "b200", "--rows", "1", "--devices", "2")
    assert planned(*larger, *NO_OFFLOAD, *mesh)[0] == 0


@pytest.mark.slow  # two searches of a second
def test_host_is_added_where_offload_was_not_searched(planned, tmp_path):
    own = deepcopy(DESCRIBED) | {"memory_bytes": 24e9, "name": "mine", "aliases": []}
    host = own.pop("host")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(own))
    words = ("--config", "llama-8b.json", "--hardware", file, "--devices", "4", "--rows", "1")
    words += ("--parallel3d.mesh", "plan", "--train_batch_size", "64", "--fix", "pp=1")
    code, text = planned(*words)
    assert code == 1 and 'the hardware file has no "host"' in text and "add it" in text
    file.write_text(json.dumps(own | {"host": host}))
    code, text = planned(*words)
    assert code == 0 and "adam" not in text.lower().partition("offload was not")[2], text


def test_fewer_choices_are_fixed_where_none_on_the_mesh_fits(planned):
    words = ("--config", "gpt2-1.5b.json", "--hardware", "rtx4090", "--devices", "2", "--rows", "1")
    fixed = ("--fix", "pp=1", "dp=2", "schedule=one_f_one_b", "offload_optimizer=none")
    code, text = planned(*words, "--explain", "1", *fixed, "zero_stage=0", "micro_batch=8")
    assert "none on this mesh fits; use fewer fixed choices, another mesh or more" in text, text
    code, text = planned(*words, *fixed, "zero_stage=3", "micro_batch=1")
    assert code == 0, text


def test_model_that_no_rank_holds_is_smaller_or_on_more_ranks():
    words = ["--parallel3d.mesh", "plan", "--train_batch_size", "64"]
    config = RunConfig.from_json("llama-70b.json", words)
    room = 2**36
    with refused("use fewer, or more ranks"):
        refuse_impossible(config, 4, room)
    fewer = ["--parallel3d.model.num_hidden_layers", "2"]
    smaller = RunConfig.from_json("llama-70b.json", [*words, *fewer])
    for sound, ranks in (config, 64), (smaller, 4):
        assert refuse_impossible(sound, ranks, room) is None  # nothing is raised


def test_devices_are_a_number_that_the_model_divides(planned):
    words = (*SMALL, "--hardware", "h100", "--train_batch_size", "512")
    code, text = planned(*words, "--devices", "53")
    assert code == 2 and "use another number of devices or another train_batch_size" in text
    assert planned(*words, "--devices", "1", *FIXED)[0] == 0
    code, text = planned(*words, "--devices", "2", "--fix", "pp=1", "tp=2", "dp=2")
    assert code == 2 and "fix fewer choices" in text, text
    assert planned(*words, "--devices", "2", "--fix", "pp=1", "tp=2", "schedule=gpipe")[0] == 0


# Figures and sizes


def test_precision_is_one_that_the_device_has(planned):
    words = (*SMALL, "--hardware", "V100-SXM2-32GB", "--devices", "1", *FIXED)
    code, text = planned(*words, "--bf16.enabled", "true")
    assert code == 2, text
    named = re.search(r"use (--bf16\.enabled false --fp16\.enabled true)", text)
    code, text = planned(*words, *shlex.split(named[1]))
    assert code == 0, text


MISSING = [
    ("memory_bandwidth", "1", (), "its memory_bandwidth is not known; add it to its file", None),
    ("link", "2", (), "or plan for 1 device", ("--devices", "1")),
    ("network", "16", (), "or plan for the devices of one node", ("--devices", "8")),
]


@pytest.mark.parametrize(("key", "devices", "more", "remedy", "other"), MISSING)
def test_figure_is_added_or_not_needed(planned, tmp_path, key, devices, more, remedy, other):
    own = deepcopy(DESCRIBED) | {"name": "mine", "aliases": []}
    figure = own.pop(key)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(own))
    words = (*SMALL, "--hardware", file, *FIXED, *more)
    code, text = planned(*words, "--devices", devices)
    assert code == 2 and remedy in text, text
    if other:
        assert planned(*words, *other)[0] == 0
    else:
        assert ", or plan" not in text
    file.write_text(json.dumps(own | {key: figure}))
    assert planned(*words, "--devices", devices)[0] == 0


def test_peak_of_the_precision_is_added_or_another_is_used(planned, tmp_path):
    own = deepcopy(DESCRIBED) | {"name": "mine", "aliases": []}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(own))
    words = (*SMALL, "--hardware", file, "--devices", "1", *FIXED)
    fp32 = ("--bf16.enabled", "false")
    code, text = planned(*words, *fp32)
    assert code == 2 and "use one of bf16, or add peak_flops" in text, text
    assert planned(*words, "--bf16.enabled", "true")[0] == 0
    own["peak_flops"]["fp32"] = 6.7e13
    file.write_text(json.dumps(own))
    assert planned(*words, *fp32)[0] == 0


def test_size_off_the_tiles_is_the_one_that_is_named(planned):
    size = "--parallel3d.model.intermediate_size"
    code, text = planned(*ON_ONE, size, "3070")
    named = re.search(
        r"intermediate_size = 3070 is not a multiple of \d+, as tensor cores need: .*?; use (\d+)",
        text,
    )
    assert code == 0 and named, text
    code, text = planned(*ON_ONE, size, named[1])
    assert code == 0 and "intermediate_size" not in text


def test_size_of_an_unknown_tokenizer_is_set():
    words = ["--data.tokenizer", "nobody/knows", "--data.source", "jsonl", "--data.paths", "a"]
    with refused("set the tokenizer's number of tokens"):
        with_vocabulary(RunConfig.from_json("ds.json", words))
    assert with_vocabulary(RunConfig.from_json("ds.json", [*words, "--model.vocab_size", "300"]))
