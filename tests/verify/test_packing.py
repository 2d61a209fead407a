"""Packed samples, whose padding counts nowhere, train as in one process of transformers."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.packing import Packing
from parallel3d.schedule.schedules import make_schedule
from parallel3d.train.feed import Feed
from parallel3d.verify import definitions, measure
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import Batch, train_reference
from parallel3d.verify.shrink import shrink
from tests.data.plain_packing import pack
from tests.meshes import sizes_of
from tests.verify import measuring
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

BATCH = 8
END = 1


def stream(length):
    """Documents that leave much padding, some of them longer than a sample."""
    random = np.random.default_rng(0)
    lengths = np.concatenate(
        [
            random.integers(2 * length // 3, length, 30),
            random.integers(length + 1, 2 * length, 6),
            random.integers(1, length // 4, 12),
        ]
    )
    random.shuffle(lengths)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(END + 1, 50, bounds[-1])
    ids[bounds[1:] - 1] = END
    return TokenStream(ids, bounds, packing=Packing.make(bounds, length))


def packed_course(config):
    """The batches of a run, by the definitions of the order and of the packing."""
    course = measuring.plain_course(config)
    ids = stream(config.data.sequence_length).tokens
    samples = pack(ids.tolist(), END, config.data.sequence_length)
    ids = torch.from_numpy(ids)
    steps = []
    for step in range(len(course.steps)):
        numbers = [
            definitions.sample_at(config.train.seed, index, len(samples))
            for index in range(step * BATCH, (step + 1) * BATCH)
        ]
        places = torch.tensor([samples[number] for number in numbers])
        tokens, labels = (torch.where(places < 0, 0, ids[places + n]) for n in (0, 1))
        before = places[:, :-1]
        here = places[:, 1:]
        goes_on = (before < 0) | ((here == before + 1) & (tokens[:, :-1] != END))
        documents = torch.zeros_like(places)
        documents[:, 1:] = (~goes_on).cumsum(-1)
        steps.append(Batch(tokens, labels, documents, (places >= 0).float()))
    padding = torch.stack([1 - step.weights.mean() for step in steps])
    assert (padding > 0.01).all() and padding[0] != padding[1]
    return replace(course, steps=steps, evaluated=steps[-1])


def train_packed(rank, config, expected):
    """Train on what the feed reads of the same documents."""
    text = stream(config.data.sequence_length)
    feeds = []
    starts = count(0, BATCH)

    def microbatches(batch, config, mesh):
        if not feeds:
            corpus = Corpus(Path(), 50, END, 0.0, text, text)
            sizes = config.num_microbatches, config.pipeline.stages_per_rank
            plan = make_schedule(config.pipeline.schedule, config.mesh.pp, *sizes)
            feeds.append(Feed(config, mesh, corpus, plan))
        return feeds[0].training(next(starts))

    measuring.microbatches = microbatches
    errors = measuring.train_and_compare(rank, config, expected)
    feeds[0].close()
    return errors


@pytest.mark.parametrize("isolate", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mesh", [(1, 2, 1), *(pytest.param(m, marks=pytest.mark.slow) for m in ((2, 2, 1), (1, 1, 2)))]
)
def test_packed_training_equals_one_process(mesh, isolate, tmp_path):
    raw = config_of(isolate=isolate, microbatches=2, zero=1)
    raw["parallel3d"]["data"]["packing"] = "best_fit"
    sizes = sizes_of(mesh)
    config = shrink(RunConfig.from_dict(raw), (sizes,), batch=BATCH)[sizes]
    course = packed_course(config)
    if not isolate:
        course = replace(course, steps=[step._replace(documents=None) for step in course.steps])
    expected = train_reference(config, tmp_path, course)
    ranks = run_locally(train_packed, mesh[0] * mesh[1] * mesh[2], config, expected, timeout=200)
    errors = measuring.errors_of(config, ranks)
    assert errors.within(measure.TOLERANCE["fp32"]), str(errors)
