"""parallel3d's tables of DeepSpeed's keys and defaults, against the installed DeepSpeed.

What fails here with a new DeepSpeed is what has to be supported or refused in deepspeed_keys.py.
"""

import pytest
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

from parallel3d.config import RunConfig, deepspeed, deepspeed_keys

# Read by deepspeed.initialize, not by DeepSpeedConfig.
MESH_KEYS = {"sequence_parallel_size", "data_parallel_size"}


class Recorder(dict):
    """A config that notes which keys DeepSpeed asks for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_top_level_keys():
    recorder = Recorder({"train_batch_size": 1})
    deepspeed_config.DeepSpeedConfig(recorder)
    known = recorder.asked | set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | MESH_KEYS
    ours = set(RunConfig.model_fields) - {"parallel3d"}
    assert ours | set(deepspeed_keys.TOP_LEVEL) == known
    assert not ours & set(deepspeed_keys.TOP_LEVEL)


@pytest.mark.parametrize(
    ("theirs", "ours", "refused", "removed"),
    [
        (
            DeepSpeedZeroConfig,
            deepspeed.ZeroConfig,
            deepspeed_keys.ZERO,
            deepspeed_config._REMOVED_ZERO_CONFIG_KEYS,
        ),
        (DeepSpeedBF16Config, deepspeed.Bf16Config, deepspeed_keys.BF16, ()),
        (DeepSpeedFP16Config, deepspeed.Fp16Config, deepspeed_keys.FP16, ()),
        (
            DeepSpeedZeroOffloadOptimizerConfig,
            deepspeed.OffloadOptimizerConfig,
            deepspeed_keys.OFFLOAD_OPTIMIZER,
            (),
        ),
        (
            DeepSpeedZeroOffloadParamConfig,
            deepspeed.OffloadParamConfig,
            deepspeed_keys.OFFLOAD_PARAM,
            (),
        ),
    ],
    ids=["zero", "bf16", "fp16", "offload_optimizer", "offload_param"],
)
def test_section(theirs, ours, refused, removed):
    """Every key is supported with DeepSpeed's default, or refused."""
    defaults = {field.alias or name: field.default for name, field in theirs.model_fields.items()}
    assert set(ours.model_fields) | set(refused) == set(defaults) | set(removed)
    assert not set(ours.model_fields) & set(refused)
    for name, field in ours.model_fields.items():
        # A block of its own stands for DeepSpeed's null: device "none".
        if not field.is_required() and name != "offload_optimizer":
            assert field.default == defaults[name], name


def test_scalar_defaults():
    config = deepspeed_config.DeepSpeedConfig({"train_batch_size": 1})
    assert RunConfig.model_fields["gradient_clipping"].default == config.gradient_clipping


def test_optimizers():
    names = {"adam", "adamw", *deepspeed.OTHER_OPTIMIZERS}
    assert names == set(deepspeed_config.DEEPSPEED_OPTIMIZERS)
