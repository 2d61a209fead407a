"""The doctor names each planted outlier: on facts of four ranks, on gloo, and as a command."""

import json
import re
import resource
import subprocess
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from launch import doctor as command
from parallel3d.config import RunConfig, hardware
from parallel3d.extras.calibrate.measure_device import Effort
from parallel3d.extras.doctor import checks
from parallel3d.extras.doctor.checks import (
    ALIKE,
    NEIGHBOURS,
    Timed,
    check,
    check_hosts,
    check_links,
)
from parallel3d.launch import _guards
from parallel3d.mesh import nodes as nodes_module
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.verify.local_ranks import run_locally
from tests.launch.launching import become, environment, fork, print_into, torchrun

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
GIB = 2**30
NODES = Nodes(("node0", "node0", "node1", "node1"), ("a", "a", "b", "b"))
HEALTHY = dict.fromkeys(ALIKE, "1.0") | {
    "clock": 0.0,
    "run directory": True,
    "data cache": True,
    "open files": 2**20,
    "locked memory": resource.RLIM_INFINITY,
    "shared memory": 8 * GIB,
    "free memory per rank": 64 * GIB,
    "free disk for runs": 900 * GIB,
}
CONFIG = RunConfig.from_json("ds.json")


def failures(rows=(HEALTHY,) * 4, groups=(), nodes=NODES):
    """The outliers and the remedy of each check that fails, by its name."""
    checks = [*check_hosts(CONFIG, rows, nodes), *check_links(groups, nodes, "h100")]
    assert len({row.name for row in checks}) == len(checks)
    assert all(bool(row.outliers) == bool(row.remedy) for row in checks)
    for row in checks:  # the hosts of the outliers stand in the message
        assert not row.outliers or nodes.in_words(row.outliers) in row.value + row.remedy
    return {row.name: (row.outliers, row.remedy) for row in checks if row.remedy}


def test_equal_hosts_pass():
    assert failures() == {}


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        *((name, "0.9", f"the same {name}") for name in ALIKE),
        ("clock", -30.0, "chronyc"),
        ("run directory", False, "parallel3d.run.directory"),
        ("open files", 256, "ulimit -n"),
        ("locked memory", 8 * 2**20, "memlock"),
        ("shared memory", 64 * 2**20, "--shm-size"),
        ("free memory per rank", 20 * GIB, "end the other processes"),
        ("free disk for runs", 2**20, "free some space"),
    ],
)
def test_differing_rank_is_named(name, value, remedy):
    """Rank 0 itself is named, too: the others are compared with each other, not with it."""
    for odd in (0, 2):
        rows = [HEALTHY | {name: value} if rank == odd else HEALTHY for rank in range(4)]
        ((failed, (outliers, text)),) = failures(rows).items()
        assert (failed, outliers) == (name, (odd,)) and remedy in text


def test_limit_that_a_remedy_names_is_enough():
    """As `ulimit -n`, Docker's --ulimit and its --shm-size 1g set them; or the host is left out."""
    low = {"open files": 256, "locked memory": 2**16, "shared memory": 2**26}
    low |= {"free memory per rank": GIB, "free disk for runs": 2**20}
    failed = failures([HEALTHY | low, HEALTHY, HEALTHY, HEALTHY])
    assert failed.keys() == low.keys()
    files = re.search(
        r"raise the limit to ([\d,]+) or more .* nofile=(\d+)", failed["open files"][1]
    )
    named = {"open files": int(files[2]), "locked memory": resource.RLIM_INFINITY}
    assert "--ulimit memlock=-1" in failed["locked memory"][1]
    assert "--shm-size 1g" in failed["shared memory"][1]
    named |= {"shared memory": 2**30, "free memory per rank": 64 * GIB, "free disk for runs": GIB}
    assert failures([HEALTHY | named, HEALTHY, HEALTHY, HEALTHY]) == {}
    assert failures([HEALTHY] * 3) == {}


def test_unshared_data_cache_passes():
    local_cache = HEALTHY | {"data cache": False}
    assert failures([HEALTHY, HEALTHY, local_cache, local_cache]) == {}
    assert failures([local_cache] * 4).keys() == {"data cache"}  # not even rank 0 can write to it


