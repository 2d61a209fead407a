"""Hosts that are lost in a step: each side says once whom it lost, and ends; the run goes on."""

import json
import re
import time

import pytest

from tests.checkpoint import drill
from tests.hosts.hosts import wait_until
from tests.hosts.launches import Run, forked, torchrun, without_dropout

pytestmark = [pytest.mark.drill, pytest.mark.slow]

STEPS = 60
# seconds until a rank ends; tests/launch/test_hangs.py
KILLED_WITHIN = 10.0
SILENT_WITHIN = 30.0
LAUNCHER_WITHIN = 60.0  # torchrun, on the host of its rendezvous
FAILED = 1
BAD_INPUT = 2
DP = (1, 2, 1)
PP = (2, 1, 1)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = without_dropout(drill.prepared_config(tmp_path_factory.mktemp("lost")))
    config["train_micro_batch_size_per_gpu"] = 6  # for three hosts, two, and one
    config["parallel3d"]["train"]["steps"] = STEPS
    config["parallel3d"]["checkpoint"] |= {"every": 5}
    return config


@pytest.fixture(scope="module")
def alone(config):
    run = drill.Run(config, "alone", (1, 1, 1))
    assert [end.code for end in run.start()] == [0]
    return run


def slow_steps(rank):
    """Steps of a tenth of a second, so that a host is lost in one."""
    from parallel3d.mesh.pulse import rank as pulse

    doing = pulse.doing

    def do(text):
        doing(text)
        if text.startswith("0F0 "):
            time.sleep(0.1)

    pulse.doing = do


def begin(launch, hosts, run, mesh, **options):
    """Start a run on `hosts`; returns in a step after its first checkpoint."""
    if launch is forked:
        options["disturb"] = slow_steps
    launched = launch(hosts, run.words(mesh), run.log, run.root, **options)
    launched.wait_for(lambda: run.saved(5) and len(run.lines) > 6)
    return launched


def sentences(text):
    """What a log says of the end: one line, which names a rank and its host."""
    return [line for line in text.splitlines() if line.endswith("; the run ends")]


def ranks_end(hosts):
    """No rank runs on these hosts; launchers and sentries have their own patience."""
    lines = [line for host in hosts for line in host.processes()]
    return all("bin/torchrun" in line or "sentry import" in line for line in lines)


def go_on(launch, hosts, run, mesh, reference, **options):
    """The run on what is left, on another mesh: every sample once, with the losses of one."""
    done = len(run.lines)
    assert 5 < done < STEPS
    launched = launch(hosts, run.words(mesh), run.log, run.root, **options)
    assert set(launched.codes()) == {0}, launched.output
    assert "resume  from " in launched.texts[0]
    run.check_same(reference)
    return launched.texts[0]


def faults(run):
    """What the run's journal says of its faults."""
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    return [event["reason"] for event in events if event["event"] == "fault"]


@pytest.mark.parametrize("victim", [1, 0], ids=["node1", "node0"])
def test_ranks_end_when_the_link_of_a_host_goes_down(given_hosts, config, alone, tmp_path, victim):
    """Both hosts live, and each says that the other is silent."""
    hosts = given_hosts()
    run = Run(config, f"down-{victim}", tmp_path)
    launched = begin(forked, hosts, run, DP)
    hosts[victim].set_link("down")
    began = time.monotonic()
    assert launched.codes(SILENT_WITHIN) == [FAILED] * 2, launched.output
    print(f"ranks ended after {time.monotonic() - began:.1f} s")
    for here, text in enumerate(launched.texts):
        (line,) = sentences(text)
        assert line.startswith(f"rank {1 - here} on node{1 - here} has been silent for "), line
        assert line.endswith("its machine or its network is down; the run ends")
    assert len(faults(run)) == 2
    go_on(forked, [hosts[1 - victim]], run, PP, alone, ranks=2)


