"""Any decoder of transformers in stages and on tensor-parallel ranks, against the whole model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.every_decoder import BOUND, STDS, case_of, errors_on_ranks, results

pytestmark = pytest.mark.gloo
DEFAULT = [
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_neox",
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
STD = 0.2  # attention is far from uniform, so a wrong mask or rotation is seen


def test_decoders_are_equal_to_one_process():
    cases = [case_of(kind, STD, (2, 1, 2)) for kind in DEFAULT]
    model = case_of("gpt_neox", STD, (2, 1, 2)).model
    in_turn = model | {"config": model["config"] | IN_TURN}
    cases.append(replace(cases[0], model=in_turn))
    names = [*DEFAULT, "gpt_neox, in turn"]
    for kind, errors in zip(names, errors_on_ranks(cases), strict=True):
        assert max(errors.loss, errors.grad_norm, errors.weight) < BOUND, (kind, errors)


def test_layers_beside_plans_are_equal_to_one_process():
    """Gathered layers, experts with gate and up in turns, and frozen biases of scores."""
    kinds = ["falcon", "gpt_oss", "ernie4_5_moe"]
    cases = [case_of(kind, STD, (1, 1, 2)) for kind in kinds]
    for kind, errors in zip(kinds, errors_on_ranks(cases), strict=True):
        assert max(errors.loss, errors.grad_norm, errors.weight) < BOUND, (kind, errors)


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
