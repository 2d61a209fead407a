"""Ranks without torch: processes that have a sentry each, and do what a test says."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.arbiter import Limits


class Ranks:
    """So many of them on this machine, and a store, which is a socket that takes connections."""

    def __init__(self, folder, number, does="sleep", **limits):
        self.store = socket.create_server(("127.0.0.1", 0))
        self.folder = folder
        self.taken = []
        threading.Thread(target=self._keep_store, daemon=True).start()
        task = {
            "does": does,
            "number": number,
            "limits": limits,
            "port": self.store.getsockname()[1],
        }
        command = [sys.executable, "-m", "tests.mesh.pulse.ranks", json.dumps(task), str(folder)]
        self.logs = [folder / f"log-{rank}" for rank in range(number)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*command, str(rank)], stdout=file, stderr=file, cwd=Path(__file__).parents[3]
                )
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self.store.close()

    def _keep_store(self):
        while True:
            try:
                self.taken.append(self.store.accept()[0])
            except OSError:
                return

    def lose_store(self):
        for connection in self.taken:
            connection.close()

    def wait_until_watched(self, seconds=20.0):
        """Until every rank runs, and its sentry has reported."""
        self.wait(lambda: all("watched" in log.read_text() for log in self.logs), seconds)

    def wait(self, condition, seconds):
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, self.printed
            time.sleep(0.02)
        return time.monotonic() - start

    def send(self, number, *ranks):
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send_signal(number)

    def codes(self, seconds):
        """The exit codes of those that end within so many seconds; None of one that lives."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.returncode for process in self.processes]

    @property
    def alive(self):
        return [process.poll() is None for process in self.processes]

    @property
    def printed(self):
        """The lines of each rank but the first, which says that it is watched."""
        return [
            [line for line in log.read_text().splitlines() if line != "watched"]
            for log in self.logs
        ]


def main(task, folder, rank):
    """What a rank does: end with 1 when the run is over, else act as the task names."""
    place = Path(folder, "arbiter")

    def publish(text):
        place.with_suffix(".new").write_text(text)
        place.with_suffix(".new").rename(place)

    def fetch():
        while not place.exists():
            time.sleep(0.01)
        return place.read_text()

    pulse.LIMITS = Limits(**task["limits"])
    names = ["127.0.0.1", socket.gethostname()]
    pulse.begin(rank, task["number"], ("127.0.0.1", task["port"]), names, publish, fetch)

    def end():
        while not (outcome := pulse.outcome()):
            time.sleep(0.05)
        if outcome.speaks:
            print(outcome.text, flush=True)
        pulse.leave(outcome.code)
        os._exit(outcome.code)

    threading.Thread(target=end, daemon=True).start()
    pulse.doing(f"work {rank}")
    while not pulse.is_watched():
        time.sleep(0.02)
    print("watched", flush=True)
    DOES[task["does"]](rank)


def hold_lock(rank):
    """Sleep in native code that does not let go of the interpreter's lock."""
    if rank == 1:
        ctypes.PyDLL(None).sleep(2**31)
    time.sleep(1000)


def wait_for_one(rank):
    """The others wait for rank 1, which computes."""
    pulse.set_limit(3.0)
    if rank == 1:
        pulse.doing("2F0 of step 7")
        time.sleep(1000)
    with pulse.waiting("waiting for 2F0"):
        time.sleep(1000)


def fail_alone(rank):
    if rank == 1:
        time.sleep(2)
        pulse.leave(1, "ValueError: no")
        os._exit(1)
    time.sleep(1000)


def ask(rank):
    """Rank 1 is asked to stop."""
    if rank == 1:
        time.sleep(2)
        pulse.leave(3, "was asked to")
        os._exit(3)
    time.sleep(1000)


def end_well(rank):
    """One after the other, the one with the arbiter first."""
    time.sleep(2 + rank)
    pulse.leave(0)
    os._exit(0)


DOES = {
    "sleep": lambda rank: time.sleep(1000),
    "hold lock": hold_lock,
    "wait for one": wait_for_one,
    "fail alone": fail_alone,
    "ask": ask,
    "end well": end_well,
}

if __name__ == "__main__":
    signal.alarm(120)
    main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
