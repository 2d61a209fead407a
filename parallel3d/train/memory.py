"""A run's name in the memory of its hosts, and its restarts from there.

Both are in `memory.json` in the run's folder, which only rank 0 reads and writes.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from socket import gethostname

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Section
from parallel3d.checkpoint.in_memory import HostMemory
from parallel3d.config.parallel3d_block import CheckpointConfig
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.train.metrics import step_reached

FILE = "memory.json"
_MOST_RESTARTS = 2  # from one step


class Record(Section):
    """The contents of memory.json."""

    name: str = ""
    restarts: tuple[tuple[int, int], ...] = ()
    """The step that each restart loaded from memory, and the one that the run had reached."""


def open_memory(
    settings: CheckpointConfig, mesh: Mesh, nodes: Nodes, folder: Path, say: Callable[[str], None]
) -> HostMemory | None:
    """Return the memory of the hosts of a run in `folder`; None if it is off. Collective."""
    if not settings.in_memory_every:
        return None

    def read() -> tuple[str, int]:
        record, reached = _read(folder), step_reached(folder)
        steps = [step for step, _ in record.restarts]
        refused = [
            step
            for step, before in record.restarts
            if before == reached or steps.count(step) >= _MOST_RESTARTS
        ]
        return record.name or _new_name(folder), max(refused, default=-1)

    root = Path(settings.in_memory_folder)

    def require_folder() -> None:
        if not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(
                f'parallel3d.checkpoint.in_memory_folder: "{root}" on {gethostname()}: rank '
                f"{mesh.rank} cannot write there; name a folder in memory that exists on each host"
            )

    agree(mesh, require_folder)
    name, refused = on_first(mesh, read)
    memory = HostMemory(mesh, nodes, root, name, refused)
    hosts = "a copy on the next host" if memory.peers else "ONE HOST: no copy on another one"
    say(f"memory  every {settings.in_memory_every} steps to {memory.folder}; {hosts}")
    return memory


def saves_due(settings: CheckpointConfig, step: int, asked: bool) -> tuple[bool, bool]:
    """Return whether to save on disk and in memory after a step; `asked`: on disk in any case."""
    every, in_memory_every = settings.every, settings.in_memory_every
    on_disk = asked or step in settings.at or (every > 0 and step % every == 0)
    return on_disk, not asked and in_memory_every > 0 and step % in_memory_every == 0


def note_restart(folder: Path, step: int) -> None:
    """Record that a step is about to be loaded from memory."""
    record = _read(folder)
    _write(folder, record.name, (*record.restarts, (step, step_reached(folder))))


def begin_memory(memory: HostMemory | None, mesh: Mesh, folder: Path, step: int = -1) -> None:
    """Keep the steps in memory up to `step`, from which the run goes on; -1 keeps none.

    Collective. A run that goes on from elsewhere gets another name, because a host that is absent
    may come back with steps that are no longer part of the run.
    """
    if memory is None:
        if mesh.rank == 0:
            with suppress(OSError):
                (folder / FILE).unlink(missing_ok=True)
        return

    def renew() -> str:
        if step < 0:
            _write(folder, _new_name(folder))
        return _read(folder).name

    memory.keep(on_first(mesh, renew), step)


def _read(folder: Path) -> Record:
    """Return the record of a run; a new one if it is damaged, missing, or of another folder."""
    try:
        record = Record.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return Record()
    own = record.name.startswith(prefix := _prefix(folder))
    return record if own and record.name.removeprefix(prefix).isalnum() else Record()


def _write(folder: Path, name: str, restarts: tuple[tuple[int, int], ...] = ()) -> None:
    record = Record(name=name, restarts=restarts)
    with suppress(OSError):  # then the next start does not find its steps
        replace_text(folder / FILE, f"{record.model_dump_json()}\n")


def _new_name(folder: Path) -> str:
    return f"{_prefix(folder)}{secrets.token_hex(8)}"


def _prefix(folder: Path) -> str:
    place = blake2b(str(folder.absolute()).encode(), digest_size=8).hexdigest()
    return f"{folder.name}-{place}-"
