"""Restarts: the folder of this launch, and whether a run dies at every attempt (no torch).

Both are in `attempts.json` in the run's folder, which rank 0 alone reads and writes.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import TrainingError
from parallel3d.base.lock import start_of
from parallel3d.base.section import Section
from parallel3d.mesh.launch import jobs_of_this_process
from parallel3d.train.stopping import Stopped

FILE = "attempts.json"
MOST_DEATHS = 3  # at one step, in a row


class Record(Section):
    """The contents of attempts.json."""

    launch: str = ""
    settings: str = ""
    deaths: tuple[int, ...] = ()
    """The steps reached, the newest last."""
    running: bool = False
    stopped: bool = False
    config: str = ""


def launch_identity() -> str:
    """Return an identity of this launch that stays when its launcher restarts the ranks.

    The job's own name (`torchrun --rdzv_id`, Slurm's number); else the host, number and start of
    the launcher, the parent process. Plain python processes of one shell share an identity.
    """
    if jobs := jobs_of_this_process():
        kind, name, _ = jobs[-1]
        return "_".join(f"{kind}:{name}".split())
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {start_of(parent)}"


def folder_of_this_launch(directory: Path, config: str) -> Path | None:
    """Return the newest run that an earlier attempt of this launch began; only after a restart.

    `config` is the digest of what is trained: a run of another belongs to another launch.
    """
    mine = launch_identity()
    return _newest(directory, lambda record: (record.launch, record.config) == (mine, config))


def unfinished(directory: Path, config: str) -> Path | None:
    """Return the newest unfinished run of a config in `directory`."""

    def fits(record: Record) -> bool:
        goes_on = record.running or record.stopped or bool(record.deaths)
        return goes_on and record.config == config

    return _newest(directory, fits)


def _newest(directory: Path, fits: Callable[[Record], bool]) -> Path | None:
    found = []
    for path in directory.glob(f"*/{FILE}"):
        if fits(_read(path)):
            with suppress(OSError):  # it is being removed
                found.append((path.stat().st_mtime_ns, path.parent))
    return max(found)[1] if found else None


def _read(path: Path) -> Record:
    """Read a record; a new one if the file is damaged or missing."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return Record()


class Attempts:
    """The attempts at one run; each leaves its death on record unless it ends clean.

    With other `settings` it has a fresh chance; `config` is the digest that `unfinished` looks for.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], config: str = "") -> None:
        self._path, self._config = folder / FILE, config
        text = json.dumps(settings, sort_keys=True)
        self._settings = blake2b(text.encode(), digest_size=16).hexdigest()

    def begin(self, step: int, restart: bool = False) -> None:
        """Record a new attempt; `step` is the last step that the attempt before it finished.

        Raises TrainingError if the last three attempts died at one step, and Stopped if the
        launcher `restart`s what ended on request.
        """
        self._write(deaths=self.check(step, restart), running=True)

    def check(self, step: int, restart: bool = False) -> tuple[int, ...]:
        """The steps at which the last attempts died; raises as `begin` does, and enters nothing."""
        record = _read(self._path)
        if restart and record.stopped and record.launch == launch_identity():
            raise Stopped
        deaths = record.deaths if record.settings == self._settings else ()
        if record.running and record.settings == self._settings:
            deaths = (*deaths, step)[-MOST_DEATHS:]
        if len(deaths) == MOST_DEATHS and len(set(deaths)) == 1:
            self._write(deaths=deaths)
            raise TrainingError(
                f"the last {MOST_DEATHS} attempts at this run all died after step {deaths[-1]}, in "
                f"step {deaths[-1] + 1}: it is not started again. Look into the log for what "
                "happened there; then change the config, or remove "
                f"{self._path} to try once more"
            )
        return deaths

    def end(self, stopped: bool = False) -> None:
        """Record a clean end, done or `stopped` on request, and forget earlier deaths."""
        self._write(stopped=stopped)

    def _write(self, **values: Any) -> None:
        launch = launch_identity()
        record = Record(launch=launch, settings=self._settings, config=self._config, **values)
        replace_text(self._path, f"{json.dumps(record.model_dump())}\n")
