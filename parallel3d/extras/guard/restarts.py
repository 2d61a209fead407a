"""The restarts of a run from the memory of its hosts, as its folder's memory.json records them."""

import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from parallel3d.base.atomic import replace_text
from parallel3d.base.section import Section
from parallel3d.train.metrics import step_reached

MEMORY_FILE = "memory.json"


class MemoryRecord(Section):
    """The contents of memory.json."""

    name: str = ""
    """The name of the run in the memory of its hosts."""
    restarts: tuple[tuple[int, int], ...] = ()
    """The step that each restart loaded from memory, and the one that the run had reached."""


class Restarts:
    """The record of one run. Only rank 0 reads and writes it."""

    def __init__(self, folder: Path) -> None:
        """Create the record of the run in `folder`, without looking at it."""
        self._folder = folder
        place = blake2b(str(folder.absolute()).encode(), digest_size=8).hexdigest()
        self._prefix = f"{folder.name}-{place}-"

    def name_and_refused(self) -> tuple[str, int]:
        """Return the run's name in memory, and the step up to which none is loaded again.

        A step is refused if the run was restored from it twice, or failed twice at the same step
        after it; -1 refuses none.
        """
        record = self._read()
        reached = step_reached(self._folder)
        steps = [step for step, _ in record.restarts]
        refused = -1
        for step, before in record.restarts:
            if before == reached or steps.count(step) > 1:
                refused = max(refused, step)
        return record.name or self._new_name(), refused

    def note(self, step: int) -> None:
        """Record that a step is about to be loaded from memory."""
        record = self._read()
        self._write(record.name, (*record.restarts, (step, step_reached(self._folder))))

    def rename(self) -> None:
        """Give the run another name in memory, under which it has no steps yet."""
        self._write(self._new_name())

    @property
    def name(self) -> str:
        """The recorded name; "" if there is none."""
        return self._read().name

    def _read(self) -> MemoryRecord:
        """Return the record; a new one if it is damaged, missing, or of another folder."""
        try:
            record = MemoryRecord.model_validate_json((self._folder / MEMORY_FILE).read_bytes())
        except (OSError, ValueError):
            return MemoryRecord()
        is_own = (
            record.name.startswith(self._prefix)
            and record.name.removeprefix(self._prefix).isalnum()
        )
        return record if is_own else MemoryRecord()

    def _write(self, name: str, restarts: tuple[tuple[int, int], ...] = ()) -> None:
        record = MemoryRecord(name=name, restarts=restarts)
        with suppress(OSError):  # then the next start does not find its steps
            replace_text(self._folder / MEMORY_FILE, f"{record.model_dump_json()}\n")

    def _new_name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(8)}"
