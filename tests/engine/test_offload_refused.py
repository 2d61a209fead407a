"""DeepSpeed gets wrong what config/deepspeed_checks.py refuses under NVMe offload."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest

from parallel3d.engine import EngineSettings
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.cases import measure, unpatched
from tests.engine.test_offload import on_nvme, small

pytestmark = pytest.mark.gloo


@contextmanager
def optimizer_options(**options):
    """Tell DeepSpeed what the config refuses."""
    told = EngineSettings.deepspeed_config

    def config(settings, *sizes):
        config = told(settings, *sizes)
        config["zero_optimization"]["offload_optimizer"] |= options
        return config

    with patch.object(EngineSettings, "deepspeed_config", config):
        yield


@on_nvme
@unpatched
def test_fast_start_trains_from_wrong_weights(tmp_path):
    case = small("nvme+param-nvme", tmp_path, {"offload_param.buffer_size": 100_000})
    errors = measure(case, partial(optimizer_options, fast_init=True), run_locally)
    assert errors.weight > 1e-2, errors


@on_nvme
@pytest.mark.parametrize("buffers", [pytest.param(4, marks=pytest.mark.slow), 7])
@unpatched
def test_reading_ahead_runs_out_of_too_few_buffers(buffers, tmp_path):
    refused = partial(optimizer_options, pipeline_read=True, buffer_count=buffers)
    with pytest.raises(RankFailed, match="AssertionError"):
        measure(small("nvme", tmp_path, {"sub_group_size": 8000}), refused, run_locally)


@on_nvme
@unpatched
def test_unsharded_parameters_on_nvme_are_missing(tmp_path):
    threshold = {"stage3_param_persistence_threshold": 10**5}
    with pytest.raises(RankFailed, match=r"same dtype|size|shape"):
        measure(small("param-nvme", tmp_path, threshold, mesh=(1, 2, 1)), run=run_locally)
