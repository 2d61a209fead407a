"""A wrong bit in a step is named: its rank, layer and microbatch, also where no copy exists."""

import json
import re

import pytest
import torch

from parallel3d.base.section import Problems
from parallel3d.config import RunConfig
from parallel3d.extras.guard import recomputation as module
from parallel3d.extras.guard.recomputation import Recomputation
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Trainer
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start_all
from tests.train.wrong_bits import (
    KINDS,
    MESHES,
    STAGES,
    Planted,
    campaign,
    case_of,
    take_step,
)

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]


def check_campaign(mesh, zero_stage, faults, share=1.0, **options):
    """At least this share of the faults is named, and no clean step is called wrong."""
    results, alarms = campaign(mesh, zero_stage, faults, **options)
    assert not alarms, alarms
    missed = [row for row in results if row[2] == "missed"]
    above_noise = [row for row in results if row[2] != "noise"]
    assert len(above_noise) > len(results) / 2
    assert len(missed) <= (1 - share) * len(above_noise), missed


@pytest.mark.parametrize(
    "kinds",
    [("gather", "optimizer"), pytest.param(KINDS, marks=pytest.mark.slow)],
    ids=["few", "all"],  # wrong forwards are below by default
)
def test_each_kind_of_fault_is_named_under_zero3(kinds):
    model = {"num_hidden_layers": 1}
    check_campaign((1, 2, 1), 3, faults=1, clean=1, seed=3, kinds=kinds, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("zero_stage", STAGES)
def test_faults_are_named(mesh, zero_stage):
    check_campaign(mesh, zero_stage, faults=9, share=0.95, clean=10, seed=1)


LLAMA = {"family": "llama", "num_key_value_heads": 2}
MOE = {"family": "moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = [
    ((2, 1, 1), {"model": LLAMA, "tied": False}),  # sums of three gradients, whose order counts
    ((1, 2, 1), {"model": MOE, "tied": False}),  # side losses, and indices of experts
    ((2, 2, 1), {"checkpointing": "full", "schedule": "one_f_one_b"}),
    ((2, 1, 2), {"sequence_parallel": True, "tied": False, "checkpointing": "selective"}),
    ((2, 1, 1), {"schedule": "interleaved", "stages_per_rank": 2, "precision": "bf16"}),
    ((1, 2, 1), {"precision": "fp16", "changes": {"fp16.initial_scale_power": 32}}),  # overflows
    ((2, 1, 1), {"schedule": "zero_bubble"}),
    ((1, 2, 1), {"reduction": "per_microbatch"}),
    ((1, 2, 1), {"weights": "per_step"}),
    ((1, 2, 1), {"offload": "cpu"}),
    ((1, 1, 1), {"model": {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}}),
]


def clean_steps(rank, case):
    trainer = Trainer(case)
    recomputation = Recomputation(trainer.config, trainer.mesh, trainer.parts)
    messages = [take_step(trainer, recomputation, step) for step in range(3)]
    trainer.close()
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "settings"), OTHERS)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_clean_steps_with_other_settings(mesh, settings, zero_stage):
    if settings.get("schedule") == "zero_bubble" and zero_stage == 3:
        settings = settings | {"reduction": "per_step"}
    case = case_of(mesh, zero_stage, **settings)
    assert run_locally(clean_steps, case.world_size, case) == [[""] * 3] * case.world_size


def spoil_the_checker(rank, case):
    """Rank 1's own recomputation is wrong once; and then rank 0's step, which rank 1 checks."""
    trainer = Trainer(case)
    recomputation = Recomputation(trainer.config, trainer.mesh, trainer.parts)
    forward = module._forward
    done = []

    def spoiled(layer, x, inputs, is_last):
        output, side = forward(layer, x, inputs, is_last)
        if rank == 1 and not done:
            done.append(True)
            output.data.view(-1)[0] *= 1.5
        return output, side

    module._forward = spoiled
    messages = [take_step(trainer, recomputation, 0)]
    module._forward = forward
    planted = Planted(trainer, recomputation, "forward", 22, 0) if rank == 0 else None
    messages.append(take_step(trainer, recomputation, 1, planted))
    trainer.close()
    return messages


