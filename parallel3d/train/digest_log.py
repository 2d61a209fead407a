"""The observer that writes digests of the training state to the run's folder."""

from pathlib import Path

from parallel3d.checkpoint.chunk_runs import state_checksums
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.spec import named_params
from parallel3d.train.assembly import Assembly
from parallel3d.train.digests import append_digest
from parallel3d.train.observer import Observer, Step


class DigestLog(Observer):
    """Writes a digest of the state every `train.digest_every` steps; only one rank has a folder."""

    collectives = "all_gather of checksums, after every digest_every steps"

    def __init__(self, every: int, mesh: Mesh, parts: Assembly, folder: Path | None) -> None:
        self.every = every
        self._mesh = mesh
        self._engine = parts.engine
        self._shapes = {name: spec.shape for name, spec in named_params(parts.layers).items()}
        self._folder = folder

    def after(self, step: Step) -> None:
        """Write a digest if one is due."""
        if self.is_due(step):
            done = step.end.step
            pulse.doing(f"the digest of step {done}")
            checksums = state_checksums(self._engine, self._mesh, self._shapes)
            if self._folder:
                append_digest(self._folder, done, checksums)
