"""Any decoder of transformers in stages and on tensor-parallel ranks, against the whole model."""

import json
from pathlib import Path

import pytest

from tests.models.every_decoder import BOUND, case_of, errors_on_ranks, results

pytestmark = pytest.mark.gloo
DEFAULT = [
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "phi3",
    "starcoder2",
]
STD = 0.2  # attention is far from uniform, so a wrong mask or rotation is seen


def test_decoders_are_equal_to_one_process():
    cases = [case_of(kind, STD, (2, 1, 2)) for kind in DEFAULT]
    for kind, errors in zip(DEFAULT, errors_on_ranks(cases), strict=True):
        assert max(errors.loss, errors.grad_norm, errors.weight) < 1e-5, (kind, errors)


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
    """The architectures that are equal to one process."""
    return {
        kind
        for kind, result in tried.items()
        if result["errors"] and max(result["errors"].values()) < BOUND
    }
