"""Steps with other numbers of microbatches: each program is made once, the numbers are right."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from parallel3d.base.errors import Parallel3DError
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import microbatches
from parallel3d.verify.reference import Batch, Course, train_reference
from tests.cases import Case, Trainer
from tests.verify.measuring import differences, errors_of

pytestmark = pytest.mark.gloo

COUNTS = 4, 2, 4  # microbatches in each step
MICRO = 2
CASES = [
    Case(mesh=(2, 1, 1), microbatches=4, batch=8, model={"num_hidden_layers": 2}, **settings)
    for settings in (
        {"schedule": "one_f_one_b", "zero_stage": 1, "reduction": "per_microbatch"},
        {"schedule": "zero_bubble", "weights": "per_pass"},
    )
]


def config_of(case, count):
    """The case's config with this number of microbatches in a step."""
    return replace(case, microbatches=count, batch=MICRO * count).config


def noting(make, made, count):
    made.append(count)
    return make(count)


def train_on_rank(rank, cases, reference):
    results = []
    for case in cases:
        trainer = Trainer(case)
        executor = trainer.executor
        mesh = trainer.mesh
        made = []
        executor._make_schedule = partial(noting, executor._make_schedule, made)
        losses = []
        norms = []
        for step, (batch, count) in enumerate(zip(reference.course.steps, COUNTS, strict=True)):
            local = executor.run(microbatches(batch, config_of(case, count), mesh), step)
            losses.append(sum(row[0] for row in mesh.messages.gather_floats([local])))
            norms.append(trainer.engine.step(trainer.lr).grad_norm)
        curves = losses, norms
        results.append((differences(trainer.parts, trainer.config, curves, reference), made))
        trainer.close()
    return results


def test_against_one_process(tmp_path):
    """ZeRO 1 and 3, weights reduced in each backward and once, held and let go."""
    torch.set_num_threads(1)
    config = CASES[0].config
    generator = torch.Generator().manual_seed(3)
    text = [torch.randint(61, (MICRO * n, 17), generator=generator) for n in COUNTS]
    steps = [Batch(t[:, :-1], t[:, 1:]) for t in text]
    rates = [config.optimizer.params.lr] * len(steps)
    reference = train_reference(config, tmp_path, Course(steps, rates, steps[-1]))
    ranks = run_locally(train_on_rank, 2, CASES, reference)
    for number, case in enumerate(CASES):
        measured, made = zip(*(rank[number] for rank in ranks), strict=True)
        errors = errors_of(case.config, measured)
        assert errors.within(1e-6), f"{case}: {errors}"
        assert all(counts == [2] for counts in made), made


def fail_on_rank(rank, case):
    """The error for a number that the schedule cannot do."""
    trainer = Trainer(case)
    (batch,) = trainer.batches()
    with pytest.raises(Parallel3DError) as refused:
        trainer.executor.run(batch[:2])
    trainer.close()
    return str(refused.value)


def test_impossible_number_of_microbatches_is_refused_on_every_rank():
    case = Case(mesh=(2, 1, 1), schedule="zb_v", stages_per_rank=2, steps=1, batch=8)
    messages = run_locally(fail_on_rank, 2, case)
    assert messages[0] == messages[1]
    assert "2 microbatches do not fill a V of 2 ranks" in messages[0]
