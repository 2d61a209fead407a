"""Any decoder of transformers in stages and on tensor-parallel ranks, against the whole model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.every_decoder import BOUND, STDS, case_of, errors_on_ranks, results

pytestmark = pytest.mark.gloo
COMMON = [
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "phi3",
    "starcoder2",
]
# GPT-NeoX with attention and MLP one after the other, where the default has them side by side.
IN_TURN = {
    "use_parallel_residual": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
}
LONGROPE = {
    "original_max_position_embeddings": 4,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "attention_factor": 1.0,
    },
}
# A norm has the weights of all heads: [heads, size]. The ranks share the one head of keys.
NORMS_OF_HEADS = {"use_qk_norm": True, "num_key_value_heads": 1}
# Norms of heads; gathered layers; chunks, experts that take tokens times their scores, and layers
# that count positions.
FURTHER = {"cohere": NORMS_OF_HEADS, "falcon": {}, "llama4_text": {}}
# Of these only every fourth layer is of another kind, unless they are told.
OF_BOTH_KINDS = {
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},  # chunks with positions and without experts
}
STD = 0.2  # attention is far from uniform, so a wrong mask or rotation is seen
SMALL = 0.02  # that of training
ON_PAIR = {"mesh": (1, 1, 2), "zero_stage": 1, "batch": 4, "microbatches": 1}


def switched(case, own):
    """A case of an architecture with other values of its fields."""
    return replace(case, model=case.model | {"config": case.model["config"] | own})


def on_pair(kind, std, own, **settings):
    """A case on two tensor-parallel ranks, with each kind of layer once."""
    case = case_of(kind, std, layers=2, **ON_PAIR | settings)
    return switched(case, OF_BOTH_KINDS.get(kind, {}) | own)


def check(cases):
    """The cases, which have the same mesh, are equal to one process."""
    for case, errors in zip(cases, errors_on_ranks(cases), strict=True):
        kind = case.model["config"]["model_type"]
        assert max(errors.loss, errors.grad_norm, errors.weight) < BOUND, (kind, errors)


def test_decoders_on_tensor_parallel_ranks_are_equal_to_one_process():
    """The common ones at both standard deviations; all others are in the table of all.

    What the second step has of the first, the optimizer's state, does not depend on the deviation.
    """
    cases = []
    for kind in COMMON:
        own = LONGROPE if kind == "phi3" else {}
        cases += [on_pair(kind, STD, own), on_pair(kind, SMALL, own, steps=1)]
    cases += [on_pair(kind, STD, own) for kind, own in FURTHER.items()]
    check(cases)


def test_decoders_in_stages_are_equal_to_one_process():
    """With ZeRO-3; experts, windows with a rotation for each kind of layer, and own switches."""
    experts, windows, neox = (
        case_of(kind, STD, (2, 1, 1), layers=layers, batch=4)
        for kind, layers in (("deepseek_v3", 2), ("gemma3_text", 3), ("gpt_neox", 2))
    )
    check([experts, windows, switched(neox, IN_TURN)])


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_every_architecture_trains_as_its_table_says():
    path = Path(__file__).parents[2] / "docs/architectures.json"
    written = json.loads(path.read_text())
    now = results()
    assert now["refused"] == written["refused"]
    assert passed_of(now["tried"]) >= passed_of(written["tried"])
    assert sum(written["tried"][kind]["mesh"][2] > 1 for kind in passed_of(now["tried"])) >= 80


def passed_of(tried):
    """The architectures that are equal to one process at both standard deviations."""
    return {
        kind
        for kind, result in tried.items()
        if len(result["errors"]) == len(STDS) and max(result["errors"].values()) < BOUND
    }
