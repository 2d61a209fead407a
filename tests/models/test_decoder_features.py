"""The features of training on small decoders of transformers, each against one process."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.model.spec import ParamSpec
from parallel3d.models.transformers import modules
from parallel3d.models.transformers.skeleton import Skeleton
from parallel3d.verify.case import CaseTask, checked
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.reference import prepare
from tests.cases import Case
from tests.models.architectures import VOCABULARY, small_config
from tests.models.every_decoder import train_cheaply
from tests.models.test_any_decoder import COMMON, LONGROPE
from tests.verify.configs import config_of
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo
STD = 0.2  # attention is far from uniform, so a wrong mask or rotation is seen
# Each kind of layer that the architecture has, within a few layers.
_OWN = {
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
ISOLATED = {"parallel3d.data.isolate_documents": True}
# The gradient of a bias of keys is rounding alone, which Adam makes whole steps of without an eps.
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "eps": 1e-6}}}
NARROW = {"initializer_range": 0.02}  # wide weights make too much of rounding in bf16
# Meshes are pp x dp x tp, or pp x dp x cp x tp; all have 4 ranks, and the models 2 key/value heads
# or fewer. Each feature is on each of the architectures.
TOGETHER = [
    {"mesh": (1, 1, 4), "sequence_parallel": True, "offload": "cpu"},
    {"mesh": (2, 1, 2, 1), "schedule": "zero_bubble", "changes": ISOLATED},
    {
        "mesh": (2, 1, 2),
        "checkpointing": "full",
        "precision": "bf16",
        "sequence_parallel": True,
        "own": NARROW,
    },
    {"mesh": (1, 2, 2), "zero_stage": 1, "changes": MUON},
]
OTHERS = [
    ("cohere2", {"mesh": (2, 1, 2), "schedule": "zero_bubble", "sequence_parallel": True}),
    ("granite", {"mesh": (1, 2, 2), "zero_stage": 2, "offload": "cpu"}),
    ("glm4", {"mesh": (1, 2, 2), "offload": "cpu+param-cpu", "sequence_parallel": True}),
    ("deepseek_v3", {"mesh": (1, 1, 2, 2), "checkpointing": "full", "sequence_parallel": True}),
    ("starcoder2", {"mesh": (1, 1, 4), "zero_stage": 1, "checkpointing": ["core_attn"]}),
    ("phi3", {"mesh": (1, 1, 2, 2), "sequence_parallel": True, "changes": ISOLATED}),
    ("phi3", {"mesh": (1, 1, 4), "schedule": "zero_bubble"}),
    ("phi3", {"mesh": (1, 2, 2), "precision": "fp16", "zero_stage": 1}),
    ("mixtral", {"mesh": (2, 1, 2), "sequence_parallel": True}),
    ("qwen3_moe", {"mesh": (2, 1, 2, 1), "zero_stage": 0}),
    ("gpt2", {"mesh": (1, 2, 2), "changes": MUON}),
    ("gpt2", {"mesh": (2, 1, 2), "sequence_parallel": True, "checkpointing": "full"}),
    ("gpt_oss", {"mesh": (2, 2, 1), "changes": MUON, "own": NARROW}),
    ("llama4_text", {"mesh": (1, 2, 2), "changes": MUON}),
    (
        "llama4_text",
        {
            "mesh": (2, 1, 2),
            "checkpointing": "full",
            "precision": "bf16",
            "sequence_parallel": True,
            "own": NARROW,
        },
    ),
]
PIPELINE = MeshSizes(pp=2, tp=2)
REPLICAS = MeshSizes(dp=2, tp=2)
FEATURES = [(kind, settings) for kind in COMMON for settings in TOGETHER] + OTHERS


def case_of(kind, own=None, **settings):
    """A run of a small model of an architecture, with fields of its `own`."""
    fields = small_config(kind, STD) | _OWN.get(kind, {}) | (own or {})
    model = {"family": "transformers", "config": fields, "vocab_size": VOCABULARY}
    return Case(model=model, **{"batch": 8, "microbatches": 2} | settings)


def errors_on_ranks(cases, faults):
    """Each case's errors under its fault; all have as many ranks, which are started once."""
    jobs = [(case.config, case.reference) for case in cases]
    ranks = run_locally(train_with, cases[0].world_size, jobs, faults, timeout=3000)
    by_case = zip(*ranks, strict=True)
    return [errors_of(job[0], results) for job, results in zip(jobs, by_case, strict=True)]


