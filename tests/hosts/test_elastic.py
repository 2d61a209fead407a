"""torchrun --nnodes 1:2: a host is lost and comes back, and one run goes on on either mesh."""

import json
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest

from parallel3d.base.mesh_sizes import MeshSizes
from tests.checkpoint import drill
from tests.hosts.launches import PORT, Launched, Run, start, torchrun, without_dropout
from tests.hosts.test_lost import faults

pytestmark = [pytest.mark.drill, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 100
BATCH = 4
RANK = str(Path(__file__).with_name("elastic_rank.py"))
# As docs/several-nodes.md starts it: on a host that does not train.
STORE = (
    "import time, torch.distributed as d; s = d.TCPStore('0.0.0.0', %d, is_master=True, "
    "wait_for_workers=False); time.sleep(1e9)"
)
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
PAIR = "1x2x1"
ONE = "1x1x1"
DONE = 0


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = without_dropout(drill.prepared_config(tmp_path_factory.mktemp("elastic")))
    config["parallel3d"]["train"]["steps"] = STEPS
    config["parallel3d"]["checkpoint"] |= {"every": 5}
    return config


@pytest.fixture(scope="module")
def alone(config):
    run = drill.Run(config, "alone", (1, 1, 1))
    assert [end.code for end in run.start(timeout=300)] == [DONE]
    return run


class Elastic:
    """A run on hosts that come and go; a further host, the first, holds their rendezvous."""

    def __init__(self, hosts, run, mesh=(1, 2, 1), ranks=1):
        self.run = run
        (self.store, *self.hosts) = hosts
        self.ranks = ranks
        self.notes = run.root / "notes"
        self.notes.mkdir()
        self.words = [RANK, *run.words(mesh)[1:]]
        self.agents = {}
        self._count = 0
        words = [sys.executable, "-c", STORE % PORT]
        self._holder = start(self.store, words, run.root / "store.log", run.root)
        self.slow(0.05)

    def slow(self, seconds):
        """So long for each step from now on."""
        partial = self.notes / "partial"
        partial.write_text(str(seconds))
        partial.rename(self.notes / "seconds")

    def begin(self, host):
        """A torchrun on a host; gives it."""
        self._count += 1
        options = {"nnodes": "1:2", "max-restarts": 50, "rdzv_conf": RENDEZVOUS}
        variables = {"ELASTIC_TEST": str(self.notes), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

        def log(name):
            return self.run.log(f"{name}-{self._count}")

        agent = torchrun(
            [host],
            self.words,
            log,
            self.run.root,
            ranks=self.ranks,
            store=self.store,
            variables=variables,
            **options,
        )
        self.agents[host.name] = agent
        return agent

    @property
    def events(self):
        path = self.run.folder / "events.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    @property
    def launches(self):
        """The mesh of each launch that has taken a step."""
        meshes = []
        for event in self.events:
            if event["event"] == "launch":
                mesh = event["mesh"]
            elif event["event"] == "first_step":
                meshes.append(mesh)
        return meshes

    @property
    def launched(self):
        """The agents that should live."""
        agents = self.agents.values()
        return Launched([a.processes[0] for a in agents], [a.logs[0] for a in agents])

    def wait_for_step_on(self, mesh, more_than=0):
        """Until a launch on `mesh`, after so many others, has taken a step; gives their number."""
        self.launched.wait_for(lambda: self.launches[more_than:][-1:] == [mesh], 240)
        return len(self.launches)

    def rolled_back(self):
        """The steps that were done and trained again."""
        return [e["lost_steps"] for e in self.events if e["event"] == "launch" and e["lost_steps"]]

    def check_samples(self):
        """That in the launch that took a step last, its samples are there once; gives the others.

        Each dp coordinate has a share, which all its ranks take.
        """
        steps = defaultdict(dict)  # the shares of each step by launch, the last launch at the end
        paths = self.notes.glob("samples-*.jsonl")
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        for line in sorted(lines, key=lambda line: line["time"]):
            shares = steps[line["start"]].setdefault(line["launch"], set())
            shares.add(tuple(line["samples"]))
        assert sorted(steps) == list(range(0, STEPS * BATCH, BATCH))
        for first, launches in steps.items():
            *_, shares = launches.values()
            assert sorted(chain(*shares)) == list(range(first, first + BATCH)), (first, launches)
        return [first // BATCH + 1 for first, taken in sorted(steps.items()) if len(taken) > 1]


def times(events):
    """What the journal says of each launch: seconds from its processes to its first step."""
    return [round(e["seconds"], 1) for e in events if e["event"] == "first_step"]


@pytest.mark.parametrize(
    ("victim", "whole", "remaining"),
    [(0, PAIR, ONE), (1, "2x2x1", "2x1x1")],
    ids=["rank 0", "4 ranks"],
)
def test_run_continues_while_a_host_is_lost_and_comes_back(
    given_hosts, config, alone, tmp_path, victim, whole, remaining
):
    mesh = MeshSizes.parse(whole)
    changes = {"parallel3d__mesh__dp": 2, "parallel3d__mesh__fallbacks": [remaining]}
    run = Run(config, f"elastic-{victim}", tmp_path, **changes)
    elastic = Elastic(given_hosts(3), run, (mesh.pp, mesh.dp, mesh.tp), mesh.ranks // 2)
    lost = elastic.hosts[victim]
    left = elastic.hosts[1 - victim]
    for host in (lost, left):
        elastic.begin(host)
    number = elastic.wait_for_step_on(whole)
    elastic.launched.wait_for(lambda: run.saved(5) and len(run.lines) > 6)
    elastic.slow(2)
    lost.kill()
    del elastic.agents[lost.name]
    number = elastic.wait_for_step_on(remaining, number)
    elastic.begin(lost)
    elastic.wait_for_step_on(whole, number)
    elastic.slow(0.02)
    assert elastic.launched.codes() == [DONE] * 2, elastic.launched.output
    assert [line["step"] for line in run.lines] == list(range(1, STEPS + 1))
    for line, other in zip(run.lines, alone.lines, strict=True):
        assert line["tokens"] == other["tokens"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), (line, other)
    print("steps taken twice:", elastic.check_samples(), "first steps:", times(elastic.events))
    chosen = {e["mesh"]: e["chosen"] for e in elastic.events if e["event"] == "launch"}
    assert chosen[whole] is None
    assert chosen[remaining].startswith(
        f"parallel3d.mesh: {remaining} of fallbacks, because {whole} "
    )
    assert chosen[remaining] in elastic.agents[left.name].texts[0]
    assert json.loads((run.folder / "attempts.json").read_text())["deaths"] == []


def test_run_continues_after_a_host_leaves_until_the_stop_file(given_hosts, config, tmp_path):
    """Its torchrun is told to end: the other host's must not take the stop for the run's end."""
    changes = {"parallel3d__mesh__dp": 2, "parallel3d__mesh__fallbacks": [ONE]}
    run = Run(config, "leaves", tmp_path, **changes)
    elastic = Elastic(given_hosts(3), run)
    leaves = elastic.hosts[1]
    elastic.slow(0.5)
    for host in elastic.hosts:
        elastic.begin(host)
    number = elastic.wait_for_step_on(PAIR)
    steps = len(run.lines)
    leaves.do("pkill", "-TERM", "-f", "bin/torchrun")
    del elastic.agents[leaves.name]
    elastic.wait_for_step_on(ONE, number)
    assert faults(run) == []
    steps_on_one = len(run.lines)
    assert steps_on_one > steps
    (run.folder / "STOP").touch()
    assert elastic.launched.codes() == [DONE], elastic.launched.output
    assert elastic.events[-1]["event"] == "end" and elastic.events[-1]["stopped"]
    assert [line["step"] for line in run.lines] == list(range(1, len(run.lines) + 1))
    assert not elastic.rolled_back()
