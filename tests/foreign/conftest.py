"""Checkpoints that several files of tests read."""

import os

import pytest

from tests.foreign.plain import Run


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Nothing here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A distributed checkpoint of plain torch, for tests that do not change it."""
    made = tmp_path_factory.mktemp("plain")
    Run().save(made)
    return made