def grid(slow_ranks=(), slow_pair=None, hosts=None):
    """The rates of a 2x2x2 mesh's groups and of its ring, where what is slow has a tenth."""
    hosts = hosts or ("a",) * 8
    groups = {"pp": [(r, r + 4) for r in range(4)], "tp": [(r, r + 1) for r in (0, 2, 4, 6)]}
    groups["dp"] = [(0, 2), (1, 3), (4, 6), (5, 7)]
    groups[NEIGHBOURS] = [(r, (r + 1) % 8) for r in range(8)]
    for kind, members in groups.items():
        for ranks in members:
            is_slow = set(ranks) & set(slow_ranks) or (kind == NEIGHBOURS and ranks == slow_pair)
            num_machines = len({hosts[rank] for rank in ranks})
            yield Timed(kind, ranks, num_machines, 1e8 if is_slow else 1e9 / num_machines**2)


@pytest.mark.parametrize(
    "planted, outliers",
    [
        ({}, None),
        ({"hosts": ("a",) * 4 + ("b",) * 4}, None),  # the pp groups are on the network
        ({"slow_ranks": [5]}, (5,)),
        ({"slow_pair": (2, 3)}, (2, 3)),
    ],
    ids=["none", "two hosts", "rank", "link"],
)
def test_slow_links_are_located_where_slow_groups_intersect(planted, outliers):
    nodes = Nodes(("node",) * 8, planted.get("hosts", ("a",) * 8))
    failed = failures((HEALTHY,) * 8, list(grid(**planted)), nodes)
    assert failed.get("slow links", (None,))[0] == outliers


def test_slow_host_is_named_by_groups_without_common_ranks():
    nodes = Nodes(("h0", "h0", "h1", "h1", "h2", "h2"), tuple("aabbcc"))
    rates = {(0, 2): 1e8, (1, 3): 1e8, (2, 4): 1e8, (3, 5): 1e8, (4, 0): 1e9, (5, 1): 1e9}
    pairs = [pair for part in checks.rounds(nodes) for pair in part]
    assert {frozenset(p) for p in pairs} >= {frozenset((0, 2)), frozenset((1, 3))}
    groups = [Timed(NEIGHBOURS, ranks, 2, rate) for ranks, rate in rates.items()]
    assert failures((HEALTHY,) * 6, groups, nodes)["slow links"][0] == (2, 3)


@pytest.mark.parametrize("size", range(3, 10))
def test_ring_meets_each_rank_twice_and_once_per_round(size):
    nodes = Nodes(("h",) * size, tuple("ab"[rank % 2] for rank in range(size)))
    parts = checks.rounds(nodes)
    times = Counter()
    for pairs in parts:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))
        times.update(members)
    assert times == dict.fromkeys(range(size), 2)


IDEAL = {"link": 1.0, "latency": 1.0, "overhead_per_collective": 0.0}


def test_links_slower_than_the_hardware_file_fail():
    """The planner's seconds are a sum by hand: a ring moves half of 64 MiB over each link."""
    described = hardware.load("h100-sxm5-80gb")
    described = described.model_copy(update={"curves": {**IDEAL}})
    seconds = checks._planned_seconds("tp", 2**26, 2, 1, described)
    by_hand = 2**25 / described.link.bandwidth.value + described.link.latency.value
    assert seconds == pytest.approx(by_hand)
    fast = Timed("tp", (0, 1), 1, 200e9, planned=400e9)
    slow = Timed("tp", (2, 3), 1, 100e9, planned=400e9)
    assert failures(groups=[fast]) == {}
    ((name, (outliers, _)),) = failures(groups=[fast, slow]).items()
    assert (name, outliers) == ("links: tp", (2, 3))


