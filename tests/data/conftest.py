"""Fixtures: a folder of documents, and settings for it."""

import os
from pathlib import Path

import pytest

from parallel3d.data import lines, rows
from tests.data.documents import TEXTS, Settings

# Nothing here may ask a hub, even where a network exists.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Nothing here cuts the power, and a tenth of the time were calls of fsync."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of documents that are awkward in every way that should not matter."""
    root = tmp_path / "texts"
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> Settings:
    """All documents of `folder`, with a cache that does not exist yet."""
    return Settings(paths=(f"{folder}/**/*.txt",), cache=str(tmp_path / "cache"))


@pytest.fixture
def small(monkeypatch):
    """Let 1,000 bytes count as a long text, so that the code for long texts runs."""
    monkeypatch.setattr(lines, "PIECE_BYTES", 1000)
    monkeypatch.setattr(rows, "PIECE_BYTES", 1000)
