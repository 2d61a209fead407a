"""A killed conversion leaves nothing that looks whole, and the same command starts again."""

import os
import signal

import pytest

from parallel3d.checkpoint.manifest import verify
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from tests.foreign.continuing import assert_no_checkpoint, convert_checkpoint
from tests.foreign.plain import SEEN, Run
from tests.foreign.sources import write_config

pytestmark = pytest.mark.gloo

RENAME = "checkpoint.before_rename"


def in_a_child(fault, *args):
    """Convert in a forked process with a fault; return how it ended, as `waitpid` says it."""
    child = os.fork()
    if not child:
        os.environ["PARALLEL3D_FAULT"] = fault
        code = 1
        try:
            code = convert_checkpoint(*args)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """The arguments of a conversion, and the points that it passes."""
    root = tmp_path_factory.mktemp("killed")
    config = write_config(root, warmup=0)
    Run().save(root / "theirs")
    prepare(RunConfig.from_json(str(config)).data)
    args = (root / "theirs", root / "runs" / "recorded", config, *SEEN)
    assert in_a_child(f"record {root}/points", *args) == 0
    points = (root / "points-0").read_text().splitlines()
    return args[0], config, points


def check_kill(tmp_path, conversion, number):
    """Kill at a point, counted from 1; then convert."""
    source, config, points = conversion
    run = tmp_path / "runs" / f"killed-{number}"
    args = (source, run, config, *SEEN)
    assert in_a_child(f"kill * {number}", *args) == -signal.SIGKILL
    whole = run / "checkpoints" / "step-3"
    if whole.exists():
        assert RENAME in points[:number], "it has its name before everything is written"
        assert verify(whole) == []
        return
    assert_no_checkpoint(run)
    assert convert_checkpoint(*args) == 0
    assert verify(whole) == []


def test_killed_conversion_leaves_nothing_whole(tmp_path, conversion):
    points = conversion[2]
    assert points.count(RENAME) == 1 and len(points) > 50
    check_kill(tmp_path, conversion, points.index(RENAME) + 1)  # everything else is written


@pytest.mark.slow
def test_conversion_killed_at_any_point_leaves_nothing_whole(tmp_path, conversion):
    for number in range(1, len(conversion[2]) + 1):
        check_kill(tmp_path, conversion, number)


def test_full_disk_leaves_nothing_whole(tmp_path, conversion):
    source, config, points = conversion
    run = tmp_path / "runs" / "full"
    assert in_a_child(f"full * {len(points) // 2}", source, run, config, *SEEN) == 1
    assert_no_checkpoint(run)
