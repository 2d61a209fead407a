"""The memory of hosts that are real: a run goes on after the loss of one of them."""

import json

import pytest

from tests.checkpoint import drill
from tests.hosts.launches import Run, forked, torchrun, without_dropout

pytestmark = [pytest.mark.drill, pytest.mark.slow]

STEPS = 60
EVERY = 3


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


@pytest.mark.parametrize("launch", [forked, torchrun])
def test_run_resumes_after_losing_a_host_and_its_memory(given_hosts, config, tmp_path, launch):
    """Two hosts, each with a /dev/shm of its own; the launch after it has the bits of one run."""
    hosts = given_hosts()
    for host in hosts:
        host.do("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    name = f"whole-{launch.__name__}"
    whole = Run(config, name, tmp_path, parallel3d__checkpoint__in_memory_every=0)
    launched = launch(hosts[:1], whole.words((2, 1, 1)), whole.log, tmp_path, ranks=2)
    assert launched.codes() == [0] * len(launched.processes), launched.output
    run = Run(config, f"lost-{launch.__name__}", tmp_path)
    launched = launch(hosts, run.words((2, 1, 1)), run.log, tmp_path)
    launched.wait_for(lambda: len(run.lines) > 4 * EVERY)
    hosts[1].kill()
    hosts[1].do("umount", "/dev/shm")
    hosts[1].do("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    launched.codes()
    launched = launch(hosts, run.words((2, 1, 1)), run.log, tmp_path)
    assert set(launched.codes()) == {0}, launched.output
    second = launches(run)[1]
    assert second["tier"] == "memory" and second["lost_steps"] < 2 * EVERY, second
    assert [line["step"] for line in run.lines] == [*range(1, STEPS + 1)]
    for line, other in zip(run.lines, whole.lines, strict=True):
        assert (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])
    for host in hosts:
        assert "step-" not in host.do("find", "/dev/shm").stdout