def test_ranks_end_when_a_link_goes_down_under_torchrun(given_hosts, config, alone, tmp_path):
    """Its agent on the host that is cut off outlives its ranks by more than 90 s."""
    hosts = given_hosts()
    run = Run(config, "down-torchrun", tmp_path)
    launched = begin(torchrun, hosts, run, DP)
    hosts[1].set_link("down")
    waited = wait_until(lambda: ranks_end(hosts), SILENT_WITHIN, lambda: launched.output)
    print(f"ranks ended after {waited:.1f} s")
    assert launched.processes[0].wait(LAUNCHER_WITHIN) == FAILED
    for here, text in enumerate(launched.texts):
        (line,) = sentences(text)
        assert line.startswith(f"rank {1 - here} on node{1 - here} has been silent for "), line
    go_on(torchrun, hosts[:1], run, PP, alone, ranks=2)


@pytest.mark.parametrize("launch", [forked, torchrun])
@pytest.mark.parametrize("victim", [1, 0], ids=["node1", "node0"])
def test_run_resumes_after_all_processes_of_a_host_are_killed(
    given_hosts, config, alone, tmp_path, launch, victim
):
    """With rank 0's host its lock is left: the next launch waits until it has no heartbeat."""
    hosts = given_hosts()
    run = Run(config, f"killed-{launch.__name__}-{victim}", tmp_path)
    launched = begin(launch, hosts, run, DP)
    hosts[victim].kill()
    other = 1 - victim
    waited = wait_until(lambda: ranks_end(hosts), KILLED_WITHIN, lambda: launched.output)
    print(f"the other rank ended after {waited:.1f} s")
    if launch is forked:
        assert launched.codes()[other] == FAILED, launched.output
    (line,) = sentences(launched.texts[other])
    assert line.startswith(f"rank {victim} on node{victim} died at "), line
    assert sentences(launched.texts[victim]) == []
    assert len(faults(run)) == 1
    left = go_on(launch, [hosts[other]], run, PP, alone, ranks=2)
    assert ("waiting up to 30 s for its heartbeat" in left) == (victim == 0), left


def test_torchrun_restarts_all_ranks(given_hosts, config, alone, tmp_path):
    """The agent of the host whose rank is killed restarts it, and the other one its own."""
    hosts = given_hosts()
    run = Run(config, "again", tmp_path)
    options = {"max-restarts": 3, "rdzv_conf": "last_call_timeout=3"}
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launched = begin(torchrun, hosts, run, DP, variables=variables, **options)
    hosts[1].do("pkill", "-KILL", "-f", "python.* -u .*train.py")
    assert launched.codes(240) == [0, 0], launched.output
    assert len(faults(run)) == 1
    run.check_same(alone)


def test_two_of_three_hosts_go_on_without_the_third(given_hosts, config, alone, tmp_path):
    """Two hosts name the third, which names rank 0; the two go on without it."""
    hosts = given_hosts(3)
    run = Run(config, "cut-2", tmp_path)
    launched = begin(forked, hosts, run, (1, 3, 1))
    hosts[2].set_port("down")
    assert launched.codes(SILENT_WITHIN) == [FAILED] * 3, launched.output
    messages = [sentences(text) for text in launched.texts]
    assert messages[0] == messages[1] and len(messages[0]) == len(messages[2]) == 1, messages
    assert messages[0][0].startswith("rank 2 on node2 has been silent for "), messages
    assert messages[2][0].startswith("rank 0 on node0 has been silent for "), messages
    go_on(forked, hosts[:2], run, DP, alone)


def test_two_sides_never_write_to_one_run(given_hosts, config, alone, tmp_path):
    """Rank 0's host is cut off; the others are started anew, once before it has ended."""
    hosts = given_hosts(3)
    run = Run(config, "cut-0", tmp_path)
    launched = begin(forked, hosts, run, (1, 3, 1))
    hosts[0].set_port("down")
    for host in hosts[1:]:
        host.kill()
    early = forked(hosts[1:], run.words(DP), run.log, run.root)
    assert early.codes(SILENT_WITHIN) == [BAD_INPUT] * 2, early.output
    assert early.output.count("two launches cannot write to one run") == 1, early.output
    assert " on node0, " in early.output
    assert launched.processes[0].exitcode is None, launched.output  # it still held the run
    codes = launched.codes(SILENT_WITHIN)
    (line,) = sentences(launched.texts[0])
    assert codes[0] == FAILED
    assert re.match(r"rank (1 on node1|2 on node2) has been silent for ", line), line
    go_on(forked, hosts[1:], run, DP, alone)
