"""A run over nodes, or ranks of one, whose last rank is killed or stopped; it is started again.

Each process that a launcher has started plays one rank's launcher: it starts launch/train.py as a
child with its own place in the world, so that a rank's death is none of the real launcher's.
"""

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from parallel3d.mesh.launch import Launch
from parallel3d.verify.local_ranks import free_port
from tests.launch.launching import PYTHON, Place, environment
from tests.launch.test_restart import SMALL, is_saved, steps_of
from tests.train.test_profiler import sent_before_used

WITHIN = {signal.SIGKILL: 10.0, signal.SIGSTOP: 30.0}  # seconds until every other rank has ended
PROFILED = 2  # steps
_PATIENCE = 300.0  # seconds


class Meeting:
    """Where the processes wait for each other, through the launcher's store."""

    def __init__(self, launch: Launch) -> None:
        self.rank = launch.rank
        self.size = launch.world_size
        store, *_ = next(dist.rendezvous("env://"))
        self._store = dist.PrefixStore("crossing", store)
        self._store.set_timeout(timedelta(seconds=_PATIENCE))

    def tell(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def hear(self, name: str) -> str:
        """Waits until it has been told."""
        return self._store.get(name).decode()

    def all(self, name: str, value: object = None) -> list:
        """What each has said by that name, in the order of ranks."""
        self.tell(f"{name}/{self.rank}", json.dumps(value))
        return [json.loads(self.hear(f"{name}/{rank}")) for rank in range(self.size)]


class Crossing:
    """A small run with ZeRO-3 over a pipeline from node to node, in a folder that all see.

    On one node the pipeline is one of all ranks.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch = launch
        self.meeting = Meeting(launch)
        if launch.rank == 0:
            Place(folder)
        self.meeting.all("place")
        self.place = Place(folder)
        self.nodes = launch.world_size // launch.local_world_size

    def blow(self, number: signal.Signals) -> tuple[str, list[str]]:
        """What is to be said of it, and what was wrong."""
        name = f"run-{number.name}"
        child, log = self._start(name, 4000)
        last = self.launch.world_size - 1
        try:
            if self.launch.rank == last:
                self._wait(child, lambda: is_saved(self.place, name, 10), log)
                child.send_signal(number)
                self.meeting.tell(name, "struck")
            self.meeting.hear(name)
            start = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                child.wait(WITHIN[number] + 60)
            seconds = time.monotonic() - start
            code = child.poll()
        finally:
            child.kill()
            child.wait()
        ends = self.meeting.all(f"{name} ended", (code, seconds, log.read_text()[-3000:]))
        others = ends[:last]
        slowest = max(seconds for _, seconds, _ in others)
        text = f"{number.name} of rank {last}: all others end after {slowest:.1f} s"
        wrong = [f"rank {r} ended with {c}" for r, (c, *_) in enumerate(others) if c != 1]
        if slowest > WITHIN[number]:
            wrong.append(f"more than {WITHIN[number]:.0f} s")
        if not any(f"rank {last} on" in log_text for *_, log_text in others):
            wrong.append(f"nobody names rank {last}: {others[0][2]}")
        return text, wrong

    def resume(self, number: signal.Signals) -> tuple[str, list[str]]:
        """The same command goes on from what was saved, and profiles its first steps."""
        name = f"run-{number.name}"
        first = max(steps_of(self.place, name))
        self.meeting.all(f"{name} seen")
        profile = {"start": first + 1, "steps": PROFILED}
        child, log = self._start(name, first + 6, profile)
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE)
        finally:
            child.kill()
            code = child.wait()
        ends = self.meeting.all(f"{name} resumed", (code, log.read_text()[-3000:]))
        wrong = [
            f"rank {r} ended with {c}: {log_text}" for r, (c, log_text) in enumerate(ends) if c
        ]
        if steps_of(self.place, name) != list(range(1, first + 7)):
            wrong.append("metrics.jsonl does not have each step once")
        run = self.place.root / "runs" / name
        late = self._out_of_order(run) if not wrong else 0
        if late:
            wrong.append(f"{late} messages were used before they were sent: the clocks differ")
        speed = self.place.lines(name)[-1]["tokens_per_second"]
        return f"resumed, one clock for all ranks; {speed:,.0f} tokens/s of the small run", wrong

    def _start(self, name: str, steps: int, profile: dict | None = None):
        stages = self.nodes if self.nodes > 1 else self.launch.world_size
        options = ["--parallel3d.mesh.pp", stages, "--parallel3d.run.name", name]
        options += ["--parallel3d.model.num_hidden_layers", max(2, stages)]
        options += ["--parallel3d.checkpoint.every", 10]
        for key, value in (profile or {}).items():
            options += [f"--parallel3d.train.profile.{key}", value]
        command = self.place.command(PYTHON, *SMALL, *options, steps=steps)
        port = self.meeting.all(f"{name} to {steps}", free_port())[0]
        launch = self.launch
        world = {
            "RANK": launch.rank,
            "LOCAL_RANK": launch.local_rank,
            "WORLD_SIZE": launch.world_size,
            "LOCAL_WORLD_SIZE": launch.local_world_size,
            "MASTER_PORT": port,
            "MASTER_ADDR": os.environ["MASTER_ADDR"],
        }
        env = {k: v for k, v in environment().items() if not k.startswith("TORCHELASTIC_")}
        log = self.place.root / f"{name}-{steps}-{launch.rank}.txt"
        with log.open("w") as file:
            child = subprocess.Popen(
                command,
                cwd=self.place.root,
                stdout=file,
                stderr=file,
                env=env | {key: str(value) for key, value in world.items()},
            )
        return child, log

    def _wait(self, child: subprocess.Popen, condition, log: Path) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)

    def _out_of_order(self, run: Path) -> int:
        """Of the messages along each pipeline, how many the timeline shows used before sent."""
        events = json.loads((run / "profile" / "timeline.json").read_text())["traceEvents"]
        pipelines = defaultdict(list)
        for event in events:
            if event["name"] == "process_name":  # "rank 3 (pp 1, dp 0, tp 1)"
                pipelines[event["args"]["name"].partition(", ")[2]].append(event["pid"])
        wrong = 0
        for ranks in pipelines.values():
            pairs = sent_before_used(events, ranks)
            assert pairs, "no messages in the timeline"
            wrong += sum(before >= after for before, after in pairs)
        return wrong
