"""`plan --explain-run` names what was made slow in real runs: six plants of three sizes each.

The machine is calibrated first, by the real command. Ranks have the threads that the plan counts
on, except where a thread is missing. The hosts of a slow link are namespaces.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from parallel3d.config import RunConfig, hardware
from parallel3d.data.prepare import prepare
from parallel3d.pipeline.executor import Executor
from parallel3d.plan.report.plan_rows import compare_run
from parallel3d.train.feed import Feed
from tests.config.styles import WORDS, corpus_in, filled
from tests.hosts.launches import forked
from tests.launch.launching import TRAIN, environment
from tests.train.running import folder_of, start

pytestmark = [pytest.mark.drill, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))
STEPS = 12
EVERY = 6  # the newest line has the mean of the last six steps
WIDTH = 256
SIZES = pytest.mark.parametrize("times", [0.5, 1, 2])


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The description of this machine, with `CORES` processes of a thread, or one of all."""
    root = tmp_path_factory.mktemp("calibrated")
    env = environment() | {"XDG_CONFIG_HOME": str(root), "PYTHONPATH": str(ROOT)}
    env.pop("OMP_NUM_THREADS", None)
    words = [sys.executable, ROOT / "launch/plan.py", "--calibrate"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return hardware.load(str(root / "parallel3d/hardware/this-machine.json"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    data = corpus_in(root)
    for number in range(40):
        words = [WORDS[(number + place * place) % len(WORDS)] for place in range(4000)]
        (root / f"{number}.txt").write_text(" ".join(words))
    return data


def config(corpus, name, micro=8, accumulation=1, width=WIDTH, seq=128):
    """A small GPT, whose micro batch cannot be larger with one microbatch."""
    raw = filled({}, corpus, steps=STEPS, name=name)
    raw |= {"wall_clock_breakdown": True, "steps_per_print": EVERY}
    raw |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    raw.pop("train_batch_size", None)
    block = raw["parallel3d"]
    block["model"] |= {"hidden_size": width, "max_position_embeddings": seq}
    block["model"] |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    block["data"] = {**corpus, "sequence_length": seq}
    block["train"] |= {"evaluate_samples": 4, "evaluate_every": 0}
    block["checkpoint"] = {"every": 0}
    return raw


def explained(raw, machine):
    explanation, plan = compare_run(folder_of(raw), machine)
    print(folder_of(raw), plan.time.seconds, json.dumps(explanation.to_json(), indent=1))
    return explanation


def run(raw, ranks, machine, plant=None, threads=None):
    """What is said of a run over `ranks` replicas, each of which calls `plant(rank)` first."""
    ended = start(raw, (1, ranks, 1), planted, threads or max(1, CORES // ranks), plant)
    assert [rank.error for rank in ended] == [""] * ranks
    return explained(raw, machine)


def planted(rank, threads, plant):
    torch.set_num_threads(threads)
    if plant:
        plant(rank)


def share_cores(rank):
    """Take one thread: the hosts are one machine."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def later(function, seconds):
    """The function, some seconds later."""

    def slow(*words, **options):
        time.sleep(seconds)
        return function(*words, **options)

    return slow


def slow_passes(slow_rank, seconds, rank):
    if rank == slow_rank:
        Executor._forward = later(Executor._forward, seconds)


def slow_reads(seconds, rank):
    Feed._step = later(Feed._step, seconds)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2)])
def test_undisturbed_run_names_nothing(corpus, machine, ranks, stage):
    """With the ZeRO stages that are planned to be the fastest."""
    raw = config(corpus, f"undisturbed-{ranks}")
    raw["zero_optimization"] = {"stage": stage}
    told = run(raw, ranks, machine)
    assert told.part == "" and told.setting.startswith("none")


@SIZES
def test_slow_rank_is_named(corpus, machine, times):
    raw = config(corpus, f"rank-{times}", micro=4, accumulation=2)
    told = run(raw, 2, machine, partial(slow_passes, 1, 0.2 * times))
    assert (told.part, told.rank) == ("slow rank", 1)
    assert told.excess == pytest.approx(0.4 * times, rel=0.3)


@SIZES
def test_loader_without_read_ahead_is_named(corpus, machine, times):
    raw = config(corpus, f"loader-{times}")
    raw["parallel3d"]["data"]["read_ahead"] = 0
    told = run(raw, 1, machine, partial(slow_reads, 0.2 * times))
    assert told.part == "data" and told.setting.startswith("parallel3d.data.read_ahead")
    assert told.excess == pytest.approx(0.2 * times, rel=0.3)


def test_loader_that_no_read_ahead_hides_is_named(corpus, machine):
    told = run(config(corpus, "loader"), 1, machine, partial(slow_reads, 0.5))
    assert told.part == "data" and told.setting.startswith("parallel3d.data.cache")


@SIZES
def test_missing_thread_is_named(corpus, machine, times):
    raw = config(corpus, f"thread-{times}", width=round(2 * WIDTH * times))
    told = run(raw, 1, machine, threads=CORES - 1)
    assert told.part == "compute"
    assert told.setting == f"OMP_NUM_THREADS: {CORES} for each rank instead of {CORES - 1}"


@SIZES
def test_tiny_microbatch_is_named(corpus, machine, times):
    accumulation = round(16 * times)
    raw = config(corpus, f"micro-{times}", 1, accumulation, width=64, seq=32)
    told = run(raw, 2, machine)
    assert told.setting.startswith("micro batch") and told.gain > 0


@SIZES
def test_slow_link_is_named(corpus, machine, given_hosts, tmp_path, times):
    hosts = given_hosts()
    for host in hosts:
        host.slow_down(f"{round(200 / times)}mbit")
    raw = config(corpus, f"link-{times}")
    prepare(RunConfig.from_dict(raw).data)
    path = tmp_path / "link.json"
    path.write_text(json.dumps(raw))
    words = [TRAIN, "--config", str(path)]
    launched = forked(hosts, words, lambda host: tmp_path / host, tmp_path, disturb=share_cores)
    assert set(launched.codes()) == {0}, launched.output
    told = explained(raw, machine)
    assert told.part == "reduction" and told.setting.startswith("the link between its ranks")


@SIZES
def test_offload_of_parameters_is_named(corpus, machine, times):
    """This engine overlaps no offload."""
    raw = config(corpus, f"offload-{times}", 4, width=round(4 * WIDTH * times), seq=16)
    raw["zero_optimization"] = {"stage": 3}
    for name in ("offload_param", "offload_optimizer"):  # the host's Adam is the faster one
        raw["zero_optimization"][name] = {"device": "cpu"}
    told = run(raw, 1, machine)
    assert told.setting == "parameters on none" and told.gain > 0
