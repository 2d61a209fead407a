"""One run on two hosts by each launcher, with the losses of one process on one host."""

import time

import pytest

from tests.checkpoint import drill
from tests.hosts.launches import Run, deepspeed, forked, srun, torchrun, without_dropout

pytestmark = pytest.mark.drill

BAD_INPUT = 2
DP = (1, 2, 1)
PP = (2, 1, 1)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    raw = without_dropout(drill.prepared_config(tmp_path_factory.mktemp("launchers")))
    return drill.changed(raw, {"parallel3d.train.steps": 3})


@pytest.fixture(scope="module")
def alone(config):
    """The run of one process, which no network can disturb."""
    run = drill.Run(config, "alone", (1, 1, 1))
    assert [end.code for end in run.start()] == [0]
    return run


def train(launch, hosts, run, mesh, **changes):
    began = time.monotonic()
    launched = launch(hosts, run.words(mesh, **changes), run.log, run.root)
    codes = launched.codes()
    assert set(codes) == {0}, launched.output
    print(f"{run.name} on {mesh}: {time.monotonic() - began:.1f} s")
    return "".join(launched.texts)


def test_two_hosts_train_like_one_process(given_hosts, config, alone, tmp_path):
    """By srun's variables; the first host's name is 127.0.1.1 there, as Debian has it."""
    run = Run(config, "two", tmp_path)
    train(forked, given_hosts(loopback=[0]), run, DP)
    run.check_same(alone)


def test_refusal_on_rank_0_ends_all_ranks_of_srun(given_hosts, config, tmp_path):
    """Without MASTER_PORT, as docs/several-nodes.md starts it: before the ranks have met."""
    run = Run(config, "refused", tmp_path)
    run.folder.mkdir(parents=True)
    words = run.words(DP, parallel3d__checkpoint__resume="none")
    launched = forked(given_hosts(), words, run.log, run.root)
    assert launched.codes(20) == [BAD_INPUT] * 2, launched.output
    assert launched.output.count('checkpoint.resume = "none" starts afresh') == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch, loopback",
    [(torchrun, []), (torchrun, [0, 1]), (deepspeed, [0]), (srun, [0, 1])],
    ids=["torchrun", "torchrun by 127.0.1.1", "deepspeed", "srun"],
)
def test_launcher_trains_saves_and_resumes(given_hosts, config, alone, tmp_path, launch, loopback):
    """On one mesh, and from its checkpoint on another."""
    hosts = given_hosts(loopback=loopback)
    first = Run(config, f"{launch.__name__}-{len(loopback)}-dp", tmp_path)
    train(launch, hosts, first, DP, parallel3d__checkpoint__keep=4)
    first.check_same(alone)
    then = Run(config, f"{launch.__name__}-{len(loopback)}-pp", tmp_path)
    resume = str(first.folder / "checkpoints/step-2")
    output = train(launch, hosts, then, PP, parallel3d__checkpoint__resume=resume)
    assert f"resume  from {resume}: step 2" in output
    then.check_same(alone, first=3)
