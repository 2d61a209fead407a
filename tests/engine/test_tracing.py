"""Under ZeRO-3's own hooks each pass of a stage sends ahead for its next modules' weights."""

from collections import Counter
from dataclasses import replace

import pytest

from parallel3d.engine.quirks import tracing
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, unpatched
from tests.verify.measuring import errors_of, number_anew

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


def fetches(rank, jobs, traced):
    """Return each case's errors, and its third step's fetches: by direction, and if one waits."""
    rows = []
    for case, reference in jobs:
        if not traced:
            tracing.Traces.begin = no_trace
        number_anew()
        trainer = Trainer(case)
        coordinator = trainer.engine.deepspeed.optimizer.parameter_offload.get_param_coordinator()
        profiler = vars(coordinator)["_PartitionedParameterCoordinator__profiler"]
        by_step = [Counter() for _ in range(case.steps)]
        steps = iter(by_step)
        run = trainer.executor.run

        def counted(batch, step, profiler=profiler, steps=steps, run=run):
            profiler.start_event = count_in(next(steps))
            return run(batch, step)

        trainer.executor.run = counted
        errors = trainer.compare(reference)
        trainer.close()
        rows.append((errors, by_step[2]))
    return rows


def count_in(events):
    """Return a stand-in for a profiler's `start_event` that counts names."""

    def count_event(name):
        events[name] += 1

    return count_event


# By default two stages of each rank take turns without a pipeline.
SMALL = replace(
    CASE, mesh=(1, 2, 1), schedule="breadth_first", batch=4, model={"num_hidden_layers": 2}
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
    """A fetch that nobody sent for ahead is one for each pass of a stage, at most.

    The numbers are those of one process.
    """
    jobs = [(case, case.reference) for case in cases]
    ranks = run_locally(fetches, cases[0].world_size, jobs, True)
    for case, rows in zip(cases, zip(*ranks, strict=True), strict=True):
        errors = errors_of(case.config, [deviations for deviations, _ in rows])
        assert errors.within(1e-5), (case, errors)
        passes = case.microbatches * case.stages_per_rank
        for _, seen in rows:
            for way in ("forward", "backward"):
                print(case, way, seen)
                assert seen[f"{way}_fetch_submit"] <= passes
                assert seen[f"{way}_prefetch_submit"] >= passes


def num_fetches(seen, kind):
    """Return the number of fetches of this kind in both directions."""
    return sum(seen.get(f"{way}_{kind}_submit", 0) for way in ("forward", "backward"))


@unpatched
def test_nearly_all_modules_wait_without_a_trace_per_pass():
    jobs = [(case, case.reference) for case in CASES[:1]]
    for rows in run_locally(fetches, 4, jobs, False):
        for _, seen in rows:
            waited = num_fetches(seen, "fetch")
            ahead = num_fetches(seen, "prefetch")
            assert ahead < 0.1 * waited, seen