def test_third_computation_decides_which_rank_was_wrong():
    for messages in run_locally(spoil_the_checker, 2, case_of((2, 1, 1), 1)):
        assert [re.findall(r"rank (\d) on", text) for text in messages] == [["1"], ["0"]], messages


STEPS = 3


def spoil_a_layer(rank, culprit, times):
    """From step 3 on, the culprit's first layer is wrong so many times."""
    left = [times]
    build = Recomputation.__init__

    def built(self, config, mesh, parts):
        build(self, config, mesh, parts)
        (layers,) = parts.stages.module.layers.values()

        def spoil(layer, args, output):
            if rank == culprit and left[0] and parts.stages.key.step == 2:
                left[0] -= 1
                output.data.view(torch.int32).view(-1)[5] ^= 1 << 20

        layers[0].register_forward_hook(spoil)

    Recomputation.__init__ = built


def run_with(tmp_path, name, fault, **check_bits):
    """Start a clean run and one with a fault: the latter's ends, both folders, its events."""
    raw = prepared_config(tmp_path)
    own = {"train.steps": STEPS, "checkpoint.asynchronous": False}
    own = {f"parallel3d.{key}": value for key, value in own.items()}
    raw = changed(raw, own | {"zero_optimization.stage": 1})
    clean = changed(raw, {"parallel3d.run.name": "clean"})
    own = {"parallel3d.run.name": name, "parallel3d.train.check_bits": check_bits}
    raw = changed(raw, own)
    _, ranks = start_all([(clean,), (raw, *fault)], (2, 1, 1))
    events = map(json.loads, (folder_of(raw) / "events.jsonl").read_text().splitlines())
    events = [e for e in events if e["event"] in ("wrong_bits", "rewind")]
    return ranks, folder_of(raw), folder_of(clean), events


def test_rewound_run_ends_with_bits_of_clean_run(tmp_path):
    """A check that differs leaves no trace, nor do those that do not."""
    ranks, folder, clean, events = run_with(
        tmp_path, "spoiled", (spoil_a_layer, 1, 1), recompute_every=1, on_wrong="rewind"
    )
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert [(e["event"], e["step"]) for e in events] == [("wrong_bits", 3), ("rewind", 3)]
    assert events[1]["to"] == 2
    expected = r"after step 3 rank 1 on \S+ computed wrong bits in stage 1, layer blocks.1, "
    assert re.match(expected, events[0]["reason"]), events
    names = sorted(
        path.name for path in (clean / f"checkpoints/step-{STEPS}").glob("*.safetensors")
    )
    assert names
    for name in names:
        ours, theirs = (f / f"checkpoints/step-{STEPS}" / name for f in (folder, clean))
        assert ours.read_bytes() == theirs.read_bytes(), name


REJECTED = ["step-1.rejected", "step-2.rejected"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "expected", "kept"),
    [
        (1, ["wrong_bits", "rewind", "wrong_bits"], ["step-1", "step-2"]),
        (3, ["wrong_bits"], REJECTED),  # no check vouches for any of them
    ],
)
def test_lasting_fault_stops_run(tmp_path, every, expected, kept):
    ranks, folder, _, events = run_with(
        tmp_path, "lasting", (spoil_a_layer, 0, 99), recompute_every=every, on_wrong="rewind"
    )
    assert all("after step 3 rank 0 on" in rank.error for rank in ranks), ranks
    assert all(("no checkpoint before it" in rank.error) == (every == 3) for rank in ranks)
    assert [e["event"] for e in events] == expected
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == kept


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        (
            {"mesh": {"cp": 2, "dp": 1}},
            "recompute_every = 1: needs layers that only tp ranks share",
        ),
        ({"train": {"compile": "block"}}, "recompute_every = 1: needs the values inside a block"),
        ({"checkpoint": {"every": 0}}, 'on_wrong = "rewind": needs checkpoints to rewind to'),
    ],
)
def test_settings_that_cannot_be_checked_are_refused(changes, place):
    raw = json.loads(case_of((1, 1, 1), 1).config.model_dump_json(exclude_unset=True))
    block = raw["parallel3d"]
    block["train"]["check_bits"] = {"recompute_every": 1, "on_wrong": "rewind"}
    for section, values in changes.items():
        block[section] = block.get(section, {}) | values
    with pytest.raises(Problems, match=re.escape(place)):
        RunConfig.from_dict(raw)
