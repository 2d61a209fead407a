"""torch.compile of what lies between products, and of blocks: the same losses, compiled once."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

from parallel3d.tensor import compiled
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE, errors_of
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

LLAMA = {
    "family": "llama", "num_key_value_heads": 2, "tie_word_embeddings": False,
    "num_hidden_layers": 2,
}  # fmt: skip
NEOX = {"family": "neox", "num_hidden_layers": 2, "tie_word_embeddings": False}
SMALL = {"steps": 3, "batch": 8, "microbatches": 2}


@contextmanager
def by(backend):
    """`inductor` needs a compiler; `aot_eager` runs the graphs that it would be given."""
    torch._inductor.config.compile_threads = 1
    with patch.object(compiled, "use", partial(compiled.use, backend=backend)):
        yield


def train_on_rank(rank, case, backend, reference):
    """Differences from the reference, and what was compiled by each step and each evaluation."""
    with by(backend):
        trainer = Trainer(case)
        counted, step = [], trainer.engine.step

        def counts_after(lr):
            counted.append(compiled.counts())
            return step(lr)

        trainer.engine.step = counts_after
        found = trainer.compare(reference)
        for batch in trainer.batches()[:2]:
            trainer.evaluator.run(batch)
            counted.append(compiled.counts())
        trainer.close()
    graphs = counted[-1].graphs
    assert compiled.in_words().startswith(f"compile {mode_of(case)}: {graphs} graphs, ")
    return found, counted


def mode_of(case):
    return case.config.train.compile


def check(case, backend, breaks=(), timeout=60):
    ranks = run_locally(
        train_on_rank, case.world_size, case, backend, case.reference, timeout=timeout
    )
    errors = errors_of(case.config, [found for found, _ in ranks])
    assert errors.within(TOLERANCE["fp32"]), errors
    for _, (first, second, third, evaluated, again) in ranks:
        assert first.graphs > 0 and first.graphs == second.graphs == third.graphs
        assert evaluated.graphs == again.graphs  # without gradients it is another graph
        assert len(again.breaks) <= len(breaks), again.breaks
        assert all(any(b in said for b in breaks) for said in again.breaks), again.breaks
    return ranks


def case(mode, **settings):
    changes = {"parallel3d.train.compile": mode}
    return Case(**{"model": LLAMA, "tied": False, "changes": changes, **SMALL, **settings})


def test_what_lies_between_products_is_compiled_once():
    """Under ZeRO-3, whose hooks stay outside, and with blocks that are computed again."""
    check(case("pointwise", checkpointing="full"), "aot_eager")


IN_FULL = {
    "llama": case("pointwise", zero_stage=3, mesh=(2, 1, 2), sequence_parallel=True),
    "neox": case("pointwise", model=NEOX, checkpointing="selective"),
    "gpt": case("pointwise", model={"num_hidden_layers": 2}, tied=True, zero_stage=2),
    "llama block": case("block", zero_stage=1),
    "llama block again": case("block", zero_stage=0, checkpointing="full"),
    "neox block": case("block", model=NEOX, zero_stage=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FULL)
def test_losses_by_inductor(name):
    check(IN_FULL[name], "inductor", timeout=230)
