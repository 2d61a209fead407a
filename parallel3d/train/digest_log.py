"""The observer that writes digests of the training state to the run's folder."""

from pathlib import Path

from parallel3d.checkpoint.chunk_runs import state_checksums
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.spec import named_params
from parallel3d.train.assembly import Assembly
from parallel3d.train.digests import append_digest
from parallel3d.train.observer import Observer, Step, is_due


class DigestLog(Observer):
    """Writes a digest of the state every `train.digest_every` steps, on the rank that reports."""

    collectives = "all_gather of checksums, after every digest_every steps"

    def __init__(
        self, every: int, mesh: Mesh, parts: Assembly, *, folder: Path, writes: bool
    ) -> None:
        self._every = every
        self._mesh = mesh
        self._engine = parts.engine
        self._shapes = {name: spec.shape for name, spec in named_params(parts.layers).items()}
        self._folder = folder
        self._writes = writes

    def after(self, step: Step) -> None:
        """Write a digest if one is due."""
        done = step.number + 1
        if is_due(self._every, done):
            pulse.doing(f"the digest of step {done}")
            checksums = state_checksums(self._engine, self._mesh, self._shapes)
            if self._writes:
                append_digest(self._folder, done, checksums)
