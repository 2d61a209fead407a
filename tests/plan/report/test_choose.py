"""What "mesh": "plan" leaves as the config has it."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.plan.report.choose import choose
from tests.plan.toy_cluster import config, machine

pytestmark = pytest.mark.pure


def test_what_the_config_keeps():
    raw = config().to_dict()
    raw["zero_optimization"]["stage"] = 3
    raw["parallel3d"]["plan"] = {"fix": ["zero_stage", "recompute", "gradient_reduction"]}
    raw["parallel3d"]["pipeline"]["activation_checkpointing"] = "selective"
    chosen, plan = choose(RunConfig.from_dict(raw), 8, machine())
    assert chosen.zero_optimization.stage == 3 and plan.setting.recompute == "selective"
    assert plan.setting.reduces_once  # as "auto" means at ZeRO-3


def test_weights_that_are_fixed_stay_gathered_as_long_as_the_config_says():
    raw = config().to_dict()
    raw["zero_optimization"]["stage"] = 3
    raw["parallel3d"]["plan"] = {"fix": ["zero_stage", "weights"]}
    raw["parallel3d"]["pipeline"]["weights"] = "per_microbatch"
    kept, plan = choose(RunConfig.from_dict(raw), 4, machine())
    assert plan.setting.weights == kept.pipeline.weights == "per_microbatch"
    raw["parallel3d"]["pipeline"]["weights"] = "auto"
    free, plan = choose(RunConfig.from_dict(raw), 4, machine())
    assert plan.setting.weights == free.pipeline.weights == "per_step"
