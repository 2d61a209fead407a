"""Side losses of layers: the numbers of one process of transformers on every schedule and mesh."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel3d import models
from parallel3d.base.section import Problems
from parallel3d.model import optimizers
from parallel3d.pipeline.stages import _refuse_whole_samples
from parallel3d.schedule.schedules import names, splits_backward, why_not
from parallel3d.verify import definitions
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE, microbatches
from parallel3d.verify.reference import (
    FIRST,
    Reference,
    first_weights,
    load_model,
    relative,
    save_weights,
)
from tests.cases import Case, Trainer
from tests.own_families import FOLDER, forgotten_afterwards
from tests.verify.measuring import batches, errors_of, plain_course

pytestmark = pytest.mark.gloo

COEFFICIENTS = {"balance": 0.3, "z": 0.02, "largest": 0.0, "size": 0.05}
# with embedding and head a layer or more for each of 8 stages
BATCH = 12
BLOCKS = 7


@pytest.fixture(scope="module", autouse=True)
def family():
    """Forget the family of FOLDER afterwards."""
    with forgotten_afterwards():
        yield


def case_of(mesh, schedule, **settings):
    once = splits_backward(schedule)
    settings = {"reduction": "per_step" if once else "per_microbatch", "microbatches": 6} | settings
    return Case(
        mesh=mesh,
        schedule=schedule,
        batch=BATCH,
        steps=2,
        **settings,
        changes={"parallel3d.run.model_folders": [FOLDER]},
        model={"family": "routed", "num_hidden_layers": BLOCKS},
    )


@pytest.fixture(scope="module")
def reference(family, tmp_path_factory):
    """Plain transformers in fp64: the losses, and the mean of each side loss over its layers."""
    torch.set_num_threads(1)
    config = case_of((1, 1, 1), "gpipe").config
    model, _ = load_model(config, first_weights(config))
    masters = dict(model.named_parameters())
    groups = definitions.optimizer_groups(model, config, masters)
    optimizer = optimizers.load(config.optimizer.type).reference(groups, config.optimizer.params)
    losses = []
    norms = []
    means = []
    folder = tmp_path_factory.mktemp("reference")
    save_weights(config, masters, folder / FIRST)
    course = plain_course(config)
    for (tokens, labels, *_), lr in zip(course.steps, course.rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * lr
        optimizer.zero_grad()
        for values in model.side.values():
            values.clear()
        logits = model(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.transpose(1, 2), labels)
        sums = {name: sum(values) for name, values in model.side.items()}
        (loss + sum(COEFFICIENTS[name] * value for name, value in sums.items())).backward()
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), config.gradient_clipping)))
        optimizer.step()
        losses.append(loss.item())
        means.append({name: s.item() / len(model.side[name]) for name, s in sums.items()})
    file = folder / "reference.safetensors"
    save_weights(config, masters, file)
    return Reference(losses, norms, str(file), 0.0, course), means


def train_on_rank(rank, cases, reference):
    """For each case what `errors_of` takes, and this rank's side losses of each step."""
    results = []
    for case in cases:
        trainer = Trainer(case)
        mesh = trainer.mesh
        executor = trainer.executor
        side = []
        run = executor.run

        def noted(batch, step, run=run, executor=executor, side=side):
            loss = run(batch, step)
            side.append({name: float(value) for name, value in executor.side_losses.items()})
            return loss

        executor.run = noted
        measured = trainer.compare(reference)
        share = microbatches(next(batches(trainer.config)), trainer.config, mesh)
        trainer.evaluator.run(share)
        left = len(executor.flow.side_losses) + len(trainer.evaluator.flow.side_values)
        results.append((measured, side, left))
        trainer.close()
    return results


def check(cases, reference, tolerance=1e-6):
    """Train, and compare losses, norms, weights and side losses with the reference."""
    expected, means = reference
    (size,) = {case.world_size for case in cases}
    ranks = run_locally(train_on_rank, size, cases, expected, timeout=300)
    for number, case in enumerate(cases):
        measured, side, left = zip(*(rank[number] for rank in ranks), strict=True)
        errors = errors_of(case.config, measured)
        assert errors.within(tolerance), f"{case}: {errors}"
        assert not any(left), case
        _, dp, tp = case.mesh
        for step, mean in enumerate(means):
            layers = {"balance": BLOCKS, "z": BLOCKS, "largest": BLOCKS, "size": 1}
            sums = {name: sum(s[step].get(name, 0.0) for s in side) for name in layers}
            own = [sums[name] / (dp * tp * count) for name, count in layers.items()]
            assert max(relative(own, list(mean.values()))) < tolerance, (case, own, mean)


def test_layers_that_need_whole_samples_are_refused_with_cp():
    """A balance loss of one rank's tokens would be another number."""
    layers = models.layers(case_of((1, 1, 1), "gpipe").config.model)
    with pytest.raises(Problems, match="has side losses, which are of whole samples; use mesh"):
        _refuse_whole_samples([layer for layer in layers if layer.side_losses], {}, 2)


@pytest.mark.slow  # by default those of routers, in test_experts
def test_on_two_ranks(reference):
    """Each pair of a schedule's kind and what recomputes, holds or sums in another way."""
    check(
        [
            case_of(
                (2, 1, 1), "zero_bubble", microbatches=4, checkpointing="full", weights="per_pass"
            ),
            case_of(
                (1, 1, 2), "gpipe", microbatches=2, sequence_parallel=True, checkpointing="full"
            ),
        ],
        reference,
    )


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("name", names())
def test_every_schedule(name, pp, reference):
    """Each schedule with each recomputation, whatever ZeRO and the weights do."""
    stages = next((n for n in (2, 1) if not why_not(name, pp, 6, n)), None)
    if stages is None:
        pytest.skip(why_not(name, pp, 6, 1))
    zero = {"none": 1, "selective": 3, "full": 0 if splits_backward(name) else 3}
    cases = [
        case_of((pp, 1, 1), name, stages_per_rank=stages, checkpointing=kind, zero_stage=stage)
        for kind, stage in zero.items()
    ]
    check(cases, reference)


@pytest.mark.slow
def test_side_losses_are_multiplied_by_the_loss_scale(reference):
    """In the gradient norm, because Adam's steps do not depend on a scale."""
    each, once = (
        case_of((2, 1, 1), "one_f_one_b", zero_stage=stage, reduction=reduction, precision="fp16")
        for stage, reduction in ((3, "per_microbatch"), (1, "per_step"))
    )
    scale = {"fp16.initial_scale_power": 8}
    cases = [replace(case, changes=case.changes | scale) for case in (each, once)]
    check(cases, reference, tolerance=TOLERANCE["fp16"])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["per_microbatch", "per_pass", "per_step"])
def test_every_axis(weights, reference):
    """Two axes at a time, with weights held and let go in each way."""
    cases = [
        case_of((2, 2, 1), "v_shape", stages_per_rank=2, weights=weights),
        case_of((2, 1, 2), "one_f_one_b", weights=weights, sequence_parallel=True),
        case_of((1, 2, 2), "gpipe", weights=weights, checkpointing="full", reduction="per_step"),
    ]
    for case in cases:  # in processes of its own, in which DeepSpeed numbers modules from 0
        check([case], reference)
