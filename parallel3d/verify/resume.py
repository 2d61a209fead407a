"""A small run that is saved, and goes on on another mesh, as a run does."""

from pathlib import Path
from typing import Any

from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.resume import find
from parallel3d.checkpoint.save import Saver
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly


def save(parts: Assembly, mesh: Mesh, state: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint, and wait for it. Raises CheckpointError."""
    saver = Saver(parts.engine, mesh, parts.layers, folder=folder, asynchronous=False)
    saver.save(state, wait=True)
    saver.require_saved()


def go_on(parts: Assembly, mesh: Mesh, state: RunState, folder: Path) -> Position:
    """Load the newest checkpoint; the position at which training goes on."""
    found, _ = find(folder, "auto", mesh)
    assert found is not None, folder
    position = state.position_in(found.state, found.folder, lambda text: None)
    load(
        found.folder,
        found.files,
        found.state,
        engine=parts.engine,
        mesh=mesh,
        layers=parts.layers,
    )
    return position
