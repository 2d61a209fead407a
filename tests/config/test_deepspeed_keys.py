"""parallel3d's tables of DeepSpeed's keys and defaults, against the installed DeepSpeed.

What fails here with a new DeepSpeed is what has to become a setting or stand in deepspeed_keys.py.
"""

from contextlib import contextmanager
from inspect import signature
from itertools import cycle
from unittest.mock import patch

import pytest
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.monitor import config as monitor
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import HybridEngineConfig
from deepspeed.runtime.model_checkpointing.config import CHECKPOINT_DEFAULT_DICT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

from parallel3d.config import RunConfig, deepspeed, deepspeed_keys, monitors
from parallel3d.config.run_settings import RunSettings
from parallel3d.config.scheduler import SCHEDULERS
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.selftest import self_test
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import optimizers
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, measure, unpatched
from tests.config.configs import REMOVED, raw

pytestmark = pytest.mark.gloo

# Read by deepspeed.initialize, not by DeepSpeedConfig.
MESH_KEYS = {"sequence_parallel_size", "data_parallel_size"}
OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"


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


def test_top_level_keys_are_those_of_deepspeed():
    recorder = Recorder({"train_batch_size": 1})
    deepspeed_config.DeepSpeedConfig(recorder)
    known = recorder.asked | set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | MESH_KEYS
    ours = set(RunSettings.model_fields) - {"parallel3d"}
    assert ours | set(deepspeed_keys.TOP_LEVEL) == known
    assert not ours & set(deepspeed_keys.TOP_LEVEL)


@pytest.mark.parametrize(
    ("theirs", "ours", "path"),
    [
        (DeepSpeedZeroConfig, deepspeed.ZeroConfig, "zero_optimization"),
        (DeepSpeedBF16Config, deepspeed.Bf16Config, "bf16"),
        (DeepSpeedFP16Config, deepspeed.Fp16Config, "fp16"),
        (DeepSpeedZeroOffloadOptimizerConfig, deepspeed.OffloadOptimizerConfig, OPTIMIZER),
        (DeepSpeedZeroOffloadParamConfig, deepspeed.OffloadParamConfig, PARAM),
    ],
    ids=["zero", "bf16", "fp16", "offload_optimizer", "offload_param"],
)
def test_section_has_keys_and_defaults_of_deepspeed(theirs, ours, path):
    """Every key is a setting with DeepSpeed's default, or one of which the default is accepted."""
    removed = deepspeed_config._REMOVED_ZERO_CONFIG_KEYS if path == "zero_optimization" else ()
    fields = theirs.model_fields
    others = deepspeed_keys.BY_SECTION.get(path, {})
    defaults = {f.alias or n: f.get_default(call_default_factory=True) for n, f in fields.items()}
    assert set(ours.model_fields) | set(others) == set(defaults) | set(removed)
    assert not set(ours.model_fields) & set(others)
    for name, field in ours.model_fields.items():
        # A block of its own stands for DeepSpeed's null: device "none".
        if not field.is_required() and name not in ("offload_optimizer", "offload_param"):
            assert field.default == defaults[name], name
    for name, key in others.items():
        if name in defaults and name != "leaf_module":  # the default is a list of models
            assert not [*key.problems(name, defaults[name])]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (monitor.TensorBoardConfig, monitors.TensorBoardConfig),
        (monitor.WandbConfig, monitors.WandbConfig),
        (monitor.CSVConfig, monitors.CsvMonitorConfig),
        (monitor.CometConfig, monitors.CometConfig),
        (CommsLoggerConfig, monitors.CommsLoggerConfig),
    ],
)
def test_monitors_have_keys_and_defaults_of_deepspeed(theirs, ours):
    """Every key, with DeepSpeed's default."""
    defaults = {name: field.default for name, field in theirs.model_fields.items()}
    our_defaults = {name: field.default for name, field in ours.model_fields.items()}
    if "prof_ops" in our_defaults:
        our_defaults["prof_ops"] = []  # ours is a tuple
        for name in deepspeed_keys.BY_SECTION["comms_logger"]:
            defaults.pop(name, None)
    assert our_defaults == defaults


