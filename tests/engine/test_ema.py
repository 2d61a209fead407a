"""The average of the weights: one process's, on every mesh, and the weights while it is evaluated.

The reference trains plain transformers with torch's AdamW in fp64, and averages its parameters.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from parallel3d.engine.optimizer_states import OptimizerStates
from parallel3d.models import huggingface
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import in_our_names
from tests.cases import Case, Trainer
from tests.verify.measuring import number_anew, reference_on_batches

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("operators")]

BOUND = 1e-6
DECAY = 0.6
# A llama has no biases: Adam makes whole steps of the rounding of a key's gradient.
LLAMA = {"family": "llama", "num_key_value_heads": 2, "num_hidden_layers": 1}
CASE = Case(
    zero_stage=1,
    steps=4,
    batch=8,
    microbatches=2,
    model=LLAMA,
    changes={"parallel3d.train.ema": {"decay": DECAY, "every": 2}},
)
SKIPPED = 2  # the third step is refused
MUON = {"optimizer": {"type": "muon", "params": {"lr": 3e-4}}}
MOE = {"family": "moe", "num_experts": 4, "num_hidden_layers": 2}


def expected(case, folder):
    """Return the averages of a plain run without the refused step, by our names."""
    made = []
    every = case.config.train.ema.every

    class Averaged(torch.optim.AdamW):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)
            self.done = 0
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.averages = {p: p.detach().double().clone() for p in parameters}

        def step(self, closure=None):
            self.done += 1
            if self.done == SKIPPED + 1:
                return
            super().step(closure)
            for parameter, average in self.averages.items():
                if self.done % every == 0:
                    average.mul_(DECAY).add_(parameter.detach().double(), alpha=1 - DECAY)

    with patch("torch.optim.AdamW", Averaged):
        reference = reference_on_batches(case.config, folder)
    config = case.config.model
    weights = huggingface(config.family).to_huggingface(config, load_file(reference.weights))
    averages = {}
    for name, weight in weights.items():
        same = [
            average
            for parameter, average in made[0].averages.items()
            if parameter.shape == weight.shape and torch.equal(parameter.detach().float(), weight)
        ]
        averages[name] = same[0].float()
    return in_our_names(config, averages)


def trained(case):
    trainer = Trainer(case)
    for step, batch in enumerate(trainer.batches()):
        trainer.executor.run(batch, step)
        trainer.engine.averages = (step + 1) % case.config.train.ema.every == 0
        trainer.engine.step(trainer.lr, lambda _, step=step: step != SKIPPED)
    return trainer


def averages_on_rank(rank, cases, wants, fault=nullcontext):
    """Return for each case the largest difference of an average from the expected one."""
    worst = []
    for case, want in zip(cases, wants, strict=True):
        number_anew()
        with fault():
            trainer = trained(case)
        with trainer.engine.averaged():
            errors = []
            for held in trainer.engine.held:
                value = trainer.engine.full_parameter(held).cpu()
                name = "embedding.token.weight" if held.copy else held.name
                errors.append(float((value - held.cut.part_of(want[name])).abs().max()))
        worst.append(max(errors))
        trainer.close()
    return worst


def worst_of(cases, folder, fault=nullcontext):
    """Return for each case the largest difference over all ranks; all have the same mesh size."""
    cases = [replace(case, folder=str(folder)) for case in cases]
    wants = [expected(case, folder) for case in cases]
    ranks = run_locally(averages_on_rank, cases[0].world_size, cases, wants, fault)
    return [max(row) for row in zip(*ranks, strict=True)]


# The meshes of the parity table's default tier, and two more.
ONE = [replace(CASE, zero_stage=3, offload="cpu")]
ONE_MORE = [CASE]
TWO = [replace(CASE, mesh=(1, 2, 1), zero_stage=0), replace(CASE, mesh=(2, 1, 1))]
OFFLOADED = [
    replace(CASE, mesh=(1, 2, 1), zero_stage=2, offload="cpu"),
    replace(CASE, mesh=(1, 2, 1), zero_stage=3, offload="nvme"),
]
FOUR = [
    replace(CASE, mesh=(2, 2, 1), zero_stage=3, schedule="one_f_one_b"),
    replace(CASE, mesh=(1, 2, 2), zero_stage=2),
    replace(CASE, mesh=(2, 1, 2), zero_stage=1, sequence_parallel=True),
    replace(CASE, mesh=(1, 1, 4, 1), zero_stage=3),
    replace(
        CASE, mesh=(1, 4, 1), zero_stage=3, changes=CASE.changes | {"parallel3d.mesh.dp_shards": 2}
    ),
]
EIGHT = [
    replace(CASE, mesh=(2, 2, 2), zero_stage=3, offload="cpu", schedule="one_f_one_b"),
    replace(CASE, mesh=(1, 2, 2, 2), zero_stage=2),
    replace(CASE, mesh=(2, 1, 2, 2), zero_stage=0),
    replace(CASE, mesh=(2, 2, 2, 1), zero_stage=3, schedule="zero_bubble"),
]


@pytest.mark.parametrize(
    "cases",
    [
        ONE,
        TWO,
        pytest.param(ONE_MORE, marks=pytest.mark.slow),
        pytest.param(OFFLOADED, marks=pytest.mark.slow),
        pytest.param(FOUR, marks=pytest.mark.slow),
        pytest.param(EIGHT, marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks", "zero1", "offloaded", "four ranks", "eight ranks"],
)
def test_average_equals_that_of_one_process(cases, tmp_path):
    assert max(worst_of(cases, tmp_path)) < BOUND


def own_averages_on_rank(rank, cases):
    """Return for each case how far its averages are from those of the masters after each step."""
    worst = []
    for case in cases:
        number_anew()
        trainer = Trainer(case)
        engine = trainer.engine

        def masters(engine=engine):
            return [engine.full_parameter(held).cpu().double() for held in engine.held]

        averages = masters()
        for step, batch in enumerate(trainer.batches()):
            trainer.executor.run(batch, step)
            engine.averages = (step + 1) % case.config.train.ema.every == 0
            engine.step(trainer.lr)
            if engine.averages:
                for average, master in zip(averages, masters(), strict=True):
                    average.lerp_(master, 1 - DECAY)
        with engine.averaged():
            pairs = zip(averages, masters(), strict=True)
            worst.append(max(float((one - other).abs().max()) for one, other in pairs))
        trainer.close()
    return worst


WIDE = [
    replace(CASE, mesh=(1, 2, 2), model={}, changes=CASE.changes | MUON),
    replace(CASE, mesh=(2, 2, 1), model={}, zero_stage=3, changes=CASE.changes | MUON),
    replace(
        CASE,
        mesh=(1, 4, 1),
        zero_stage=3,
        model=MOE,
        changes=CASE.changes | {"parallel3d.mesh.ep": 2},
    ),
    replace(CASE, mesh=(1, 2, 2), zero_stage=2, offload="cpu", model=MOE),
    replace(CASE, mesh=(2, 1, 2, 1), zero_stage=3, schedule="zero_bubble"),
    replace(CASE, mesh=(1, 1, 4), sequence_parallel=True, checkpointing="full", model={}),
    replace(CASE, mesh=(4, 1, 1), model={"num_hidden_layers": 4}, zero_stage=0),
]


@pytest.mark.slow
def test_average_is_that_of_the_runs_own_masters(tmp_path):
    """With experts, Muon and each axis, whose masters other tests compare with one process."""
    cases = [replace(case, folder=str(tmp_path)) for case in WIDE]
    for row in run_locally(own_averages_on_rank, 4, cases):
        assert max(row) < BOUND, row


@contextmanager
def moved(how):
    """Let averages follow by another rule, in place of `averaging`."""

    @contextmanager
    def averaging(self, decay):
        optimizer = self._zero.optimizer

        def begin(optimizer, *_):
            for group in optimizer.param_groups:
                for master in group["params"]:
                    self.begin(master)

        with optimizer.register_step_pre_hook(begin), how(self, optimizer, decay):
            yield

    with patch.object(OptimizerStates, "averaging", averaging):
        yield


def follow(optimizer, decay, weight_of):
    for group in optimizer.param_groups:
        for master in group["params"]:
            optimizer.state[master]["ema"].lerp_(weight_of(master.detach()), 1 - decay)


def before_the_update(states, optimizer, decay):
    return optimizer.register_step_pre_hook(lambda o, *_: follow(o, decay, torch.clone))


def towards_bf16(states, optimizer, decay):
    return optimizer.register_step_post_hook(
        lambda o, *_: follow(o, decay, lambda master: master.bfloat16().float())
    )


@contextmanager
def also_when_skipped(states, optimizer, decay):
    yield
    follow(states._zero.optimizer, decay, torch.clone)


@pytest.mark.parametrize(
    "how",
    [
        before_the_update,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (towards_bf16, also_when_skipped)),
    ],
)
def test_planted_fault_is_seen(how, tmp_path):
    case = CASE
    if how is also_when_skipped:  # the refused step is one after which the average is due
        case = replace(CASE, steps=SKIPPED + 1, changes={"parallel3d.train.ema": {"decay": DECAY}})
    [error] = worst_of([case], tmp_path, partial(moved, how))
    assert error > 10 * BOUND


def evaluated_on_rank(rank, case):
    """Return the losses of a batch before, with and after the averages; and if weights are equal.

    The weights with the averages are compared with the averages in the training type.
    """
    number_anew()
    trainer = trained(case)
    batch = trainer.batches()[0]

    def losses():
        trainer.evaluator.run(batch)
        own = trainer.evaluator.token_losses
        return None if own is None else own.double().clone()

    engine = trainer.engine
    states = [losses()]
    with engine.averaged():
        states.append(losses())
    states.append(losses())
    trainer.close()
    return states


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, mesh=(1, 2, 1), precision="bf16"),
        pytest.param(
            replace(CASE, mesh=(1, 2, 1), zero_stage=3, offload="nvme+param-nvme"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(CASE, zero_stage=3, weights="per_step", mesh=(2, 1, 1)), marks=pytest.mark.slow
        ),
        pytest.param(
            replace(CASE, mesh=(1, 2, 1), model={}, changes=CASE.changes | MUON),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(
                CASE,
                mesh=(1, 2, 1),
                model=MOE,
                changes=CASE.changes | {"parallel3d.mesh.ep": 2},
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_weights_are_the_averages_inside_and_their_own_again_after(case, tmp_path):
    case = replace(case, folder=str(tmp_path))
    for before, inside, after in run_locally(evaluated_on_rank, case.world_size, case):
        if before is not None:
            assert torch.equal(before, after)
            assert not torch.equal(before, inside)
            assert float((before - inside).abs().max()) < 0.2
