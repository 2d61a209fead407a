"""Orders between streams, as DeepSpeed runs beside an accelerator: recorded on a stand-in."""

from unittest.mock import patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from parallel3d.engine.quirks import streams
from parallel3d.verify.local_ranks import run_locally
from tests.asynchronous import asynchronous
from tests.cases import Case, Trainer, unpatched

pytestmark = pytest.mark.gloo

# The fifth rank of five holds no part of a vector of 16 elements.
SMALL = {"hidden_size": 16, "num_hidden_layers": 1}
FIVE = Case(mesh=(1, 5, 1), weights="per_step", model=SMALL, batch=5, microbatches=1, steps=1)


def freed_on_rank(rank, case, has_remedy):
    """How many gradients a step frees that a stream has used, and where without recording it."""
    remedy = streams.keep_gradients_until_reduced if has_remedy else lambda optimizer: None
    with (
        asynchronous() as waits,
        patch.object(streams, "keep_gradients_until_reduced", remedy),
    ):
        trainer = Trainer(case)
        trainer.run()
        trainer.close()
    return waits.frees.total(), waits.frees.unsafe


@pytest.mark.parametrize("has_remedy", [True, pytest.param(False, marks=unpatched)])
def test_gradient_lives_until_its_reduction_has_read_it(has_remedy):
    *others, last = run_locally(freed_on_rank, 5, FIVE, has_remedy)
    assert all(freed and not unsafe for freed, unsafe in others)
    freed, unsafe = last
    place = "deepspeed/runtime/zero/stage3.py:partition_grads"
    assert freed and (unsafe == {} if has_remedy else unsafe.keys() == {place})


OVERLAP = {"zero_optimization.overlap_comm": True}
OVERLAPPED = [
    Case(mesh=(1, 2, 1), zero_stage=stage, reduction=reduction, changes=OVERLAP, batch=8, steps=2)
    for stage in (1, 2, 3)
    for reduction in ("per_step", "per_microbatch")
]


def unsafe_on_rank(rank, cases):
    places = []
    for case in cases:
        with asynchronous() as waits:
            trainer = Trainer(case)
            trainer.run()
            trainer.close()
        places.append(waits.frees.unsafe)
    return places


@pytest.mark.slow
def test_no_gradient_is_freed_while_a_reduction_overlaps():
    assert run_locally(unsafe_on_rank, 2, OVERLAPPED) == [[{}] * len(OVERLAPPED)] * 2


def replace_gradient(weight):
    weight.grad = torch.zeros(4)


def free_gradient(weight):
    weight.grad = None


def replace_data(weight):
    weight.grad.data = torch.zeros(4)


# How the side stream is made safe before the gradient goes, and whether that is enough.
REMEDIES = {
    "nothing": (lambda weight, side: None, False),
    "record": (lambda weight, side: weight.grad.record_stream(side), True),
    "default stream waits": (
        lambda weight, side: get_accelerator().default_stream().wait_stream(side),
        True,
    ),
    "host waits": (lambda weight, side: side.synchronize(), True),
    "record another": (
        lambda weight, side: weight.grad.record_stream(get_accelerator().current_stream()),
        False,
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("fault", [replace_gradient, free_gradient, replace_data])
def test_gradient_freed_while_a_stream_uses_it_is_counted(fault, name):
    remedy, is_safe = REMEDIES[name]
    with asynchronous() as waits:
        side = get_accelerator().Stream()
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        with get_accelerator().stream(side):
            weight.grad * 2
        remedy(weight, side)
        fault(weight)
        assert waits.frees.unsafe == ({} if is_safe else {"elsewhere": 1})


def gathers_on_rank(rank, case):
    """Whether the stream of gathers waits for the default stream between update and gather."""
    events = []
    with asynchronous():
        accelerator = get_accelerator()
        stream_class = type(accelerator.current_stream())
        trainer = Trainer(case)
        optimizer = trainer.engine.deepspeed.optimizer
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


ONE_LAYER = {"num_hidden_layers": 1}
ONE_MICROBATCH = Case(mesh=(1, 2, 1), batch=2, microbatches=1, steps=2, model=ONE_LAYER)


def test_gathers_wait_for_the_update():
    events = run_locally(gathers_on_rank, 2, ONE_MICROBATCH)[0]
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
            optimizer = trainer.engine.deepspeed.optimizer
            name = "reduce_and_partition_stream" if case.zero_stage == 3 else "reduction_stream"
            given.append(getattr(optimizer, name).priority)
            trainer.close()
    return given


def test_reductions_run_on_an_urgent_stream():
    overlap = {"zero_optimization.overlap_comm": True}
    cases = [Case(zero_stage=stage, changes=overlap, model=ONE_LAYER) for stage in (1, 3)]
    assert run_locally(priorities_on_rank, 1, cases) == [[-1, -1]]


@pytest.mark.usefixtures("cpu_adam", "async_io")
def test_nvme_read_waits_for_the_previous_copy(tmp_path):
    case = Case(
        mesh=(1, 2, 1),
        weights="per_step",
        offload="param-nvme",
        folder=str(tmp_path),
        batch=2,
        microbatches=1,
        steps=1,
        model=ONE_LAYER,
    )
    assert all(run_locally(waits_on_rank, 2, case))


def waits_on_rank(rank, case):
    with asynchronous() as waits:
        trainer = Trainer(case)
        waits.take()
        trainer.run()
        count = waits.take().get(("stream.synchronize", "parallel3d/engine/gathering.py:gather"))
        trainer.close()
    return count