def test_flops_profiler_has_defaults_of_deepspeed():
    theirs = vars(DeepSpeedFlopsProfilerConfig({}))
    our_defaults = monitors.FlopsProfilerConfig().model_dump()
    others = deepspeed_keys.BY_SECTION["flops_profiler"]
    assert our_defaults == {name: theirs[name] for name in theirs if name not in others}


def test_monitors_are_hidden_from_deepspeed():
    """Else it would open the trackers a second time."""
    on = {name: {"enabled": True} for name in monitors.SWITCHED}
    config = RunConfig.from_dict(raw(**on, wall_clock_breakdown=True)).resolve(4)
    passed_on = EngineSettings.from_config(config).deepspeed_config(1)
    assert not set(passed_on) & {*monitors.SWITCHED, "wall_clock_breakdown"}


def test_aio_has_defaults_of_deepspeed():
    ours = {name: field.default for name, field in deepspeed.AioConfig.model_fields.items()}
    others = deepspeed_keys.BY_SECTION["aio"].items()
    neutral = {name: key.values[0] for name, key in others if key.values}
    assert ours | neutral == AIO_DEFAULT_DICT


def test_schedulers_have_parameters_of_deepspeed():
    """Every parameter is a setting with DeepSpeed's default, or one accepted at it."""
    others = deepspeed_keys.BY_SECTION["scheduler.params"]
    for name, section in SCHEDULERS.items():
        code = getattr(lr_schedules, name).__init__
        names = code.__code__.co_varnames[2 : code.__code__.co_argcount]
        defaults = dict(zip(reversed(names), reversed(code.__defaults__), strict=False))
        ours = section.model_fields["params"].annotation.model_fields
        assert set(ours) == set(names) - set(others), name
        for key, default in defaults.items():
            if key in others:
                assert not [*others[key].problems(key, default)]
            else:
                assert ours[key].default == default, key


def test_scalar_defaults_are_those_of_deepspeed():
    config = deepspeed_config.DeepSpeedConfig({"train_batch_size": 1})
    assert RunSettings.model_fields["gradient_clipping"].default == config.gradient_clipping
    for name, key in deepspeed_keys.TOP_LEVEL.items():
        if hasattr(config, name) and not key.switch and not key.items and name != "pipeline":
            default = getattr(config, name)
            # DeepSpeed's own default asks for its own Adam in host memory.
            if isinstance(default, bool | float) and name != "zero_force_ds_cpu_optimizer":
                assert not [*key.problems(name, default)]


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("activation_checkpointing", ACT_CHKPT_DEFAULT),
        ("checkpoint", CHECKPOINT_DEFAULT_DICT),
        ("data_types", dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"))),
    ],
)
def test_block_of_defaults_is_accepted(name, defaults):
    assert set(defaults) <= set(deepspeed_keys.TOP_LEVEL[name].items)
    assert not [*deepspeed_keys.TOP_LEVEL[name].problems(name, defaults)]


@pytest.mark.parametrize(
    ("name", "section"), [("compile", CompileConfig), ("hybrid_engine", HybridEngineConfig)]
)
def test_switch_of_a_block_is_off_by_default(name, section):
    key = deepspeed_keys.TOP_LEVEL[name]
    assert section.model_fields[key.switch].default is False
    assert {key.switch, *key.beside} == set(section.model_fields)


def test_blocks_read_key_by_key_have_the_keys_of_deepspeed():
    autotuning = Recorder({"enabled": False})
    DeepSpeedAutotuningConfig({"autotuning": autotuning})
    experts = Recorder({"enabled": False})
    parse_autoep_config(experts)
    for name, asked in (("autotuning", autotuning.asked), ("expert_parallel", experts.asked)):
        key = deepspeed_keys.TOP_LEVEL[name]
        assert {key.switch, *key.beside} >= asked, asked - {*key.beside}


