"""Two sound checkpoints, made by hand, and what is bad in one."""

import pytest


@pytest.fixture
def folder(tmp_path):
    from tests.checkpoint.folders import make_checkpoint  # torch, which pure tests do without

    return make_checkpoint(tmp_path)


@pytest.fixture
def other(tmp_path):
    from tests.checkpoint.folders import make_checkpoint

    return make_checkpoint(tmp_path, step=20, seed=1)


def bad_files(folder):
    from parallel3d.checkpoint.manifest import verify

    return [bad.file for bad in verify(folder)]
