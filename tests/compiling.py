"""DeepSpeed's operators for the tests: their compiler, and a start of the longest build at once."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

COMPILER = Path(__file__).with_name("compiler")


def environment():
    """Of processes that compile: with our compiler first."""
    return {"PATH": f"{COMPILER}{os.pathsep}{os.environ['PATH']}"}


def needs_async_io(item):
    """Whether a test has DeepSpeed read and write NVMe."""
    return "async_io" in item.fixturenames or _says(item, "nvme")


def needs_cpu_adam(item):
    """Whether a test has DeepSpeed's optimizer step on the host."""
    names = item.fixturenames
    return "cpu_adam" in names or _says(item, "cpu") or _says(item, "nvme")


def _says(item, device):
    params = getattr(item, "callspec", None)
    is_said = params and device in str([*params.params.values()])
    return bool(is_said and "operators" in item.fixturenames)


def begin():
    """Compile both beside the tests that need none; return the process, or None if both exist."""
    from torch.utils.cpp_extension import _get_build_directory

    names = "cpu_adam", "async_io"
    if all(Path(_get_build_directory(n, verbose=False), f"{n}.so").exists() for n in names):
        return None
    # One core at most: the tests have the others.
    alone = os.environ | {"MAX_JOBS": "1"}
    command = [sys.executable, "-m", "tests.compiling"]
    process = subprocess.Popen(command, env=alone, start_new_session=True)
    Thread(target=process.wait, daemon=True).start()  # no zombie among the tests' processes
    return process


def end(process):
    """End a start of a build, and its compilers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def main():
    """Compile the operators; a test that needs one will say why it cannot be compiled."""
    from parallel3d.base.errors import ConfigError
    from parallel3d.engine.op_builds import load_async_io, load_cpu_adam
    from parallel3d.mesh.mesh import Mesh

    def say(text):
        print(f"\n{text}", file=sys.stderr, flush=True)

    os.environ |= environment()
    mesh = Mesh()
    load_cpu_adam(mesh, say)
    with suppress(ConfigError):
        load_async_io(mesh, say)


if __name__ == "__main__":
    main()
