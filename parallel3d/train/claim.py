"""The claim on a run's folder, made before anything costs time (no torch)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import Holder, Lock, LockHeld, read
from parallel3d.config import RunConfig
from parallel3d.config.run import digest_of
from parallel3d.mesh.launch import Launch
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.train.attempts import folder_of_this_launch, unfinished

SUFFIX = ".lock"  # of a run's lock, beside its folder


@dataclass
class Claim:
    """A run's folder, which no other launch writes to until `release`."""

    folder: Path
    config: str
    """The digest of what is trained: the same config finds its unfinished run by it."""
    lock: Lock
    made: Path | None
    """The directory of all runs, where it was made for this one."""

    def release(self) -> None:
        """Release the folder, so that another launch may have it."""
        self.lock.release()
        if self.made:
            with suppress(OSError):  # there is a run in it now
                self.made.rmdir()


def ready(config: RunConfig, launch: Launch) -> RunConfig:
    """The config resolved for the launched ranks, its mesh planned if it asks for that.

    Every rank comes to the same. Raises ConfigError, for sizes that no machine can hold too.
    """
    refuse_impossible(config, launch.world_size)
    if config.is_planned:
        # The planner, which other configs do not need, and torch.
        from parallel3d.plan.report.choose import choose
        from parallel3d.train.known_hardware import machine_of

        config, _ = choose(config, launch.world_size, machine_of(config, launch))
    return config.resolve(launch.world_size)


def claim(asked: RunConfig, config: RunConfig, launch: Launch, say: Callable[[str], None]) -> Claim:
    """Claim the folder in which a run resumes, or a new name, on one process of a launch.

    `asked` is the config as it was read, `config` the same for the processes that were started.
    Raises ConfigError where a living process writes to the folder, or nobody can.
    """
    directory, same = Path(config.run.directory), digest_of(asked)
    made = None if directory.exists() else directory.absolute()
    try:
        folder, lock = _find(config, launch, directory, same, say)
    except OSError as error:
        raise ConfigError(
            f'parallel3d.run.directory = "{directory}": cannot be written '
            f"({error.strerror}); name a folder that can"
        ) from None
    claimed = Claim(folder, same, lock, made)
    try:
        with written_to(folder):
            if folder.exists():
                TemporaryFile(dir=folder).close()
    except ConfigError:
        claimed.release()
        raise
    return claimed


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Raise ConfigError, with a remedy, if a run's folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} cannot be written ({error.strerror}); make room, or name "
            "another with parallel3d.run.directory"
        ) from None


def _find(
    config: RunConfig, launch: Launch, directory: Path, same: str, say: Callable[[str], None]
) -> tuple[Path, Lock]:
    chosen, resume = config.run.name, config.checkpoint.resume
    found = None
    if chosen != "auto":
        found = directory / chosen
        if resume == "none" and found.exists() and not launch.restart_count:
            raise ConfigError(
                f'parallel3d.run.name = "{chosen}": {found} exists, and '
                'checkpoint.resume = "none" starts afresh; use another name, or resume "auto"'
            )
    elif launch.restart_count:
        found = folder_of_this_launch(directory, same)
    if found is None and (resume == "auto" or isinstance(resume, int)):
        found = unfinished(directory, same)  # as the first attempt did
    if isinstance(resume, int) and not (found and found.exists()):
        raise ConfigError(
            f"parallel3d.checkpoint.resume = {resume}: a step is one of an existing run; set "
            "parallel3d.run.name to it, or give the checkpoint's path"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = found or directory / (name_of(config) + (f"-{number}" if number > 1 else ""))
        if folder.exists() and not found:
            continue
        lock = Lock(directory / f"{folder.name}{SUFFIX}", about=same, jobs=launch.jobs)
        try:
            lock.take(say)
        except LockHeld as error:
            # Another run has the name; the same run, starting too, is not to be trained twice.
            if found or (error.holder.about == same and resume != "none"):
                raise ConfigError(_held(folder, error.holder)) from None
            continue
        if found or not folder.exists():  # another may have had it meanwhile
            return folder, lock
        lock.release()
    raise AssertionError("count() does not end")


def token_of(folder: Path) -> str:
    """A text that the lock of a run's folder alone holds; "" where there is no lock."""
    holder = read(folder.with_name(f"{folder.name}{SUFFIX}"))
    return holder.token if holder else ""


def _held(folder: Path, holder: Holder) -> str:
    return (
        f"{folder} is being trained by {holder}: two launches cannot write to one run. Wait for "
        f"it, or stop it (`touch {folder / 'STOP'}`) and start again to go on; for a second run "
        "of the same config, --parallel3d.run.name NAME"
    )


def name_of(config: RunConfig) -> str:
    """The default name of a run: its model and its mesh."""
    sizes = "x".join(str(getattr(config.mesh, axis)) for axis in ("pp", "dp", "tp"))
    model = config.model
    return f"{model.family}-h{model.hidden_size}-l{model.num_hidden_layers}-{sizes}"
