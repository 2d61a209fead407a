"""The learning rates against DeepSpeed's own schedulers and torch's, step by step (one process)."""

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from parallel3d.config import LrScheduleConfig
from parallel3d.config.learning_rate import fraction, rate
from parallel3d.config.scheduler import SCHEDULERS
from tests.config.configs import complete

pytestmark = pytest.mark.gloo

STEPS = 40
LR = 3e-3
CASES = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 7}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 7, "warmup_type": "linear",
                       "warmup_min_lr": 1e-5, "warmup_max_lr": 4e-3}),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 10, "warmup_max_lr": None}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 7}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 7, "warmup_min_ratio": 0.1,
                        "cos_min_ratio": 0.2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 5}),
]  # fmt: skip


def adam():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates_of(scheduler, optimizer, steps):
    """What the optimizer of a training loop finds at each step."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("name", "params"), CASES)
def test_rates_equal_those_of_deepspeed(name, params):
    optimizer = adam()
    expected = rates_of(getattr(lr_schedules, name)(optimizer, **params), optimizer, STEPS)
    block = {"type": name, "params": params}
    config = complete(**{"optimizer.params.lr": LR, "scheduler": block})
    assert [rate(config, step) for step in range(STEPS)] == pytest.approx(expected, abs=1e-15)


def test_every_deepspeed_scheduler_has_a_class_and_a_case():
    refused = {"OneCycle", "LRRangeTest"}
    assert set(SCHEDULERS) | refused == set(lr_schedules.VALID_LR_SCHEDULES)
    assert set(SCHEDULERS) == {name for name, _ in CASES}


def test_cosine_and_linear_rates_equal_those_of_torch():
    """Ours reaches the floor at the last step, torch's with the step after `T_max` or `total`."""
    n = 24
    floor = 0.25
    for kind, scheduler in (
        ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, n, eta_min=LR * floor)),
        ("linear", lambda o: lr_scheduler.LinearLR(o, 1.0, floor, n)),
    ):
        optimizer = adam()
        expected = rates_of(scheduler(optimizer), optimizer, n + 1)
        schedule = LrScheduleConfig(type=kind, min_ratio=floor)
        ours = [LR * fraction(schedule, step, n) for step in range(n)]
        assert ours == pytest.approx(expected[1:])
