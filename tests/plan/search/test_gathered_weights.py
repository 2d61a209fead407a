"""For how long ZeRO-3's weights stay gathered, where a config leaves it to the planner."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.plan.memory.peak import fullest, per_rank
from parallel3d.plan.memory.room import gib
from parallel3d.plan.report.plan_rows import as_written, choose_gathers, weights_for
from parallel3d.plan.request import request_of
from parallel3d.plan.search.best_first import search
from parallel3d.plan.setting import Setting, leaves_weights_open
from tests.config.configs import raw
from tests.plan.settings import A100, changed
from tests.plan.toy_cluster import GIB, config, machine

pytestmark = pytest.mark.pure

LEAN = {
    "reduce_bucket_size": 1_000_000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}


def resolved(zero=3, offload="none", **pipeline):
    """On 8 devices, two pipeline ranks of four stages each."""
    raw = config(layers=14).to_dict()
    raw["zero_optimization"] = LEAN | {"stage": zero, "offload_param": {"device": offload}}
    if offload != "none":
        raw["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    raw["train_micro_batch_size_per_gpu"] = 1
    raw["parallel3d"]["mesh"] = {"pp": 2, "dp": 4, "tp": 1}
    raw["parallel3d"]["pipeline"] = {"schedule": "breadth_first", "stages_per_rank": 4} | pipeline
    return type(config()).from_dict(raw).resolve(8)


def needs(given, way):
    setting = changed(Setting.from_config(given), weights=way)
    return fullest(setting, machine()).total


def test_fastest_weights_that_fit_are_chosen():
    given = resolved()
    assert given.pipeline.weights == "auto" and leaves_weights_open(given)
    step, passes, each = (needs(given, way) for way in ("per_step", "per_pass", "per_microbatch"))
    assert step > passes > each
    setting = Setting.from_config(given)
    for memory, way, total in (
        (step, "per_step", step),
        (step - 1, "per_pass", passes),
        (passes, "per_pass", passes),
        (passes - 1, "per_microbatch", each),
        (each - 1, "per_microbatch", each),
    ):
        chosen, note = weights_for(setting, machine(memory))
        assert chosen == way and f"({gib(total)} of " in note


def test_offloaded_parameters_are_not_kept_gathered():
    given = resolved(offload="cpu")
    assert weights_for(Setting.from_config(given), machine())[0] == "per_pass"


def test_choice_is_printed_and_written():
    given = resolved()
    weights, note = weights_for(Setting.from_config(given), machine(80 * GIB))
    total = gib(needs(given, "per_step"))
    assert note == (
        f'parallel3d.pipeline.weights: "auto" is per_step ({total} of 80.0 GiB planned on '
        "the fullest device)"
    )
    chosen, notes = choose_gathers(given, machine(80 * GIB))
    assert (chosen, notes) == ({"weights": weights}, (note,))
    whole = given.with_gathers(chosen, notes)
    assert whole.to_dict()["parallel3d"]["pipeline"]["weights"] == "per_step"
    assert whole.notes == (*given.notes, note) and not leaves_weights_open(whole)


@pytest.mark.parametrize("optimizer", ["none", "cpu"])
def test_fastest_weights_that_fit_the_host_are_chosen_on_cpus(optimizer):
    """Offloaded states take their part of the same memory."""
    raw = resolved().to_dict()
    raw["zero_optimization"]["offload_optimizer"]["device"] = optimizer
    given = type(config()).from_dict(raw).resolve(8)
    setting = Setting.from_config(given)
    step, passes = (
        max(memory.total + memory.host for memory in per_rank(changed(setting, weights=way)))
        for way in ("per_step", "per_pass")
    )
    assert (fullest(setting).host > 0) == (optimizer == "cpu")
    for free_bytes, way in ((step, "per_step"), (step - 1, "per_pass"), (passes, "per_pass")):
        weights, note = weights_for(setting, None, free_bytes)
        assert weights == way and f'"auto" is {way} (' in note, note


def test_least_memory_is_chosen_without_a_machine():
    weights, note = weights_for(Setting.from_config(resolved()), None)
    assert weights == "per_microbatch" == Setting.from_config(resolved()).state.weights
    assert "is not known" in note


def test_choice_is_made_only_for_zero_3_with_auto():
    assert not leaves_weights_open(resolved(zero=1))
    assert not leaves_weights_open(resolved(weights="per_pass"))


LLAMA_13B = {
    "family": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 32000,
}


def llama(sequence_length=1536, accumulation=1, **pipeline):
    """Llama 13B on four devices, with full recomputation."""
    pipeline = {"activation_checkpointing": "full"} | pipeline
    changes = {
        "parallel3d.mesh": {"dp": 4},
        "parallel3d.model": LLAMA_13B,
        "parallel3d.data.sequence_length": sequence_length,
        "parallel3d.pipeline": pipeline,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
    }
    return RunConfig.from_dict(raw(**changes)).resolve(4)


def plan_of(given):
    return as_written(given, request_of(given, A100, 4))


@pytest.mark.parametrize(
    ("accumulation", "pipeline"),
    [
        (1, {}),
        (4, {}),
        (8, {"offload_activations": "cpu"}),
        (2, {"offload_activations": "cpu"}),
        (1, {"gradient_reduction": "per_microbatch"}),
    ],
)
def test_auto_is_the_fastest_plan_that_fits(accumulation, pipeline):
    """Of all ways to gather weights and reduce gradients; once a step they are 118 GiB of 75."""
    given = llama(accumulation=accumulation, **pipeline)
    reductions = ["per_step", "per_microbatch"]
    if "gradient_reduction" in pipeline:
        reductions = [pipeline["gradient_reduction"]]
    every = [
        plan_of(given.with_gathers({"weights": way, "gradient_reduction": reduction}, ()))
        for way in ("per_step", "per_pass", "per_microbatch")
        for reduction in reductions
    ]
    fitting = [plan.time.seconds for plan in every if plan.fits]
    chosen, notes = choose_gathers(given, A100)
    plan = plan_of(given.with_gathers(chosen, notes))
    assert plan.fits and plan.time.seconds == min(fitting)
    if "gradient_reduction" not in pipeline:
        assert 'gradient_reduction: "auto" is per_microbatch (with per_step it lacks' in notes[1]


@pytest.mark.parametrize(
    "pipeline", [{"gradient_reduction": "per_step"}, {"schedule": "zero_bubble"}]
)
def test_reduction_that_is_set_or_required_stays(pipeline):
    chosen, _ = choose_gathers(llama(**pipeline), A100)
    assert [*chosen] == ["weights"]


def test_search_chooses_weights_that_fit():
    given = {
        "zero_stage": 3,
        "pp": 2,
        "dp": 4,
        "tp": 1,
        "offload_optimizer": "none",
        "micro_batch": 1,
        "schedule": "breadth_first",
        "stages_per_rank": 4,
        "recompute": "none",
        "gradient_reduction": "per_step",
        "offload_param": "none",
    }
    wanted = config(layers=14, zero_optimization=LEAN | {"stage": 3})

    def first(memory):
        return search(request_of(wanted, machine(memory), 8, given), rows=1).plans[0].setting

    roomy = first(80 * GIB)
    for way in ("per_step", "per_pass", "per_microbatch"):
        total = fullest(changed(roomy, weights=way), machine()).total
        assert first(total).choices == changed(roomy, weights=way).choices
