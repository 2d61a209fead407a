"""Restarts: the folder of this launch, and whether a run dies at every attempt (no torch).

Both are in `attempts.json` in the run's folder, which rank 0 alone reads and writes.
"""

import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import TrainingError
from parallel3d.mesh.launch import jobs_of_this_process
from parallel3d.train.stopping import Stopped

FILE = "attempts.json"
MOST_DEATHS = 3  # at one step, in a row
_SAME_START = 10.0  # seconds by which the clock may have been set between two starts


def launch_identity() -> str:
    """An identity of this launch that stays the same when its launcher restarts the ranks.

    The job's own name, `torchrun --rdzv_id` or Slurm's number; else "host pid seconds" of the
    launcher, the parent process. Other launches have other identities, except that those of one
    shell's plain python processes, or of one Slurm job, are the same.
    """
    if jobs := jobs_of_this_process():
        kind, name, _ = jobs[-1]
        return "_".join(f"{kind}:{name}".split())
    parent = os.getppid()
    return f"{socket.gethostname()} {parent} {psutil.Process(parent).create_time():.0f}"


def folder_of_this_launch(directory: Path, name: str, config: str = "") -> Path | None:
    """The newest folder `name`, `name-2`, ... that an earlier attempt of this launch began.

    Only after a restart (`Launch.restart_count`) is it to be asked for. `config`: the digest of
    what is trained; a run of another one is another launch's, of the same job.
    """
    numbered = {}
    for path in directory.glob("*") if directory.is_dir() else ():
        if match := re.fullmatch(rf"{re.escape(name)}(?:-([1-9]\d*))?", path.name):
            numbered[int(match[1] or 1)] = path
    mine = launch_identity()
    for _, path in sorted(numbered.items(), reverse=True):
        record = _Record.read(path / FILE)
        if _is_same_launch(record.launch, mine) and (not config or record.config == config):
            return path
    return None


def unfinished(directory: Path, config: str) -> Path | None:
    """The newest unfinished run of a config in `directory`."""
    found = []
    for path in directory.glob(f"*/{FILE}"):
        record = _Record.read(path)
        if record.config == config and (record.running or record.stopped or record.deaths):
            with suppress(OSError):  # it is being removed
                found.append((path.stat().st_mtime_ns, path.parent))
    return max(found)[1] if found else None


class Attempts:
    """The attempts at one run; each leaves its death on record unless it ends clean.

    `settings` are the run's; with others it has a fresh chance. `config` is the digest by which
    the same config finds it again (`unfinished`).
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], config: str = "") -> None:
        self._path, self._config = folder / FILE, config
        text = json.dumps(settings, sort_keys=True)
        self._settings = blake2b(text.encode(), digest_size=16).hexdigest()

    def begin(self, step: int, restart: bool = False) -> None:
        """Record a new attempt; `step` is the last step that the attempt before it finished.

        Raises TrainingError if the last three attempts died at one step. Raises Stopped if the
        launcher `restart`s what ended on request.
        """
        deaths = self.check(step, restart)
        self._write(deaths, running=True)

    def check(self, step: int, restart: bool = False) -> list[int]:
        """The steps at which the last attempts died; raises as `begin` does, and enters nothing."""
        record, launch = _Record.read(self._path), launch_identity()
        if restart and record.stopped and _is_same_launch(record.launch, launch):
            raise Stopped
        deaths = record.deaths if record.settings == self._settings else []
        if record.running and record.settings == self._settings:
            deaths = [*deaths, step][-MOST_DEATHS:]
        if len(deaths) == MOST_DEATHS and len(set(deaths)) == 1:
            self._write(deaths)
            raise TrainingError(
                f"the last {MOST_DEATHS} attempts at this run all died after step {deaths[-1]}, in "
                f"step {deaths[-1] + 1}: it is not started again. Look into the log for what "
                "happened there; then change the config, or remove "
                f"{self._path} to try once more"
            )
        return deaths

    def end(self, stopped: bool = False) -> None:
        """Record a clean end, done or `stopped` on request, and forget earlier deaths."""
        self._write([], stopped=stopped)

    def _write(self, deaths: list[int], *, running: bool = False, stopped: bool = False) -> None:
        launch = launch_identity()
        record = _Record(launch, self._settings, deaths, running, stopped, self._config)
        record.write(self._path)


@dataclass
class _Record:
    """The contents of attempts.json."""

    launch: str = ""
    settings: str = ""
    deaths: list[int] = field(default_factory=list)  # the steps reached, the newest last
    running: bool = False
    stopped: bool = False
    config: str = ""

    @classmethod
    def read(cls, path: Path) -> "_Record":
        """What is in the file; a new record if that is damaged or missing."""
        try:
            record = cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls()
        whole = (
            isinstance(record.launch, str)
            and isinstance(record.settings, str)
            and isinstance(record.deaths, list)
            and all(type(step) is int for step in record.deaths)
            and isinstance(record.running, bool)
            and isinstance(record.stopped, bool)
            and isinstance(record.config, str)
        )
        return record if whole else cls()

    def write(self, path: Path) -> None:
        """Replace the file, whole or not at all."""
        replace_text(path, f"{json.dumps(asdict(self))}\n")


def _is_same_launch(one: str, other: str) -> bool:
    if one == other:
        return True
    *place, start = one.rpartition(" ")
    *other_place, other_start = other.rpartition(" ")
    try:
        return place == other_place and abs(float(start) - float(other_start)) < _SAME_START
    except ValueError:
        return False
