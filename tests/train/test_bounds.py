"""Every number of a config at its bounds and far outside: a plan or one message, never a traceback.

The slow part has more values, on configs whose plans read other settings.
"""

import json
import re
from math import inf, nan

import pytest

from parallel3d.base.errors import Parallel3DError
from parallel3d.config import RunConfig, settings
from parallel3d.mesh.launch import Launch
from parallel3d.train.dry_run import dry_run
from tests.config.configs import LLAMA, raw

pytestmark = pytest.mark.gloo

ONE_NUMBER = re.compile("(integer|number)( |$)")
NUMBERS = {
    setting.path: setting.only
    for setting in settings()
    if ONE_NUMBER.match(setting.type) and not re.search(r"\[\]|NAME", setting.path)
}
NVME = {"device": "nvme", "nvme_path": "/tmp"}
OFFLOADED = {"device": "cpu"}
BASES = {
    "host": {"stage": 3, "offload_optimizer": OFFLOADED, "offload_param": OFFLOADED},
    "nvme": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME},
    "device": {"stage": 1},
}
# DeepSpeed's switched blocks and families whose numbers exist only in them.
PLACES = {
    "comet": {"enabled": True},
    "flops_profiler": {"enabled": True},
    "parallel3d.data.fim": {},
    "parallel3d.train.evaluate_tasks": {"tasks": ["mine.yaml"]},
    "parallel3d.train.profile": {"start": 1},
}
DEFAULT = (-1, 0.5, nan, True, 1e300)
OUTSIDE = (*DEFAULT, inf, -inf, "1", "1e9", 10**30)


def config_with(path, value, base):
    """The object of a file with a number, and what it needs beside it."""
    changes = {
        "bf16": {"enabled": not path.startswith("fp16.")},
        "parallel3d.mesh": {"dp": 2, "tp": 2},
        "parallel3d.run.hardware": "H100-SXM5-80GB",
        "zero_optimization": dict(BASES[base]),
    }
    kind, _, names = NUMBERS[path].partition(" ")
    choice = json.loads(names.split(",")[0]) if names else ""
    if kind == "family":
        small = {"family": choice, "hidden_size": 256, "num_hidden_layers": 4}
        changes["parallel3d.model"] = small | {"num_attention_heads": 16}
    if "rope_scaling" in path:
        scaling = {"rope_type": "yarn", "factor": 2.0}
        changes["parallel3d.model"] = LLAMA | {"rope_scaling": scaling}
    if path.startswith("scheduler."):
        params = {"warmup_num_steps": 5}
        if choice not in ("", "WarmupLR"):
            params["total_num_steps"] = 9
        changes["scheduler"] = {"type": choice or "WarmupLR", "params": params}
    elif kind == "type":
        changes["optimizer"] = {"type": choice, "params": {"lr": 1e-3}}
    if path.startswith("fp16."):
        changes["fp16"] = {"enabled": True}
    if path in ("parallel3d.train.epochs", "parallel3d.train.max_tokens"):
        changes["parallel3d.train"] = {}
    for block, content in PLACES.items():
        if path.startswith(f"{block}."):
            changes[block] = dict(content)
    return raw(**json.loads(json.dumps(changes)) | {path: value})


def outcome_of(path, value, base="host"):
    """The message of a dry run that is refused; "planned" if it is not. No other error is right."""
    try:
        config = RunConfig.from_dict(config_with(path, value, base))
        dry_run(config, Launch(rank=1, world_size=2, local_rank=1), devices=0, as_json=False)
    except Parallel3DError as error:
        return str(error)
    return "planned"


def is_answer(outcome):
    """A plan, or a message that says more than where the settings are listed."""
    return outcome == "planned" or (len(outcome) > 20 and "see --help" not in outcome)


# A third of the numbers by default: most share their types and rules with a neighbour.
SOME = [*NUMBERS][::3]


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p in SOME else pytest.mark.slow) for p in NUMBERS]
)
def test_number_at_its_least_ends_in_a_plan_or_a_message(path):
    assert is_answer(outcome_of(path, 0))


@pytest.mark.parametrize("values", [DEFAULT, pytest.param(OUTSIDE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NUMBERS)
def test_number_outside_is_refused_or_read(path, values):
    for value in values:
        try:
            config = RunConfig.from_dict(config_with(path, value, "host"))
        except Parallel3DError as error:
            assert path.split(".")[-1] in str(error), (value, error)
        else:
            json.dumps(config.to_dict(), allow_nan=False)  # raises for a number that is not finite


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("path", NUMBERS)
def test_number_anywhere_ends_in_a_plan_or_a_message(path, base):
    for value in (0, 1, 2, 10**9, 10**18, 2**63, 1e9, 1e-300, *OUTSIDE):
        assert is_answer(outcome_of(path, value, base)), value


def test_sub_groups_of_no_elements_mean_no_limit():
    zero = {"stage": 3, "sub_group_size": 0, "offload_optimizer": OFFLOADED}
    config = RunConfig.from_dict(raw(zero_optimization=zero))
    assert config.zero_optimization.sub_group_size == 10**12
    assert any("sub_group_size: 0 means no limit" in note for note in config.notes)
    assert RunConfig.from_dict(config.to_dict()).zero_optimization == config.zero_optimization


def mixture(weight):
    """The data of a mixture with this weight."""
    part = {"source": "text", "paths": ["a"], "weight": weight}
    return {"source": "mixture", "mixture": [part], "sequence_length": 128}


# Numbers in texts, lists and tables.
FAR = f"{'9' * 400}T tokens"
LONG = "9" * 6000
DATA = "parallel3d.data"
PARAM = "zero_optimization.offload_param"
NESTED = [
    ("parallel3d.train.batch_schedule", [[0, 8], [FAR, 16]], "at most 1e30"),
    (DATA, mixture([[0, 1], [FAR, 1]]), "at most 1e30"),
    (DATA, mixture([[0, 1], [f"{LONG} tokens", 1]]), "must be an integer"),
    (DATA, mixture(1e308), "at most"),
    ("parallel3d.checkpoint.resume", LONG, "a step"),
    ("parallel3d.checkpoint.resume", -1, "a step"),
    ("parallel3d.pipeline.activation_checkpointing", f"full:{LONG}", "no kind of recomputation"),
    (PARAM, NVME | {"buffer_count": 0}, "buffer_count = 0: leaves no buffer"),
    (PARAM, NVME | {"buffer_size": 0}, "buffer_size = 0: leaves no buffer"),
]


@pytest.mark.parametrize(("path", "value", "rule"), NESTED)
def test_number_that_nothing_can_be_counted_with_is_refused(path, value, rule):
    with pytest.raises(Parallel3DError, match=rule):
        RunConfig.from_dict(raw(**{"zero_optimization.stage": 3, path: value}))
