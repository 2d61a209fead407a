"""Two sound checkpoints, made by hand, and what is bad in one."""

import pytest

from parallel3d.checkpoint.manifest import verify
from tests.checkpoint.folders import make_checkpoint


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path)


@pytest.fixture
def other(tmp_path):
    return make_checkpoint(tmp_path, step=20, seed=1)


def bad_files(folder):
    return [bad.file for bad in verify(folder)]