def test_optimizer_parameters_are_those_of_deepspeed():
    code = DeepSpeedCPUAdam.__init__.__code__
    known = set(code.co_varnames[2 : code.co_argcount]) - {"adamw_mode"}
    others = deepspeed_keys.BY_SECTION["optimizer.params"]
    known |= set(signature(FusedAdam).parameters) - {"params"}
    assert known <= set(optimizers.load("adamw").Params.model_fields) | set(others)
    config = RunConfig.from_dict(raw(optimizer=REMOVED))
    for adam in (FusedAdam, DeepSpeedCPUAdam):
        defaults = {name: p.default for name, p in signature(adam).parameters.items()}
        for name, value in config.optimizer.params.model_dump().items():
            assert value == defaults[name], name


REDUCTIONS = ("per_microbatch", "per_step")
# Settings of zero_optimization at another value than the default, and a stage that reads them.
PASSED_ON = [
    (1, {"reduce_bucket_size": 100}),
    (1, {"contiguous_gradients": False}),
    (1, {"overlap_comm": True, "allgather_bucket_size": 16}),
    (1, {"use_multi_rank_bucket_allreduce": False}),
    (3, {"overlap_comm": False, "sub_group_size": 50}),
    (3, {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 10**6}),
    (3, {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}),
]


def passed_on():
    """Settings of the engine with each of them, and the options."""
    threshold = {"stage3_param_persistence_threshold": 0}
    for (stage, options), reduction in zip(PASSED_ON, cycle(REDUCTIONS), strict=False):
        block = {
            "parallel3d.mesh": {},
            "parallel3d.pipeline.gradient_reduction": reduction,
            "zero_optimization": {"stage": stage, **threshold, **options},
        }
        config = RunConfig.from_dict(raw(**block)).resolve(2)
        yield EngineSettings.from_config(config), options


def run_each(rank, keys):
    mesh = Mesh(dp=2)
    number = 0
    for settings, options in passed_on():
        if keys & options.keys():
            self_test(settings, mesh)
            number += 1
    return number


# They change which collectives run, and in which pieces.
FEW = {"reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size"}


@pytest.mark.parametrize(
    "keys",
    [FEW, pytest.param(set(deepspeed.ZeroConfig.model_fields), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_passed_on_settings_do_not_change_the_numbers(keys):
    """Two steps against plain PyTorch, with each setting away from its default."""
    expected = sum(bool(keys & options.keys()) for _, options in PASSED_ON)
    assert run_locally(run_each, 2, keys) == [expected] * 2


def test_passed_on_settings_reach_deepspeed():
    for settings, options in passed_on():
        zero_config = settings.deepspeed_config(2)["zero_optimization"]
        assert {key: zero_config[key] for key in options} == options
    elsewhere = {"stage", "offload_optimizer", "offload_param"}
    here = {key for _, options in PASSED_ON for key in options}
    assert here | elsewhere == set(deepspeed.ZeroConfig.model_fields)


# Weights of odd sizes.
ODD = Case(
    mesh=(1, 2, 1),
    zero_stage=1,
    steps=2,
    batch=8,
    model={"hidden_size": 30, "num_attention_heads": 3},
)


@contextmanager
def round_robin():
    told = EngineSettings.deepspeed_config

    def config(settings, *sizes):
        config = told(settings, *sizes)
        config["zero_optimization"]["round_robin_gradients"] = True
        return config

    with patch.object(EngineSettings, "deepspeed_config", config):
        yield


@unpatched
def test_round_robin_gradients_read_wrong_weights():
    """Losses and norms are right, but the weights that DeepSpeed reads back are not."""
    assert "round_robin_gradients" in deepspeed_keys.BY_SECTION["zero_optimization"]
    errors = measure(ODD, round_robin)
    assert max(errors.loss, errors.grad_norm) < 1e-5
    assert errors.weight > 0.1
