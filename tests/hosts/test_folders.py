"""Folders that hosts share or do not."""

import pytest

from tests.checkpoint import drill
from tests.hosts.launches import Run, forked, without_dropout

pytestmark = [pytest.mark.drill, pytest.mark.slow]

DONE = 0
BAD_INPUT = 2


@pytest.fixture
def config(tmp_path):
    return without_dropout(drill.prepared_config(tmp_path))


def mount_private(host, folder):
    """A folder of the host's own where the others see another."""
    host.do("mount", "-t", "tmpfs", "own", folder)


@pytest.mark.parametrize("odd", [0, 1])
def test_unshared_run_folder_is_refused(given_hosts, config, tmp_path, odd):
    """In one message, from rank 0; nothing is left in the folders of either."""
    hosts = given_hosts(loopback=[0, 1])
    run = Run(config, "own", tmp_path)
    run.folder.parent.mkdir()
    mount_private(hosts[odd], run.folder.parent)
    launched = forked(hosts, run.words((1, 2, 1)), run.log, tmp_path)
    assert launched.codes() == [BAD_INPUT] * 2, launched.output
    (line,) = [s for text in launched.texts for s in text.splitlines() if "share" in s]
    assert line.startswith(f'parallel3d.run.directory = "{run.folder.parent}": ')
    assert "on node1 (rank 1)" in line and "rank 0 on node0" in line
    assert line.endswith("use a folder that all nodes share")
    for host in hosts:
        assert host.do("find", run.folder.parent, "-type", "f").stdout == ""


def test_unshared_caches_are_prepared_on_each_host(given_hosts, config, tmp_path):
    hosts = given_hosts()
    run = Run(config, "caches", tmp_path)
    cache = tmp_path / "caches"
    cache.mkdir()
    mount_private(hosts[1], cache)
    changes = {"parallel3d__data__cache": str(cache)}
    launched = forked(hosts, run.words((1, 2, 1), **changes), run.log, tmp_path)
    assert launched.codes() == [DONE] * 2, launched.output
    assert len(run.lines) == 4
    assert all(host.do("find", cache, "-name", "tokens.bin").stdout for host in hosts)


def test_tensor_parallel_group_across_hosts_is_named(given_hosts, config, tmp_path):
    hosts = given_hosts()
    run = Run(config, "torn", tmp_path)
    launched = forked(hosts, run.words((1, 1, 2)), run.log, tmp_path)
    assert launched.codes() == [DONE] * 2, launched.output
    assert "tp = 2 SPANS HOSTS: ranks 0 on node0 and 1 on node1" in launched.texts[0]
