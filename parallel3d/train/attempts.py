"""Restarts: the run folder of this launch, and a limit on failed attempts (no torch).

Both are recorded in `attempts.json` in the run's folder, which only rank 0 reads and writes.
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
MOST_DEATHS = 3  # failed attempts in a row at one step


class Record(Section):
    """The contents of attempts.json."""

    launch: str = ""
    settings: str = ""
    deaths: tuple[int, ...] = ()
    """The last step that each failed attempt finished, newest last."""
    running: bool = False
    stopped: bool = False
    config: str = ""


def launch_identity() -> str:
    """Return an identity of this launch that does not change when its launcher restarts the ranks.

    It is the job's own name (`torchrun --rdzv_id`, Slurm's job id), else host, pid and start time
    of the parent process, the launcher. Plain python processes of one shell share an identity.
    """
    if jobs := jobs_of_this_process():
        kind, name, _ = jobs[-1]
        return "_".join(f"{kind}:{name}".split())
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {start_of(parent)}"


def folder_of_this_launch(directory: Path, config: str) -> Path | None:
    """Return the newest run that an earlier attempt of this launch began, for use after a restart.

    `config` is the digest of what is trained; runs with another digest are ignored.
    """
    identity = launch_identity()
    return _newest(directory, lambda record: (record.launch, record.config) == (identity, config))


def unfinished(directory: Path, config: str) -> Path | None:
    """Return the newest unfinished run of a config in `directory`."""

    def fits(record: Record) -> bool:
        goes_on = record.running or record.stopped or bool(record.deaths)
        return goes_on and record.config == config

    return _newest(directory, fits)


def _newest(directory: Path, fits: Callable[[Record], bool]) -> Path | None:
    runs_by_time = []
    for path in directory.glob(f"*/{FILE}"):
        if fits(_read(path)):
            with suppress(OSError):  # the folder is being removed
                runs_by_time.append((path.stat().st_mtime_ns, path.parent))
    return max(runs_by_time)[1] if runs_by_time else None


def _read(path: Path) -> Record:
    """Return the record in a file; a new one if the file is damaged or missing."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return Record()


class Attempts:
    """The recorded attempts at one run; an attempt counts as failed unless it ends cleanly.

    Changed `settings` reset the count. `config` is the digest that `unfinished` looks for.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], config: str = "") -> None:
        self._path, self._config = folder / FILE, config
        text = json.dumps(settings, sort_keys=True)
        self._settings = blake2b(text.encode(), digest_size=16).hexdigest()

    def begin(self, step: int, restart: bool = False) -> None:
        """Record a new attempt; `step` is the last step that the previous attempt finished.

        Raises TrainingError if the last three attempts failed at one step, and Stopped if the
        launcher restarts (`restart`) a run that ended on request.
        """
        self._write(deaths=self.check(step, restart), running=True)

    def check(self, step: int, restart: bool = False) -> tuple[int, ...]:
        """Return the steps of the last failed attempts; raise as `begin` does, record nothing."""
        record = _read(self._path)
        if restart and record.stopped and record.launch == launch_identity():
            raise Stopped
        deaths = record.deaths if record.settings == self._settings else ()
        if record.running and record.settings == self._settings:
            deaths = (*deaths, step)[-MOST_DEATHS:]
        if len(deaths) == MOST_DEATHS and len(set(deaths)) == 1:
            self._write(deaths=deaths)
            raise TrainingError(
                f"the last {MOST_DEATHS} attempts at this run all failed after step {deaths[-1]}, "
                f"in step {deaths[-1] + 1}; the run is not restarted. Find the cause in the log. "
                f"Then change the config, or remove {self._path} to try again"
            )
        return deaths

    def end(self, stopped: bool = False) -> None:
        """Record a clean end, finished or `stopped` on request, and clear the failed attempts."""
        self._write(stopped=stopped)

    def _write(self, **values: Any) -> None:
        launch = launch_identity()
        record = Record(launch=launch, settings=self._settings, config=self._config, **values)
        replace_text(self._path, f"{json.dumps(record.model_dump())}\n")
