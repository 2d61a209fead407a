"""The claim on a run's folder, and a limit on failed attempts at it (no torch).

The folder is claimed before anything slow is loaded. Attempts are recorded in `attempts.json` in
it, which only rank 0 reads and writes.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError, TrainingError, remedy_of
from parallel3d.base.lock import Lock, LockHeld, read
from parallel3d.base.paths import unwritable
from parallel3d.base.say import Say
from parallel3d.base.section import Section
from parallel3d.config import ResolvedConfig, RunConfig, hardware
from parallel3d.config.digest import digest_of
from parallel3d.mesh.launch import Launch
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.train.ending import Ending, say

_WRITABLE = "use a writable folder"
SUFFIX = ".lock"
"""The ending of a run's lock, which stands beside the run's folder."""


@dataclass
class Claim:
    """A run's folder, locked against other launches until `release`."""

    folder: Path
    config: str
    """The digest of what is trained, by which the same config finds its unfinished run."""
    lock: Lock
    created_directory: Path | None
    """The directory of all runs, if it was created for this one."""

    def release(self) -> None:
        """Unlock the folder for other launches, and remove an empty directory created for it."""
        self.lock.release()
        if self.created_directory:
            with suppress(OSError):  # it contains a run
                self.created_directory.rmdir()


def resolve_config(config: RunConfig, launch: Launch) -> ResolvedConfig:
    """Return the config resolved for the launched ranks, planned first if its mesh is "plan".

    The result is the same on every rank. Raises ConfigError, also for impossibly large sizes.
    """
    if launch.has_agents and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            "torchrun on several hosts with --max-restarts: ranks that start again cannot use the "
            "store that its agents share (torch 2.13); set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on "
            "each host"
        )
    refuse_impossible(config, launch.world_size)
    if config.run.hardware != "auto":
        hardware.load(config.run.hardware)  # the file may be missing, or wrong
    if config.is_planned:
        # Imported here because they load the planner and torch, which other configs do not need.
        from parallel3d.plan.report.plan_rows import choose
        from parallel3d.train.known_hardware import machine_of

        config, _ = choose(config, launch.world_size, machine_of(config, launch))
    return config.resolve(launch.world_size, host_size=launch.local_world_size)


def check_restarts(config: RunConfig, launch: Launch) -> None:
    """Raise ConfigError if a run could not go on, and find itself, when torchrun restarts it."""
    if not (launch.is_elastic or launch.restarts_left or launch.restart_count):
        return
    resume = config.checkpoint.resume
    is_path = isinstance(resume, str) and resume not in ("auto", "none")
    # Hosts that come count no restarts, so there only a path is known to be of another run.
    is_found = config.run.name != "auto" and (is_path or not launch.is_elastic)
    if resume != "auto" and not is_found:
        raise ConfigError(
            f"parallel3d.checkpoint.resume = {json.dumps(resume)}: torchrun starts a run again "
            "when a rank fails or hosts change, so it would begin again here; use "
            '"auto", or the path of a checkpoint together with parallel3d.run.name'
        )
    of_a_rank = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    changes = config.train_batch_size is None or None not in of_a_rank
    if launch.is_elastic and not config.is_planned and config.mesh.dp == "auto" and changes:
        raise ConfigError(
            f"train_batch_size = {json.dumps(config.train_batch_size)}: torchrun --nnodes MIN:MAX "
            "changes dp, and the batch must stay; set it together with one of "
            "train_micro_batch_size_per_gpu and gradient_accumulation_steps"
        )


def claim(requested: RunConfig, config: RunConfig, launch: Launch, say: Say) -> Claim:
    """Claim the folder in which a run resumes, or a new one; called on rank 0 of a launch.

    `requested` is the config as it was read, `config` the one resolved for the launched ranks.
    Raises ConfigError if another process writes to the folder, or if it is not writable.
    """
    directory = Path(config.parallel3d.run.directory)
    if reason := unwritable(directory):
        raise ConfigError(f"{_place_of(directory)}: cannot be written ({reason}); {_WRITABLE}")
    same = digest_of(requested)
    created_directory = None if directory.exists() else directory.absolute()
    try:
        folder, lock = _find(config, launch, directory, same, say)
    except OSError as error:
        raise ConfigError(
            f"{_place_of(directory)}: cannot be written ({error.strerror}); {_WRITABLE}"
        ) from None
    claimed = Claim(folder, same, lock, created_directory)
    try:
        with written_to(folder):
            if folder.exists():
                TemporaryFile(dir=folder).close()
    except ConfigError:
        claimed.release()
        raise
    return claimed


