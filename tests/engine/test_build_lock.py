"""A build lock never hangs a run, and where nothing can be compiled torch's Adam does the work."""

import os
import subprocess
import threading
import time

import pytest
from torch.utils import cpp_extension

from parallel3d.engine import op_builds
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo


def no_compiler(builder, verbose=False):
    raise RuntimeError("no g++ here\nand more lines")


def load_beside_a_lock(rank, cache):
    os.environ["TORCH_EXTENSIONS_DIR"] = cache
    op_builds._BUILD_SECONDS = 0.2
    messages = []
    return op_builds.load_cpu_adam(Mesh(), messages.append), messages


@pytest.mark.skipif(not hasattr(cpp_extension, "FileBaton"), reason="the kernel frees the lock")
def test_lock_of_a_killed_build_does_not_hang_a_run(tmp_path):
    """torch waits for it for ever; here the run is told what to delete, and goes on."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    [(is_loaded, messages)] = run_locally(load_beside_a_lock, 1, str(tmp_path), timeout=60)
    assert not is_loaded
    assert f"delete {lock}" in messages[0]
    assert str(lock) in messages[-1] and "using torch's Adam on the host" in messages[-1]


def built_already(builder, verbose=False):
    """Stand for the loading of an operator."""


def load_with_a_kernel_lock(rank, cache):
    os.environ["TORCH_EXTENSIONS_DIR"] = cache
    # The kernel holds the lock since torch 2.14.
    vars(cpp_extension).pop("FileBaton", None)
    op_builds.CPUAdamBuilder.load = built_already
    messages = []
    return op_builds.load_cpu_adam(Mesh(), messages.append), messages


def test_lock_file_under_newer_torch_is_ignored(tmp_path):
    """The file stays there after every build; only a process holds the lock."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    [(is_loaded, messages)] = run_locally(load_with_a_kernel_lock, 1, str(tmp_path), timeout=60)
    assert is_loaded and not any("waiting" in message for message in messages)


@pytest.mark.parametrize("how", ["killed", "killed, compiler goes on", "silent"])
def test_killed_build_is_noticed(how, tmp_path, monkeypatch):
    """A killed process leaves its lock; a compiler that it started may still write there."""
    monkeypatch.setattr(op_builds, "_QUIET_SECONDS", 0.2)
    path = tmp_path / "lock"
    baton = op_builds._BuildLock(str(path))
    if how == "silent":
        path.touch()
    else:
        builder = os.fork()
        if not builder:
            baton.try_acquire()
            os._exit(0)
        os.waitpid(builder, 0)
    compiler = None
    if "compiler" in how:
        compiler = subprocess.Popen(["sleep", "0.6"], cwd=tmp_path)
    start = time.monotonic()
    assert not op_builds._is_released(path)
    took = time.monotonic() - start
    if compiler:
        compiler.wait()
        assert took > 0.4
    assert took < 10


def test_living_build_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(op_builds, "_QUIET_SECONDS", 0.1)
    baton = op_builds._BuildLock(str(tmp_path / "lock"))
    assert baton.try_acquire() and not baton.try_acquire()
    threading.Timer(0.5, baton.release).start()
    assert op_builds._is_released(tmp_path / "lock")


LINKED = """Error building extension 'cpu_adam': [1/1] c++ adam.o -shared -L/my env/lib -o adam.so
FAILED: cpu_adam.so
c++ adam.o -shared -L/my env/lib -lcurand -o cpu_adam.so
/usr/bin/ld: cannot find env/lib: No such file or directory
collect2: error: ld returned 1 exit status
ninja: build stopped: subcommand failed.
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (LINKED, "/usr/bin/ld: cannot find env/lib: No such file or directory"),
        ("[1/2] c++ -c a.cpp\na.cpp:1:10: fatal error: libaio.h: No such file\n", "libaio.h"),
        ("\nno g++ here\nand more lines", "no g++ here"),
    ],
    ids=["linker", "compiler", "neither"],
)
def test_reason_is_the_line_of_the_error(output, reason):
    assert reason in op_builds._reason(RuntimeError(output)).splitlines()[0]
    assert "[1/" not in op_builds._reason(RuntimeError(output))


def train_without_compiler(rank, case, reference, only_on):
    if rank in only_on:
        op_builds.CPUAdamBuilder.load = no_compiler
    trainer = Trainer(case)
    kind = type(trainer.engine.deepspeed.optimizer.optimizer).__name__
    return trainer.compare(reference), kind


@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize(
    "only_on",
    [
        pytest.param((0, 1), marks=pytest.mark.slow),
        pytest.param((0,), marks=pytest.mark.slow),
        (1,),
    ],
)
def test_torch_adam_trains_the_same_without_a_compiler(only_on):
    model = {"num_hidden_layers": 1}
    case = Case(mesh=(1, 2, 1), offload="cpu", steps=2, batch=4, microbatches=1, model=model)
    ranks = run_locally(train_without_compiler, 2, case, case.reference, only_on)
    results, kinds = zip(*ranks, strict=True)
    errors = errors_of(case.config, results)
    assert kinds == ("AdamW", "AdamW")  # all ranks alike, whoever failed
    assert errors.within(1e-5), errors
