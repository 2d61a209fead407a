"""Checkpoints that several files of tests read."""

import pytest

from tests.foreign.plain import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A distributed checkpoint of plain torch, for tests that do not change it."""
    made = tmp_path_factory.mktemp("plain")
    Run().save(made)
    return made
