"""Each remedy of the engine's messages is applied as it is written, and the engine goes on."""

import os
import resource

import pytest
from torch.utils import cpp_extension

from parallel3d.base.errors import ConfigError
from parallel3d.engine import op_builds, swap
from parallel3d.engine.quirks import nvme
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.remedies import refused

pytestmark = pytest.mark.gloo

LARGE = 10**9
NOBODY = 65534


def build(rank, cases):
    """Build an engine of each case; return the messages of those that are refused."""
    messages = []
    for case in cases:
        try:
            Trainer(case)
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_larger_groups_are_the_same_on_all_stages():
    cases = []
    for size in (5000, LARGE):
        cases.append(Case(mesh=(2, 1, 1), changes={"zero_optimization.sub_group_size": size}))
    for small, large in run_locally(build, 2, cases, timeout=100):
        assert "splits the stages into different numbers of optimizer groups" in small
        assert small.endswith("use a larger value")
        assert large == ""


@pytest.mark.skipif(not hasattr(cpp_extension, "FileBaton"), reason="the kernel frees the lock")
def test_lock_that_is_never_released_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(op_builds, "_BUILD_SECONDS", 0.2)
    path = tmp_path / "lock"
    path.touch()
    with refused("if no other process is compiling, a build was killed: delete the file"):
        op_builds._is_released(path)
    path.unlink()
    assert op_builds._is_released(path)


def test_same_command_is_started_again_after_a_killed_build(tmp_path):
    builder = os.fork()
    if not builder:
        op_builds._BuildLock(str(tmp_path / "lock")).try_acquire()
        os._exit(0)
    os.waitpid(builder, 0)
    with refused("the build was killed; start the same command again"):
        op_builds._BuildLock(str(tmp_path / "lock")).wait()
    assert op_builds._BuildLock(str(tmp_path / "lock")).try_acquire()


def check_writable(rank, paths):
    mesh = Mesh()
    with refused("use a folder that exists and is writable on every node"):
        swap.check_writable(paths[0], mesh, "nvme_path")
    swap.check_writable(paths[1], mesh, "nvme_path")


def test_swap_folder_exists_and_is_writable(tmp_path):
    run_locally(check_writable, 1, [str(tmp_path / "nowhere"), str(tmp_path)])


def lock_memory(rank, limit, num_bytes):
    """Lock memory as a user who has this limit; return the message, if it is refused."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    os.setuid(NOBODY)
    try:
        nvme._check_lockable(num_bytes)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_limit_of_locked_memory_is_raised():
    num_bytes = 2**20
    [message] = run_locally(lock_memory, 1, 2**16, num_bytes)
    assert "needs to lock a buffer of 1.0 MiB" in message and "ulimit -l unlimited" in message
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= hard < num_bytes:
        pytest.skip("the limit of this machine is lower")
    assert run_locally(lock_memory, 1, hard, num_bytes) == [""]
