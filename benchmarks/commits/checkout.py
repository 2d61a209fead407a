"""A checkout whose commands are run, each in a process of its own that imports its code."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT_SECONDS = 600
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class CommandFailed(Exception):
    """A command ended with an error where none was expected."""


@dataclass(frozen=True)
class Checkout:
    """The code of a commit, or of a folder with changes that are not committed."""

    folder: Path
    key: str
    """The commit; or, with changes that are not committed, the folder's name."""
    is_committed: bool
    """True if `key` names what runs, so that earlier results of it hold."""

    def check_imports(self, environment: dict[str, str], folder: Path) -> str:
        """Return the file of the package that a process in `folder` imports.

        An editable install may name another checkout; raises CommandFailed if it comes first.
        """
        words = [sys.executable, "-c", "import parallel3d; print(parallel3d.__file__)"]
        file = run(words, folder, environment).stdout.strip()
        if not Path(file).resolve().is_relative_to(self.folder.resolve()):
            raise CommandFailed(f"{self.folder}: python imports {file}, which is another checkout")
        return file


@dataclass(frozen=True)
class Place:
    """The folders in which a checkout's commands run, and where what they did is recorded."""

    checkout: Checkout
    shared: Path
    """Corpus, token cache and empty user folders; the same for all checkouts."""
    work: Path
    """Working directory of the commands. Paths in them are relative, and so the same for all."""
    results: Path
    """Recorded text, a folder for each comparison."""

    def python(self, *words: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run python with these words."""
        command = [sys.executable, *map(str, words)]
        return run(command, self.work, self.environment, check)

    def command(
        self, name: str, *words: object, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run launch/NAME.py with these words, in one process."""
        return self.python(self.checkout.folder / "launch" / f"{name}.py", *words, check=check)

    def launch(
        self, launcher: str, ranks: int, name: str, *words: object, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run launch/NAME.py on several ranks, started by "deepspeed" or "torchrun"."""
        port = f"--master_port={free_port()}"
        count = {"deepspeed": "--num_gpus", "torchrun": "--nproc_per_node"}[launcher]
        program = str(Path(sys.executable).with_name(launcher))
        script = str(self.checkout.folder / "launch" / f"{name}.py")
        command = [program, port, f"{count}={ranks}", script, *map(str, words)]
        return run(command, self.work, self.environment, check)

    @property
    def environment(self) -> dict[str, str]:
        """The user's environment with this checkout first, on the CPU, without the network."""
        kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
        return kept | {
            "PYTHONPATH": str(self.checkout.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(self.shared / "config"),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
        }

    def same_everywhere(self, text: str) -> str:
        """Return a text without the folders that differ between checkouts."""
        for folder, name in ((self.work, "WORK"), (self.checkout.folder, "CHECKOUT")):
            text = text.replace(str(folder), name)
        return text

    def record(self, case: str, file: str, text: str) -> None:
        """Write a text of a comparison, one value a line where it can be."""
        path = self.results / case / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.same_everywhere(text).rstrip("\n") + "\n", encoding="utf-8")


def run(
    command: list[str], folder: Path, environment: dict[str, str], check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; raises CommandFailed if it fails and `check` is set."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if check and done.returncode:
        said = f"{done.stdout}{done.stderr}"[-4000:]
        raise CommandFailed(
            f"{' '.join(command)} in {folder} ended with {done.returncode}:\n{said}"
        )
    return done


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Run the body while no other process is in one with the same lock file."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _of_folder(folder: Path) -> Checkout:
    """Return the checkout in a folder."""
    folder = folder.resolve()
    if _git(folder, "status", "--porcelain"):
        return Checkout(folder, f"{folder.name}-not-committed", is_committed=False)
    return Checkout(folder, _git(folder, "rev-parse", "HEAD")[:12], is_committed=True)


@contextmanager
def checkout_of(name: str) -> Iterator[Checkout]:
    """Yield the checkout that a folder or a commit names; a commit is unpacked for a while."""
    if Path(name).is_dir():
        yield _of_folder(Path(name))
        return
    here = Path(__file__).resolve().parents[2]
    commit = _git(here, "rev-parse", f"{name}^{{commit}}")
    with TemporaryDirectory(prefix="parallel3d-commit-") as temporary:
        folder = Path(temporary, commit[:12])
        folder.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(here), "archive", commit], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive.stdout)
        yield Checkout(folder, commit[:12], is_committed=True)
