"""Tests run on the CPU, also where there are GPUs; `pytest -m gpu` runs those that need one."""

import fcntl
import gc
import os
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from tests import compiling as compiler

# Also where the environment asks for no compiled files: three workers and hundreds of processes
# would each compile the library and the tests anew.
sys.dont_write_bytecode = False
# A busy machine fails no example: nothing of a test is timed.
BUSY = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples in every run, half as many as of those that are drawn anew.
settings.register_profile("default", derandomize=True, max_examples=50, **BUSY)
settings.register_profile("random", derandomize=False, **BUSY)


def pytest_configure(config):
    gc.disable()  # imports are no garbage; enabled again in pytest_collection_finish
    slow = "slow" in config.option.markexpr.replace("not slow", "")
    settings.load_profile("random" if slow else "default")
    # Not the user's own hardware; nothing is there.
    os.environ["XDG_CONFIG_HOME"] = str(config.rootpath / ".pytest_cache" / "config")
    # Before anything imports torch: the ranks are forked from a process that has it loaded.
    if config.option.markexpr not in ("gpu", "gpu_first"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else a name that is no hub's is retried
        # Tiny products on many threads spend their time waiting.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session):
    """What the ranks of tests import is loaded where they are forked from."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)  # tests in this process hold little; a tenth of the pure tier's time
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if is_first and any(map(compiler.needs_async_io, session.items)):
        session.config.stash[OPERATORS] = compiler.begin()
    if any(item.get_closest_marker("gloo") for item in session.items):
        from parallel3d.verify import local_ranks

        local_ranks.PRELOAD[:] = ["tests.verify.asking", *local_ranks.PRELOAD, *PRELOAD]


def pytest_sessionfinish(session):
    gc.freeze()  # pytest looks for garbage five times more
    if process := session.config.stash.get(OPERATORS, None):
        compiler.end(process)


def order(item):
    """Late what offloads, as launches do: operators are compiled beside the tests before it.

    What swaps to NVMe comes after it, and what is small last, so that no worker is idle at the end.
    """
    if item.get_closest_marker("pure"):
        return 3
    if compiler.needs_async_io(item):
        return 2
    return int(item.get_closest_marker("drill") is not None or compiler.needs_cpu_adam(item))


def pytest_collection_modifyitems(config, items):
    """What is slow, or needs a GPU, runs where `-m` names it."""
    left_out = [mark for mark in ("slow", "gpu") if mark not in config.option.markexpr]
    unwanted = {item for item in items if any(map(item.get_closest_marker, left_out))}
    if unwanted:
        config.hook.pytest_deselected(items=[item for item in items if item in unwanted])
        items[:] = [item for item in items if item not in unwanted]
    last = {}  # the latest order of a file's tests: one worker takes a file
    for item in items:
        last[item.path] = max(order(item), last.get(item.path, 0))
    items.sort(key=lambda item: last[item.path])  # and within each as they were


def pytest_ignore_collect(collection_path, config):
    """With `-m pure` no other file is read: to import torch takes longer than the whole tier."""
    if config.option.markexpr != "pure" or not collection_path.name.startswith("test_"):
        return None
    return "mark.pure" not in collection_path.read_text() or None


def pytest_addoption(parser):
    parser.addoption("--parity-table", help="write the table of test_parity_in_full to this file")
    parser.addoption(
        "--resharding-table", help="write the results of test_every_pair_of_all_meshes to this file"
    )


PRELOAD = [
    "launch.train",
    "parallel3d.train.trainer",
    "parallel3d.huggingface.from_ranks",
    "parallel3d.engine.selftest",
    "safetensors.torch",
    "pytest",
    "hypothesis",
    "tests.cases",
    "parallel3d.train.output",
    "parallel3d.model.optimizers.adamw",
    "parallel3d.model.optimizers.muon",
    # Tokenizers and exports load it; it takes longer than most tests' training.
    *(f"transformers.models.{x}.modeling_{x}" for x in ("gpt2", "llama", "gpt_neox")),
    # Half of what DeepSpeed would import in each rank, as it builds an engine.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.comm.mori",
    "deepspeed.utils.pin_memory",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "encodings.idna",  # for the name of the host
]
OPERATORS = pytest.StashKey()
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
def cpu_adam(request, tmp_path_factory):
    """DeepSpeed's Adam for the host, compiled on no test's time; False where it cannot be."""
    from parallel3d.engine.op_builds import load_cpu_adam

    with compiling(request, tmp_path_factory) as (mesh, say):
        return load_cpu_adam(mesh, say)


@pytest.fixture(autouse=True)
def compiled_before_launches(request):
    """What the default config offloads with is compiled on no launch's time."""
    if request.node.get_closest_marker("drill"):
        request.getfixturevalue("cpu_adam")


@pytest.fixture(scope="session")
def async_io(request, tmp_path_factory):
    """DeepSpeed's reads and writes of NVMe, compiled on no test's time; skips where not."""
    from parallel3d.base.errors import ConfigError
    from parallel3d.engine.op_builds import load_async_io

    with compiling(request, tmp_path_factory) as (mesh, say):
        try:
            load_async_io(mesh, say)
        except ConfigError as error:
            pytest.skip(str(error))


@pytest.fixture
def operators(request):
    """What a test's parameters offload is compiled before its own time runs."""
    if compiler.needs_cpu_adam(request.node):
        request.getfixturevalue("cpu_adam")
    if compiler.needs_async_io(request.node):
        request.getfixturevalue("async_io")


@contextmanager
def compiling(request, tmp_path_factory):
    """A mesh of this process, and a way to the terminal past pytest's capture.

    One worker of xdist at a time, so that the other ones find what the first has compiled.
    """
    from parallel3d.mesh.mesh import Mesh

    capture = request.config.pluginmanager.getplugin("capturemanager")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder

    def say(text):
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", file=sys.__stderr__, flush=True)

    with patch.dict(os.environ), open(folder / "operators.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.environ |= compiler.environment()
        mesh = Mesh()
        try:
            yield mesh, say
        finally:
            mesh.close()
