"""A loss whose tokens do not count alike is that of one big batch, however it is cut."""

from dataclasses import replace

import pytest
import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.tensor.vocab import IGNORED
from parallel3d.verify import measure
from parallel3d.verify.case import CaseTask, checked
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import Batch, prepare, train_reference
from parallel3d.verify.shrink import shrink
from tests.meshes import sizes_of
from tests.museum.halls import hall
from tests.verify import measuring
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

BATCH = 8


def weights_of(shape):
    """Most tokens of the first half of the samples count nothing, all of one, the others unlike."""
    generator = torch.Generator().manual_seed(3)
    weights = 2 * torch.rand(shape, generator=generator)
    first = weights[: shape[0] // 2]
    first[torch.rand(first.shape, generator=generator) < 0.8] = 0
    weights[1] = 0
    return weights


def weighted_course(config):
    """The batches of `measuring`, with weights."""
    course = measuring.plain_course(config)
    steps = [Batch(*batch) for batch in course.steps]
    steps = [batch._replace(weights=weights_of(batch.labels.shape)) for batch in steps]
    return replace(course, steps=steps)


def train_weighted(rank, config, expected):
    plain = measure.microbatches

    def microbatches(batch, config, mesh):
        weights = weights_of(batch[0].shape)
        masked = batch[1].masked_fill(weights == 0, IGNORED)
        start = config.micro_batch_size * config.num_microbatches * mesh.samples.coord
        own = weights[start:].split(config.micro_batch_size)
        batches = plain((batch[0], masked, batch[2]), config, mesh)
        return [m._replace(weights=w) for m, w in zip(batches, own, strict=False)]

    measuring.microbatches = microbatches
    return measuring.train_and_compare(rank, config, expected)


def errors(mesh, tmp_path, course=weighted_course, **settings):
    """How far three steps on this mesh are from one process of transformers."""
    raw = config_of(**settings)
    sizes = sizes_of(mesh)
    config = shrink(RunConfig.from_dict(raw), (sizes,), batch=BATCH)[sizes]
    expected = train_reference(config, tmp_path, course(config))
    ranks = run_locally(train_weighted, sizes.ranks, config, expected, timeout=200)
    return measuring.errors_of(config, ranks)


ALL = [
    ((2, 2, 1), {"microbatches": 4, "zero": 1}),
    ((1, 1, 1), {"microbatches": 1}),
    ((1, 1, 1), {"microbatches": 4}),
    ((1, 2, 2), {"microbatches": 2, "sequence_parallel": True}),
    ((2, 1, 2), {"microbatches": 4, "schedule": "zero_bubble"}),
    ((1, 4, 1), {"microbatches": 2, "zero": 0}),
]


@pytest.mark.slow  # by default as `verify` trains and evaluates
@pytest.mark.parametrize(("mesh", "settings"), ALL, ids=str)
def test_weighted_loss_equals_that_of_one_batch(mesh, settings, tmp_path):
    differences = errors(mesh, tmp_path, **settings)
    assert differences.within(measure.TOLERANCE["fp32"]), str(differences)


def test_training_and_evaluation_weigh_labels(tmp_path):
    """With a last batch that is half full, as `verify` runs it."""
    mesh = MeshSizes(pp=2, dp=2)
    small, reference = prepare(hall("weighted labels"), [mesh], tmp_path)
    differences, _ = checked(small[mesh], reference, CaseTask())
    assert not differences.beyond(measure.TOLERANCE["fp32"]), differences


@pytest.mark.slow
def test_mean_over_all_tokens_is_detected(tmp_path):
    differences = errors((1, 1, 1), tmp_path, course=measuring.plain_course, microbatches=2)
    assert differences.grad_norm > 0.1 and not differences.within(measure.TOLERANCE["fp32"])
