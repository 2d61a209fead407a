"""The first words of a start: from there on garbage is collected, and what was loaded is none."""

import gc

import pytest
from rich.console import Console

from parallel3d.mesh.mesh import Mesh
from parallel3d.train import startup
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case

pytestmark = pytest.mark.gloo


def begun_on_rank(rank):
    gc.unfreeze()
    gc.disable()  # as launch/train.py does before it loads torch
    mesh = Mesh()
    startup.begin(Case().config, mesh, Console(quiet=True))
    startup.collect_again()
    mesh.close()
    return gc.isenabled(), gc.get_freeze_count()


def test_what_a_start_has_loaded_is_not_searched_for_garbage():
    ((is_on, frozen),) = run_locally(begun_on_rank, 1, timeout=60)
    assert is_on and frozen > 100_000