def train_with(rank, jobs, faults):
    """Train each job under its fault of `FAULTS`."""
    results = []
    for job, fault in zip(jobs, faults, strict=True):
        with FAULTS[fault]():
            results += train_cheaply(rank, [job])
    return results


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_features_are_equal_to_one_process():
    cases = [case_of(kind, **settings) for kind, settings in FEATURES]
    all_errors = errors_on_ranks(cases, ["none"] * len(cases))
    wrong = []
    for case, (kind, _), errors in zip(cases, FEATURES, all_errors, strict=True):
        if not errors.within(TOLERANCE[case.precision]):
            wrong.append((kind, str(case), errors))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMON)
def test_run_goes_on_on_another_mesh(kind, tmp_path):
    """Saved on a pipeline and resumed on data-parallel ranks: as one process that never stopped."""
    raw = config_of()
    model = case_of(kind).model | {"vocab_size": "auto"}
    raw["parallel3d"] |= {"model": model, "data": {"sequence_length": 32}}
    small, reference = prepare(RunConfig.from_dict(raw), (PIPELINE, REPLICAS), tmp_path)
    saved, counters = checked(small[PIPELINE], reference, CaseTask(saves=tmp_path))
    task = CaseTask(resumes=tmp_path)
    resumed, _ = checked(small[REPLICAS], reference, task, counters=counters)
    assert saved.within(TOLERANCE["fp32"]), saved
    assert resumed.within(TOLERANCE["fp32"]), resumed


@contextmanager
def without_collective_at_the_entry():
    """The gradients of a region's input are not summed over the ranks that share it."""
    with patch.object(modules, "copy_to_group", lambda x, context: x):
        yield


@contextmanager
def without_sums_of_partial_gradients():
    """Each rank keeps its part of the gradient of what is not cut in a region."""
    with patch.object(ParamSpec, "is_partial", lambda *_: False):
        yield


@contextmanager
def with_a_wrong_window():
    """Attention sees one token more than the window."""
    build = modules.LayerBuilder._core

    def wider(self, name, context):
        core = build(self, name, context)
        if core.window is not None:
            core.window += 1
        return core

    with patch.object(modules.LayerBuilder, "_core", wider):
        yield


@contextmanager
def with_a_layer_off_by_one():
    """The model around a block opens one layer too late: rotary angles are the next layer's."""
    around = Skeleton.around

    def shifted(self, number, layer, replaced):
        if layer is not None:
            number = (number + 1) % len(self.layers)
        return around(self, number, layer, replaced)

    with patch.object(Skeleton, "around", shifted):
        yield


FAULTS = {
    "none": nullcontext,
    "no collective at a region's entry": without_collective_at_the_entry,
    "partial gradients are not summed": without_sums_of_partial_gradients,
    "a wrong window": with_a_wrong_window,
    "a layer off by one": with_a_layer_off_by_one,
}


@pytest.mark.slow
def test_planted_faults_are_found():
    """Losses, norms or weights are ten times what is allowed, where nothing else differs."""
    case = case_of("gemma3_text", mesh=(1, 1, 2))
    all_errors = errors_on_ranks([case] * len(FAULTS), list(FAULTS))
    for fault, errors in zip(FAULTS, all_errors, strict=True):
        worst = max(errors.loss, errors.grad_norm, errors.weight)
        if fault == "none":
            assert worst < TOLERANCE["fp32"], errors
        else:
            assert worst > 10 * TOLERANCE["fp32"], (fault, errors)


@pytest.mark.parametrize(
    ("kind", "settings", "place"),
    [
        pytest.param(
            "phi3", {"changes": ISOLATED, "own": LONGROPE}, "isolate_documents", id="longrope"
        ),
        pytest.param("bloom", {"changes": ISOLATED}, "isolate_documents", id="own attention"),
        pytest.param("lfm2", {"mesh": (1, 1, 2, 1)}, "mesh.cp", id="convolution"),
        pytest.param(
            "olmo_hybrid",
            {"changes": ISOLATED},
            "isolate_documents",
            id="recurrence",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mixing_of_tokens_beside_attention_is_refused(kind, settings, place):
    with pytest.raises(ConfigError, match=f"{place}.*only attention mixes tokens"):
        _ = case_of(kind, **settings).config


def test_dropout_that_ranks_cannot_share_is_refused():
    dropping = {"attention_dropout": 0.1}
    with pytest.raises(ConfigError, match=r"config\.attention_dropout = 0\.1"):
        _ = case_of("granite", dropping, mesh=(1, 1, 2, 1)).config
    with pytest.raises(ConfigError, match="soft-capped"):
        _ = case_of("gemma2", dropping).config
