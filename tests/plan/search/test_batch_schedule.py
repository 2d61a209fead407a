"""Plans with train.batch_schedule: against one plan for each of its batches."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.plan.report.plan_rows import apply, as_written
from parallel3d.plan.request import request_of
from parallel3d.plan.search.best_first import search
from parallel3d.plan.setting import Setting
from tests.plan.toy_cluster import GIB, config, machine

pytestmark = pytest.mark.pure

PHASES = {8: 5, 24: 4, 16: 3}  # samples per step: steps
SCHEDULE = [[0, 8], [40, 24], [136, 16]]


def config_with(train, **changes):
    raw = config(8, 6).to_dict() | changes
    raw["parallel3d"]["train"] |= {"steps": None, "max_tokens": None, "epochs": None} | train
    return RunConfig.from_dict(raw)


def test_days_and_memory_are_those_of_the_largest_batch():
    devices = 4
    cluster = machine(8 * GIB)
    seq = config(8, 6).data.sequence_length
    samples = sum(size * steps for size, steps in PHASES.items())
    for length in ({"steps": 12}, {"max_tokens": samples * seq}):
        planned = config_with(length | {"batch_schedule": SCHEDULE})
        request = request_of(planned, cluster, devices)
        assert request.num_tokens == samples * seq and request.global_batch_size == 24
        plans = search(request, rows=6).plans
        assert len({plan.setting.mesh for plan in plans}) > 1
        for plan in plans:
            chosen = apply(planned, plan).resolve(devices)
            assert chosen.train.steps == 12 and chosen.train_batch_size == 8
            assert Setting.from_config(chosen).num_microbatches == plan.setting.num_microbatches
            raw = chosen.to_dict() | {"train_batch_size": 24, "gradient_accumulation_steps": None}
            raw["parallel3d"]["train"] |= {"batch_schedule": [], "steps": 1}
            constant = RunConfig.from_dict(raw).resolve(devices)
            alone = as_written(constant, request_of(constant, cluster, devices))
            assert alone.memory == plan.memory
            assert plan.days == pytest.approx(alone.days * samples / 24, rel=1e-9)
            again = as_written(chosen, request_of(chosen, cluster, devices))
            assert again.days == pytest.approx(plan.days, rel=1e-9)


def test_days_are_unknown_only_with_epochs():
    open_ended = config_with({"epochs": 1.0, "batch_schedule": SCHEDULE})
    request = request_of(open_ended, machine(8 * GIB), 4)
    assert request.num_tokens is None and request.global_batch_size == 24
    assert search(request, rows=1).plans[0].days is None
