"""The memory of a run's hosts: `memory.json` in the run's folder has its name, and its restarts.

Only rank 0 reads and writes the file.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Section
from parallel3d.checkpoint.in_memory import HostMemory
from parallel3d.config.parallel3d_block import CheckpointConfig
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.train.metrics import step_reached

MEMORY_FILE = "memory.json"


class MemoryRecord(Section):
    """The contents of memory.json."""

    name: str = ""
    """The name of the run in the memory of its hosts."""
    restarts: tuple[tuple[int, int], ...] = ()
    """The step that each restart loaded from memory, and the one that the run had reached."""


def open_memory(
    settings: CheckpointConfig, mesh: Mesh, nodes: Nodes, folder: Path, say: Callable[[str], None]
) -> HostMemory | None:
    """Return the memory of the hosts of a run in `folder`; None if it is off. Collective."""
    if not settings.in_memory_every:
        return None
    root = Path(settings.in_memory_folder)

    def require_folder() -> None:
        if not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(
                f'parallel3d.checkpoint.in_memory_folder: "{root}" on {nodes.hosts[mesh.rank]}: '
                f"rank {mesh.rank} cannot write there; name a folder in memory of each host"
            )

    def read() -> tuple[str, int]:
        record = _read_record(folder)
        reached = step_reached(folder)
        steps = [step for step, _ in record.restarts]
        refused = -1
        for step, before in record.restarts:
            if before == reached or steps.count(step) > 1:
                refused = max(refused, step)
        return record.name or _new_name(folder), refused

    agree(mesh, require_folder)
    memory = HostMemory(mesh, nodes, root, *on_first(mesh, read))
    hosts = "a copy on the next host" if memory.peers else "ONE HOST: no copy on another one"
    say(f"memory  every {settings.in_memory_every} steps to {memory.folder}; {hosts}")
    return memory


def note_restart(folder: Path, step: int) -> None:
    """Record that a step is about to be loaded from memory."""
    record = _read_record(folder)
    _write_record(folder, record.name, (*record.restarts, (step, step_reached(folder))))


def begin_memory(memory: HostMemory | None, mesh: Mesh, folder: Path, step: int = -1) -> None:
    """Keep the steps in memory up to `step`, from which the run goes on; -1 keeps none.

    Collective. A run that goes on from elsewhere gets another name, because a host that is absent
    may come back with steps that are no longer part of the run.
    """
    if memory is None:
        if mesh.rank == 0:
            with suppress(OSError):
                (folder / MEMORY_FILE).unlink(missing_ok=True)
        return

    def renew() -> str:
        if step < 0:
            _write_record(folder, _new_name(folder))
        return _read_record(folder).name

    memory.keep(on_first(mesh, renew), step)


def _read_record(folder: Path) -> MemoryRecord:
    """Return the record of a run; a new one if it is damaged, missing, or of another folder."""
    try:
        record = MemoryRecord.model_validate_json((folder / MEMORY_FILE).read_bytes())
    except (OSError, ValueError):
        return MemoryRecord()
    prefix = _prefix_of(folder)
    is_own = record.name.startswith(prefix) and record.name.removeprefix(prefix).isalnum()
    return record if is_own else MemoryRecord()


def _write_record(folder: Path, name: str, restarts: tuple[tuple[int, int], ...] = ()) -> None:
    record = MemoryRecord(name=name, restarts=restarts)
    with suppress(OSError):  # then the next start does not find its steps
        replace_text(folder / MEMORY_FILE, f"{record.model_dump_json()}\n")


def _new_name(folder: Path) -> str:
    return f"{_prefix_of(folder)}{secrets.token_hex(8)}"


def _prefix_of(folder: Path) -> str:
    place = blake2b(str(folder.absolute()).encode(), digest_size=8).hexdigest()
    return f"{folder.name}-{place}-"
