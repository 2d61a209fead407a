"""Orders between streams, as DeepSpeed runs beside an accelerator: recorded on a stand-in."""

from unittest.mock import patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from parallel3d.engine.quirks import streams
from parallel3d.verify.local_ranks import run_locally
from tests.asynchronous import asynchronous
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

# The fifth rank of five holds no part of a vector of 16 elements.
SMALL = {"hidden_size": 16, "num_hidden_layers": 2}
FIVE = Case(
    mesh=(1, 5, 1), weights="per_step", model=SMALL, batch=10, microbatches=2, steps=1
)  # fmt: skip


def freed_on_rank(rank, case, has_remedy):
    """How many gradients a step frees, and how many of them without recording a stream."""
    recorded, freed = set(), []
    with (
        asynchronous(),
        patch.object(torch.Tensor, "record_stream", lambda self, stream: recorded.add(id(self))),
    ):
        remedy = streams.keep_gradients_until_reduced if has_remedy else lambda optimizer: None
        with patch.object(streams, "keep_gradients_until_reduced", remedy):
            trainer = Trainer(case)
        optimizer = trainer.engine._deepspeed.optimizer
        partition = optimizer.partition_grads

        def watched(parameters, parts):
            gradients = [p.grad for p in parameters]
            result = partition(parameters, parts)
            freed.extend(id(g) in recorded for g in gradients if g is not None)
            return result

        optimizer.partition_grads = watched
        trainer.run()
        trainer.close()
    return len(freed), freed.count(False)


@pytest.mark.parametrize("has_remedy", [True, False])
def test_a_gradient_lives_until_the_stream_that_reduces_it_has_read_it(has_remedy):
    *others, last = run_locally(freed_on_rank, 5, FIVE, has_remedy)
    assert all(freed > 0 == unrecorded for freed, unrecorded in others)
    freed, unrecorded = last
    assert freed and (unrecorded == 0) == has_remedy


def gathers_on_rank(rank, case):
    """Whether the stream of gathers waits for the default stream between update and gather."""
    events = []
    with asynchronous():
        accelerator = get_accelerator()
        stream_class = type(accelerator.current_stream())
        trainer = Trainer(case)
        optimizer = trainer.engine._deepspeed.optimizer
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        gathers = getattr(coordinator, streams._GATHER_STREAM)

        def wait_stream(self, other):
            if self is gathers and other is accelerator.current_stream():
                events.append("wait")

        def noting(name, call):
            def noted(*args, **options):
                events.append(name)
                return call(*args, **options)

            return noted

        gather = "_PartitionedParameterCoordinator__all_gather_params"
        with (
            patch.object(stream_class, "wait_stream", wait_stream),
            patch.object(optimizer, "_post_step", noting("update", optimizer._post_step)),
            patch.object(coordinator, gather, noting("gather", getattr(coordinator, gather))),
        ):
            trainer.run()
        trainer.close()
    return events


def test_gathers_wait_for_the_update():
    events = run_locally(gathers_on_rank, 2, Case(mesh=(1, 2, 1), batch=8, steps=2))[0]
    after = events[events.index("update") + 1 :]
    assert "gather" in after
    assert "wait" in after[: after.index("gather")]


def priorities_on_rank(rank, cases):
    given = []
    for case in cases:
        with asynchronous():
            stream_class = type(get_accelerator().current_stream())

            def make(self, *args, **options):
                self.priority = options.get("priority", 0)

            with patch.object(stream_class, "__init__", make):
                trainer = Trainer(case)
            optimizer = trainer.engine._deepspeed.optimizer
            name = "reduce_and_partition_stream" if case.zero_stage == 3 else "reduction_stream"
            given.append(getattr(optimizer, name).priority)
            trainer.close()
    return given


def test_reductions_have_an_urgent_stream():
    overlap = {"zero_optimization.overlap_comm": True}
    cases = [Case(zero_stage=stage, changes=overlap) for stage in (1, 3)]
    assert run_locally(priorities_on_rank, 1, cases) == [[-1, -1]]


@pytest.mark.usefixtures("cpu_adam", "async_io")
def test_a_read_from_nvme_waits_for_the_copy_of_the_one_before(tmp_path):
    case = Case(
        mesh=(1, 2, 1), weights="per_step", offload="param-nvme", folder=str(tmp_path), batch=8,
        steps=1,
    )  # fmt: skip
    assert all(run_locally(waits_on_rank, 2, case))


def waits_on_rank(rank, case):
    with asynchronous() as waits:
        trainer = Trainer(case)
        waits.take()
        trainer.run()
        count = waits.take().get(("stream.synchronize", "parallel3d/engine/gathering.py:gather"))
        trainer.close()
    return count
