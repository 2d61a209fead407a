"""A barrier holds up the host, also where a device runs its queue behind the host's back."""

import time

import pytest

from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally
from tests.mesh.late import LateDevice

pytestmark = pytest.mark.gloo

LATE = 0.2  # seconds by which rank 1 comes later


def barrier_on_rank(rank):
    mesh = Mesh(dp=2)
    with LateDevice() as device:
        time.sleep(LATE * rank)
        start = time.monotonic()
        mesh.barrier()
        assert not device.queued
        waited = time.monotonic() - start
        with mesh.one_at_a_time() as first:
            at = time.monotonic()
            time.sleep(LATE if first else 0)
    return waited, at


def test_barrier_blocks_the_host():
    """Compilation one rank after another, clocks and the end of an export rest on it."""
    (waited, first), (_, second) = run_locally(barrier_on_rank, 2, timeout=30)
    assert waited > LATE / 2
    assert second - first > LATE / 2
