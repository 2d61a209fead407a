"""Under ZeRO-3's own hooks each pass of a stage sends ahead for its next modules' weights."""

from collections import Counter
from dataclasses import replace

import pytest

from parallel3d.engine.quirks import tracing
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, measure, unpatched

pytestmark = pytest.mark.gloo

# All weights are cut, and none is kept for a second use; a layer's worth is fetched ahead.
AHEAD = {
    "zero_optimization.stage3_prefetch_bucket_size": 20_000,
    "zero_optimization.stage3_max_live_parameters": 1_000_000,
}
CASE = Case(
    mesh=(2, 2, 1),
    schedule="interleaved",
    stages_per_rank=2,
    microbatches=2,
    steps=3,
    changes=AHEAD,
    model={"num_hidden_layers": 6},
)


def no_trace(traces, stage, direction):
    """Stand in for `Traces.begin`."""


def fetches(rank, cases, traced):
    """Of each case's third step: fetches by direction, and whether a module waits for it."""
    counts = []
    for case in cases:
        if not traced:
            tracing.Traces.begin = no_trace
        trainer = Trainer(case)
        batches = trainer.batches()
        for batch in batches[:2]:
            trainer.executor.run(batch)
            trainer.engine.step(trainer.lr)
        coordinator = trainer.engine.deepspeed.optimizer.parameter_offload.get_param_coordinator()
        profiler = vars(coordinator)["_PartitionedParameterCoordinator__profiler"]
        seen: Counter[str] = Counter()

        def count_event(name, seen=seen):
            seen[name] += 1

        profiler.start_event = count_event
        trainer.executor.run(batches[2], 2)
        counts.append(dict(seen))
        trainer.close()
    return counts


# By default two stages of each rank take turns without a pipeline.
SMALL = replace(
    CASE, mesh=(1, 2, 1), schedule="breadth_first", batch=8, model={"num_hidden_layers": 4}
)
CASES = [
    CASE,
    replace(CASE, schedule="gpipe", stages_per_rank=1),
    replace(CASE, schedule="one_f_one_b", stages_per_rank=1, checkpointing="full"),
]


@pytest.mark.parametrize(
    "cases", [[SMALL], pytest.param(CASES, marks=pytest.mark.slow)], ids=["one", "others"]
)
def test_pass_waits_only_for_its_first_module(cases):
    """A fetch that nobody sent for ahead is one for each pass of a stage, at most."""
    for ranks in run_locally(fetches, cases[0].world_size, cases, True):
        for case, seen in zip(cases, ranks, strict=True):
            passes = case.microbatches * case.stages_per_rank
            for way in ("forward", "backward"):
                print(case, way, seen)
                assert seen.get(f"{way}_fetch_submit", 0) <= passes
                assert seen[f"{way}_prefetch_submit"] >= passes


def num_fetches(seen, kind):
    """Return the number of fetches of this kind in both directions."""
    return sum(seen.get(f"{way}_{kind}_submit", 0) for way in ("forward", "backward"))


@unpatched
def test_nearly_all_modules_wait_without_a_trace_per_pass():
    for ranks in run_locally(fetches, 4, CASES[:1], False):
        for seen in ranks:
            waited = num_fetches(seen, "fetch")
            ahead = num_fetches(seen, "prefetch")
            assert ahead < 0.1 * waited, seen


@pytest.mark.parametrize(
    "case",
    [SMALL, *(pytest.param(case, marks=pytest.mark.slow) for case in (CASE, CASES[2]))],
    ids=str,
)
def test_traced_training_matches_one_process(case):
    errors = measure(case)
    assert errors.within(1e-5), errors
