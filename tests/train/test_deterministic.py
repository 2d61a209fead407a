"""A deterministic run fixes the order in which NCCL sums, before there are groups."""

import os
from unittest.mock import patch

import pytest

from parallel3d.mesh import mesh
from parallel3d.mesh.launch import Launch
from parallel3d.train.ending import join
from tests.cases import Case

pytestmark = pytest.mark.gloo


def variables_at_join(deterministic, environment):
    """NCCL's variables when the mesh is made."""
    config = Case(changes={"parallel3d.train.deterministic": deterministic}).config
    seen = {}
    with (
        patch.dict(os.environ, environment),
        patch.object(mesh, "Mesh", lambda *args, **options: seen.update(os.environ)),
    ):
        join(config, Launch(0, 1, 0))
    return {name: value for name, value in seen.items() if name.startswith("NCCL_")}


def test_nccl_sums_in_one_order():
    assert variables_at_join(True, {}) == {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
    assert variables_at_join(False, {}) == {}


def test_users_choice_stays():
    variables = variables_at_join(True, {"NCCL_ALGO": "Tree"})
    assert variables == {"NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0"}