def claim_on_first(
    requested: RunConfig, config: RunConfig, launch: Launch, end: Ending
) -> Claim | None:
    """Claim the run's folder on rank 0, until the process ends; None on other ranks."""
    if launch.rank != 0:
        return None
    claimed = claim(requested, config, launch, say)
    end.at_end.append(claimed.release)
    return claimed


def _place_of(directory: Path) -> str:
    return f'parallel3d.run.directory = "{directory}"'


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Turn an OSError in the block into a ConfigError that names the run's folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} cannot be written ({error.strerror}); "
            f"{remedy_of(error, 'mend it')}, or set parallel3d.run.directory to another folder"
        ) from None


def _find(
    config: RunConfig, launch: Launch, directory: Path, same: str, say: Say
) -> tuple[Path, Lock]:
    chosen = config.parallel3d.run.name
    resume = config.parallel3d.checkpoint.resume
    existing = None
    if chosen != "auto":
        existing = directory / chosen
        if resume == "none" and existing.exists() and not launch.restart_count:
            raise ConfigError(
                f'parallel3d.run.name = "{chosen}": {existing} exists, and '
                'checkpoint.resume = "none" starts afresh; use another name, or resume "auto"'
            )
    elif resume == "auto" or isinstance(resume, int):
        existing = unfinished(directory, same)
    if isinstance(resume, int) and not (existing and existing.exists()):
        raise ConfigError(
            f"parallel3d.checkpoint.resume = {resume}: a step needs an existing run; set "
            "parallel3d.run.name to that run, or use the path of a checkpoint"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = existing or directory / f"{name_of(config)}{suffix}"
        if folder.exists() and not existing:
            continue
        lock = Lock(directory / f"{folder.name}{SUFFIX}", about=same, jobs=launch.jobs)
        try:
            lock.take(say)
        except LockHeld as error:
            # The folder belongs to this run, or a second launch of the same config is starting;
            # any other run only has this name, so the next number is tried.
            if existing or (error.holder.about == same and resume != "none"):
                holder = error.holder
                how = f"touch {folder / 'STOP'}"
                if not folder.exists():  # it is still starting
                    how = f"kill {holder.pid}` on `{holder.host}"
                raise ConfigError(
                    f"{folder} is being trained by {holder}; two launches cannot write to one run. "
                    f"Wait for it, or stop it (`{how}`) and run this "
                    "command again to resume. For a second run of the same config add "
                    "--parallel3d.run.name NAME"
                ) from None
            continue
        if existing or not folder.exists():  # another launch may have created it meanwhile
            return folder, lock
        lock.release()
    raise AssertionError("count() does not end")


def token_of(folder: Path) -> str:
    """Return the unique token of the lock of a run's folder; "" if there is no lock."""
    holder = read(folder.with_name(f"{folder.name}{SUFFIX}"))
    return holder.token if holder else ""


def name_of(config: RunConfig) -> str:
    """Return the default name of a run, made of its model and its mesh."""
    model = config.model
    return f"{model.family}-h{model.hidden_size}-l{model.num_hidden_layers}-{config.mesh.sizes}"


FILE = "attempts.json"
MOST_DEATHS = 3  # failed attempts in a row at one step


class Record(Section):
    """The contents of attempts.json."""

    launch: str = ""
    """Not used; older versions wrote it."""
    settings: str = ""
    deaths: tuple[int, ...] = ()
    """The last step that each failed attempt finished, newest last."""
    running: bool = False
    stopped: bool = False
    config: str = ""


def unfinished(directory: Path, config: str) -> Path | None:
    """Return the newest unfinished run of a config in `directory`."""
    runs_by_time = []
    for path in directory.glob(f"*/{FILE}"):
        record = _read(path)
        if record.config == config and (record.running or record.stopped or record.deaths):
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
        self._path = folder / FILE
        self._config = config
        text = json.dumps(settings, sort_keys=True)
        self._settings = blake2b(text.encode(), digest_size=16).hexdigest()

    def begin(self, step: int) -> None:
        """Record a new attempt; `step` is the last step that the previous attempt finished.

        Raises TrainingError if the last three attempts failed at one step.
        """
        self._write(deaths=self.check(step), running=True)

    def check(self, step: int) -> tuple[int, ...]:
        """Return the steps of the last failed attempts; raise as `begin` does, record nothing."""
        record = _read(self._path)
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
        record = Record(settings=self._settings, config=self._config, **values)
        replace_text(self._path, f"{json.dumps(record.model_dump())}\n")
