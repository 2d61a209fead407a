"""The doctor over hosts: one table under each launcher, with the odd host and the slow link."""

import json
import re
import time

import pytest

from tests.hosts.launches import DOCTOR, deepspeed, forked, srun, torchrun

pytestmark = [pytest.mark.drill, pytest.mark.slow]

FAILED = 1
WITHIN = 60.0
FEW_FILES = ("sh", "-c", 'test $(hostname) != node1 || ulimit -n 512; exec "$@"', "sh")


def table(text):
    """The rows of the table: whether the check fails, and what was measured, by its name."""
    rows = re.findall(r"^(\S.*?) +(ok|FAILS) +(.*)$", text, re.M)
    assert len({name for name, *_ in rows}) == len(rows), text  # one table
    return {name: (verdict, value) for name, verdict, value in rows}


@pytest.mark.parametrize("launch", [torchrun, srun, deepspeed])
def test_odd_host_is_named(given_hosts, tmp_path, launch):
    """Two hosts, two ranks each, of which one allows few open files; and nothing else fails."""
    hosts = given_hosts(loopback=[0])
    words = [DOCTOR, "--mesh.pp", "2", "--parallel3d.run.directory", str(tmp_path)]
    began = time.monotonic()

    def log(name):
        return tmp_path / f"{name}.log"

    launched = launch(hosts, words, log, tmp_path, ranks=2, limits=FEW_FILES)
    assert FAILED in launched.codes(), launched.output
    seconds = time.monotonic() - began
    print(f"{launch.__name__}: {seconds:.1f} s\n{launched.output}")
    assert seconds < WITHIN
    rows = table("\n".join(launched.texts))
    failed = {name: value for name, (verdict, value) in rows.items() if verdict == "FAILS"}
    assert failed.keys() == {"open files"}, failed
    assert failed["open files"].startswith("ranks 2, 3 on node1: 512"), failed
    assert rows["hosts"][1] == "node0 (ranks: 2), node1 (ranks: 2)"
    assert {"links: pp", "links: dp", "links: neighbours"} <= rows.keys()
    assert "ulimit -n" in launched.output


@pytest.mark.parametrize("rate", ["100mbit", "10mbit"])
def test_slow_cable_is_named(given_hosts, tmp_path, rate):
    """By the groups of three hosts that share it; no hardware file is needed."""
    hosts = given_hosts(3)
    hosts[2].slow_down(rate)
    began = time.monotonic()
    launched = forked(
        hosts,
        [DOCTOR, "--json", "--parallel3d.run.directory", str(tmp_path)],
        lambda name: tmp_path / f"{name}.log",
        tmp_path,
        ranks=2,
    )
    codes = launched.codes()
    seconds = time.monotonic() - began
    print(f"{rate}: {seconds:.1f} s\n{launched.texts[0]}")
    assert codes == [FAILED] * 6, launched.output
    assert seconds < WITHIN
    report = json.loads(launched.texts[0].splitlines()[-1])
    failed = {row["name"]: row["outliers"] for row in report["checks"] if row["remedy"]}
    assert failed == {"slow links": [4, 5]}
    assert "on node2" in launched.texts[0]


def test_slow_network_fails_against_the_hardware_file(given_hosts, tmp_path):
    """Between two hosts nothing is compared with others, but with the planner's figure."""
    hosts = given_hosts()
    hosts[1].slow_down("100mbit")
    raw = {"parallel3d.run.hardware": "A100-SXM4-80GB", "parallel3d.run.directory": str(tmp_path)}
    words = [DOCTOR, "--json", *(w for key, value in raw.items() for w in (f"--{key}", value))]
    launched = forked(hosts, words, lambda name: tmp_path / f"{name}.log", tmp_path)
    assert launched.codes() == [FAILED] * 2, launched.output
    report = json.loads(launched.texts[0].splitlines()[-1])
    failed = {row["name"]: row["outliers"] for row in report["checks"] if row["remedy"]}
    assert failed == {"links: dp": [0, 1]}, launched.output
    (row,) = [row for row in report["checks"] if row["name"] == "links: dp"]
    assert re.fullmatch(r"0\.0\d+ GB/s; A100-SXM4-80GB: 14.5", row["value"]), row
