"""Tests run on the CPU, also where there are GPUs; `pytest -m gpu` runs those that need one."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine fails no example: nothing of a test is timed.
BUSY = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, **BUSY)  # the same examples in every run
settings.register_profile("random", derandomize=False, **BUSY)


def pytest_configure(config):
    slow = "slow" in config.option.markexpr.replace("not slow", "")
    settings.load_profile("random" if slow else "default")
    # Before anything imports torch: the ranks are forked from a process that has it loaded.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config, items):
    """What is slow, or needs a GPU, runs where `-m` names it."""
    left_out = [mark for mark in ("slow", "gpu") if mark not in config.option.markexpr]
    unwanted = {item for item in items if any(map(item.get_closest_marker, left_out))}
    if unwanted:
        config.hook.pytest_deselected(items=[item for item in items if item in unwanted])
        items[:] = [item for item in items if item not in unwanted]


def pytest_ignore_collect(collection_path, config):
    """With `-m pure` no other file is read: to import torch takes longer than the whole tier."""
    if config.option.markexpr != "pure" or not collection_path.name.startswith("test_"):
        return None
    return "mark.pure" not in collection_path.read_text() or None


def pytest_addoption(parser):
    parser.addoption("--parity-table", help="write the table of test_parity_in_full to this file")
    parser.addoption("--resharding-table", help="write what test_every_pair found to this file")


LAUNCHERS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_launch_stays_behind():
    """A mesh of one process tells DeepSpeed its local rank; the next test shall not hear of it."""
    before = {name: os.environ.get(name) for name in LAUNCHERS_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def operators():
    """DeepSpeed's compiled operators: minutes where there are none yet, on no rank's time."""
    # Only now: tests without ranks do without torch, too.
    from parallel3d.config import RunConfig
    from parallel3d.verify.measure import compile_operators
    from tests.verify.configs import config_of

    compile_operators(RunConfig.from_dict(config_of(offload="nvme+nvme")))
