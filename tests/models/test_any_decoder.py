"""Any decoder of transformers in stages and on tensor-parallel ranks, against the whole model."""

from unittest.mock import patch

import pytest

from parallel3d.model.spec import LayerCost
from parallel3d.models.transformers.spec import MeasuredLayer
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case
from tests.models.architectures import VOCABULARY, small_config
from tests.verify.measuring import errors_of, train_each

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


def case_of(kind, std=STD, **settings):
    """A run of a small model of an architecture."""
    model = {
        "family": "transformers",
        "config": small_config(kind, std),
        "vocab_size": VOCABULARY,
    }
    return Case(model=model, batch=16, **settings)


def train_cheaply(rank, jobs):
    """Train one after another; blocks are placed as if all cost the same, without measuring."""
    with patch.object(MeasuredLayer, "__call__", lambda *_: LayerCost(10**9)):
        return train_each(rank, jobs)


def errors_on_ranks(cases):
    """Each case's errors; all have the same mesh, and train one after another on its ranks."""
    jobs = [(case.config, case.reference) for case in cases]
    ranks = run_locally(train_cheaply, cases[0].world_size, jobs, timeout=3000)
    by_case = zip(*ranks, strict=True)
    return [errors_of(job[0], results) for job, results in zip(jobs, by_case, strict=True)]


def test_decoders_are_equal_to_one_process():
    cases = [case_of(kind, mesh=(2, 1, 2)) for kind in DEFAULT]
    for kind, errors in zip(DEFAULT, errors_on_ranks(cases), strict=True):
        assert max(errors.loss, errors.grad_norm, errors.weight) < 1e-5, (kind, errors)
