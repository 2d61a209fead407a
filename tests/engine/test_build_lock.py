"""A build lock never hangs a run, and where nothing can be compiled torch's Adam does the work."""

import logging
import os
import subprocess
import sys
import time

import pytest
from torch.utils.file_baton import FileBaton

from parallel3d.engine import operators
from parallel3d.engine.operators import remove_stale_lock, wait_for_build
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import RanksHung, run_locally
from tests.cases import Case, Trainer
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo


def make_lock(directory, age):
    lock = directory / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    return lock


def test_a_dead_builds_lock_is_removed(tmp_path, caplog):
    lock = make_lock(tmp_path, age=3600)
    with caplog.at_level(logging.WARNING):
        assert remove_stale_lock(tmp_path)
    assert not lock.exists()
    assert "stale build lock" in caplog.text and str(lock) in caplog.text
    assert not remove_stale_lock(tmp_path)


def test_a_young_lock_is_respected(tmp_path):
    lock = make_lock(tmp_path, age=5)
    assert not remove_stale_lock(tmp_path)
    assert lock.exists()
    assert remove_stale_lock(tmp_path, startup_seconds=1)


def test_a_lock_on_a_network_file_system_is_given_time(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "_is_shared", lambda directory: True)
    make_lock(tmp_path, age=300)
    assert not remove_stale_lock(tmp_path)
    make_lock(tmp_path, age=700)
    assert remove_stale_lock(tmp_path)


SLEEP = "import time; print('there', flush=True); time.sleep(600)"
HOLD = f"import os; os.open('lock', os.O_RDONLY); os.chdir('/'); {SLEEP}"


@pytest.mark.parametrize("program", [SLEEP, HOLD], ids=["works there", "holds the lock"])
def test_a_live_builds_lock_is_respected_and_waited_for(tmp_path, program):
    lock = make_lock(tmp_path, age=3600)
    command = [sys.executable, "-c", program]
    builder = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert builder.stdout.readline() == "there\n"
        assert not remove_stale_lock(tmp_path)
        assert lock.exists()
    finally:
        builder.kill()
        builder.communicate()
    wait_for_build(tmp_path)  # which ends
    assert not lock.exists()


def load(rank, cache, ours):
    os.environ["TORCH_EXTENSIONS_DIR"] = cache
    said = []
    if ours:
        return operators.load_cpu_adam(Mesh(1, 2, 1), said.append), said
    from deepspeed.ops.op_builder import CPUAdamBuilder

    operators.core.read_cpu_quickly()
    CPUAdamBuilder().load(verbose=False)


@pytest.fixture
def locked_cache(tmp_path):
    """torch's cache of extensions as a killed build of an hour ago left it."""
    directory = tmp_path / "cpu_adam"
    directory.mkdir()
    make_lock(directory, age=3600)
    return tmp_path


def no_compiler(builder, verbose=False):
    raise RuntimeError("no g++ here\nand more lines")


def load_without_compiler(rank, cache):
    operators.CPUAdamBuilder.load = no_compiler
    return load(rank, cache, True)


def test_a_stale_lock_does_not_hang_a_run(locked_cache):
    """What torch itself waits for, for ever, our start goes past: the compiler is reached."""
    with pytest.raises(RanksHung):
        run_locally(load, 1, str(locked_cache), False, timeout=4, quiet=True)
    assert (locked_cache / "cpu_adam" / "lock").exists()
    (found, said), (other, _) = run_locally(load_without_compiler, 2, str(locked_cache))
    assert not (locked_cache / "cpu_adam" / "lock").exists()
    assert not found and not other
    assert said[0].startswith("compiling DeepSpeed's cpu_adam")
    assert said[1] == (
        "using torch's Adam on the host, because cpu_adam cannot be compiled: no g++ here"
    )


LINKED = """Error building extension 'cpu_adam': [1/1] c++ adam.o -shared -L/my env/lib -o adam.so
FAILED: cpu_adam.so
c++ adam.o -shared -L/my env/lib -lcurand -o cpu_adam.so
/usr/bin/ld: cannot find env/lib: No such file or directory
collect2: error: ld returned 1 exit status
ninja: build stopped: subcommand failed.
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (LINKED, "/usr/bin/ld: cannot find env/lib: No such file or directory"),
        ("[1/2] c++ -c a.cpp\na.cpp:1:10: fatal error: libaio.h: No such file\n", "libaio.h"),
        ("\nno g++ here\nand more lines", "no g++ here"),
    ],
    ids=["linker", "compiler", "neither"],
)
def test_the_reason_is_the_line_that_has_it(said, why):
    assert why in operators._reason(RuntimeError(said)).splitlines()[0]
    assert "[1/" not in operators._reason(RuntimeError(said))


class Builder:
    """An operator whose load takes so many seconds of another process."""

    name = "cpu_adam"

    def __init__(self, directory, seconds):
        self.directory, self.seconds = directory, seconds

    def load(self, verbose):
        subprocess.run(["sleep", str(self.seconds)], cwd=self.directory, check=True)


@pytest.mark.parametrize("seconds, told", [(1, 1), (0, 0)], ids=["it runs", "there is none"])
def test_a_compiler_is_told_of_where_another_installation_had_built(
    tmp_path, monkeypatch, seconds, told
):
    """What is there is built anew under another torch: minutes in which nothing was printed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(operators, "_LOOK_SECONDS", 0.05)
    directory = tmp_path / "cpu_adam"
    directory.mkdir()
    (directory / "cpu_adam.so").touch()
    make_lock(directory, age=3600)  # of a build that was killed
    said = []
    operators._load(Builder(directory, seconds), said.append)
    text = "compiling DeepSpeed's cpu_adam (once for this installation; about 30 s on idle cores)"
    assert said == [text] * told


def test_a_build_that_dies_while_one_waits_is_noticed(tmp_path):
    lock = make_lock(tmp_path, age=3600)
    baton = operators._Baton(str(lock))
    assert not baton.try_acquire()
    baton.wait()
    assert baton.try_acquire()
    baton.release()
    assert issubclass(operators._Baton, FileBaton)


def train_without_compiler(rank, case, reference, only_on):
    if rank in only_on:
        operators.CPUAdamBuilder.load = no_compiler
    trainer = Trainer(case)
    kind = type(trainer.engine._deepspeed.optimizer.optimizer).__name__
    return trainer.compare(reference), kind


@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize(
    "only_on", [*(pytest.param(n, marks=pytest.mark.slow) for n in [(0, 1), (0,)]), (1,)]
)
def test_without_a_compiler_torchs_adam_trains_the_same(only_on):
    case = Case(mesh=(1, 2, 1), offload="cpu", steps=2, batch=8)
    ranks = run_locally(train_without_compiler, 2, case, case.reference, only_on)
    results, kinds = zip(*ranks, strict=True)
    errors = errors_of(case.config, results)
    assert kinds == ("AdamW", "AdamW")  # all ranks alike, whoever failed
    assert errors.within(1e-5), errors