def planted(rank, folder):
    """What the doctor says of four ranks, of which the third differs in everything."""
    raw = {"parallel3d.run.directory": folder, "parallel3d.data.cache": folder}
    checks.wait_until = look_once
    if rank == 2:
        checks.torch = SimpleNamespace(**vars(checks.torch) | {"__version__": "1.13"})
        checks.time = SimpleNamespace(time=lambda: time.time() + 20)
        checks.resource = SimpleNamespace(**vars(resource) | {"getrlimit": lambda _: (64, 64)})
        raw["parallel3d.run.directory"] = f"{folder}/own"
        checks.timings = partial(late, checks.timings)
    overrides = [word for key, value in raw.items() for word in (f"--{key}", value)]
    config = RunConfig.from_json("ds.json", [*overrides, "--mesh.pp", "2", "--mesh.tp", "2"])
    mesh = Mesh(pp=2, tp=2)
    rows = check(config, mesh, Effort(seconds=0.0, copied_bytes=2**18))
    mesh.barrier()
    return {row.name: row.outliers for row in rows}


def look_once(look, _):
    return look()


def late(timings, run, mesh, effort):
    """The timings of a rank that is late at each collective."""

    def run_late():
        time.sleep(0.08)
        run()

    return timings(run_late, mesh, effort)


def test_differing_rank_among_four_is_named(tmp_path):
    (tmp_path / "own").mkdir()
    rows = run_locally(planted, 4, str(tmp_path))
    assert all(row == rows[0] for row in rows)
    wrong = {name: outliers for name, outliers in rows[0].items() if outliers}
    named = {"torch", "clock", "run directory", "open files", "slow links"}
    assert wrong == dict.fromkeys(named, (2,))
    assert {"links: pp", "links: tp", "links: neighbours"} <= rows[0].keys()
    assert [*tmp_path.iterdir()] == [tmp_path / "own"]  # no file of the doctor stays


def doctor(*words, launcher, folder):
    program = str(ROOT / "launch" / "doctor.py")
    return subprocess.run(
        [*launcher, program, *words],
        cwd=folder,
        env=environment() | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_with_few_files(folder, out, log):
    """Run the command in this process, which may open few files."""
    become(["doctor.py", "--json"], folder, log, environment() | {"COLUMNS": "80"})
    print_into(out)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
    command.main()


def test_low_limit_ends_the_command_with_code_1_and_remedy(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    out = tmp_path / "out.txt"
    log = tmp_path / "log.txt"
    process = fork(run_with_few_files, folder, out, log)
    process.join(120)
    printed = log.read_text()
    assert process.exitcode == 1, printed
    report = json.loads(out.read_text())
    assert not report["passed"] and report["mesh"] == "1x1x1"
    (row,) = (row for row in report["checks"] if row["remedy"])
    assert (row["name"], row["outliers"]) == ("open files", [0])
    assert "open files            FAILS  ranks 0 on" in printed
    assert "ulimit -n" in printed and "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert not [*folder.iterdir()]


@pytest.mark.slow
def test_four_ranks_of_one_machine_pass(tmp_path):
    ended = doctor("--mesh.pp", "2", launcher=torchrun(4), folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "links: pp             ok" in ended.stdout and "links: dp" in ended.stdout


def links_on_rank(rank, bandwidth):
    """What a run says at its start of ranks on two hosts, beside a network of some bytes/s."""
    link = hardware.Link.model_validate({"bandwidth": bandwidth, "latency": 1e-6})
    described = hardware.load("H100-SXM5-80GB").model_copy(update={"network": link})
    mesh = Mesh(dp=2)
    lines = []
    start = time.monotonic()
    with (
        patch.object(checks, "described_hardware", lambda *_: described),
        patch.object(nodes_module, "find_nodes", lambda _: Nodes(("a", "b"), ("A", "B"))),
    ):
        _guards.warn_of_slow_links(CONFIG, mesh, lines.append)
    seconds = time.monotonic() - start
    with patch.object(checks, "slow_network", side_effect=AssertionError):
        _guards.warn_of_slow_links(CONFIG, mesh, lines.append)  # one host: nothing is measured
    mesh.close()
    return lines, seconds


@pytest.mark.parametrize(
    ("bandwidth", "is_slow"), [(1e12, True), pytest.param(1e3, False, marks=pytest.mark.slow)]
)
def test_run_over_several_hosts_warns_of_slow_links(bandwidth, is_slow):
    for lines, seconds in run_locally(links_on_rank, 2, bandwidth):
        assert len(lines) == is_slow and seconds < 5  # two, where the machine is idle
        if is_slow:
            assert "links: dp" in lines[0] and "NCCL_SOCKET_IFNAME" in lines[0]
