"""Find the newest checkpoint that every rank can use, checking all of it (docs/checkpoint.md).

Each rank reads a share of the files in full, compares their digests, and checks that tensor files
are valid.
"""

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.on_disk import verify_on_all_ranks
from parallel3d.checkpoint.places import FoundCheckpoint, Place
from parallel3d.mesh.mesh import Mesh


def find_named(folder: Path, resume: int | str, mesh: Mesh) -> FoundCheckpoint:
    """Return the checkpoint that checkpoint.resume names: a step of the run, or a path.

    Collective. Raises CheckpointError on all ranks if it cannot be used.

    - `folder`: the run's checkpoints on disk.
    """
    path = folder / f"step-{resume}" if isinstance(resume, int) else Path(resume)
    try:
        return verify_on_all_ranks(path, mesh)
    except CheckpointError as error:
        setting = f'parallel3d.checkpoint.resume = "{resume}"'
        raise CheckpointError(f"{setting}: {path} {error}") from None


def find_newest(places: Sequence[Place]) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return the newest checkpoint that can be used, or None, and why newer ones were rejected.

    Collective. Of equal steps, that of the first place comes first.
    """
    rejected: list[str] = []
    held = [(step, version, place) for place in places for step, version in place.steps()]
    # Steps that are equal stay in the order of their places.
    for step, version, place in sorted(held, key=itemgetter(0), reverse=True):
        try:
            return place.verify(step, version), rejected
        except CheckpointError as error:
            rejected.append(f"step-{step} {error}")
    return None, rejected
