"""The memory of hosts that are real: a launch goes on after the loss of a process or of a host."""

import json
import time

import pytest

from tests.checkpoint import drill
from tests.hosts.launches import Run, torchrun, without_dropout

pytestmark = [pytest.mark.drill, pytest.mark.slow]

STEPS, EVERY = 60, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = without_dropout(drill.prepared_config(tmp_path_factory.mktemp("memory")))
    config["parallel3d"]["train"]["steps"] = STEPS
    config["parallel3d"]["checkpoint"] |= {"every": 50, "in_memory_every": EVERY}
    return config


def launches(run):
    path = run.folder / "events.jsonl"
    lines = [*map(json.loads, path.read_text().splitlines())] if path.exists() else []
    return [line for line in lines if line["event"] == "launch"]


def ranks_of(host):
    """The pids of the ranks on a host, as it numbers them."""
    found = host.do("pgrep", "-f", "launch/train.py --config", check=False).stdout.split()
    parents = host.do("pgrep", "-f", "bin/torchrun", check=False).stdout.split()
    return [pid for pid in found if pid not in parents]


@pytest.mark.parametrize("lost", ["process", "memory", "host"])
def test_a_launch_goes_on_from_memory(given_hosts, config, tmp_path, lost):
    """torchrun restarts all ranks; "host" begins again on hosts, one of which has lost its memory.

    2 x 2 ranks on two hosts, each with a /dev/shm of its own.
    """
    hosts = given_hosts()
    for host in hosts:
        host.do("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    whole = Run(config, f"whole-{lost}", tmp_path, parallel3d__checkpoint__in_memory_every=0)
    launched = torchrun(hosts[:1], whole.words((2, 1, 1)), whole.log, tmp_path, ranks=2)
    assert launched.codes() == [0], launched.said
    run = Run(config, lost, tmp_path)
    options = {} if lost == "host" else {"max_restarts": 3}
    launched = torchrun(hosts, run.words((2, 1, 1)), run.log, tmp_path, ranks=1, **options)
    launched.wait_for(lambda: len(run.lines) > 4 * EVERY)
    if lost == "host":
        hosts[1].kill()
    victim = hosts[1] if lost != "process" else hosts[0]
    if lost != "process":
        victim.do("umount", "/dev/shm", check=False)
        victim.do("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    began = time.monotonic()
    if lost != "host":
        victim.do("kill", "-9", ranks_of(victim)[-1])
    else:
        launched.codes()
        launched = torchrun(hosts, run.words((2, 1, 1)), run.log, tmp_path, ranks=1)
    launched.wait_for(lambda: len(launches(run)) == 2)
    print(f"restored {time.monotonic() - began:.1f} s after the loss of the {lost}")
    assert set(launched.codes()) == {0}, launched.said
    second = launches(run)[1]
    assert second["tier"] == "memory" and second["lost_steps"] < 2 * EVERY, second
    assert [line["step"] for line in run.lines] == [*range(1, STEPS + 1)]
    for line, other in zip(run.lines, whole.lines, strict=True):
        assert (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])
    for host in hosts:
        assert "step-" not in host.do("find", "/dev/shm").stdout
