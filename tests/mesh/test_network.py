"""Which interface ranks on several hosts speak through, and how many sockets they take."""

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from math import ceil, log2
from threading import Thread

import pytest
import torch.distributed as dist

from parallel3d.mesh import join
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
INTERFACES = {"10.0.0.1": "eth1", "10.0.0.2": "ib0", "127.0.1.1": "lo"}


class CountingStore(dist.Store):
    """A store that counts what is asked of it; torch's groups see a store as any other."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.counts = Counter()

    def _noted(name):
        def operation(self, *args):
            self.counts[name] += 1
            return getattr(self.store, name)(*args)

        return operation

    set, get, add, check, wait = map(_noted, ("set", "get", "add", "check", "wait"))
    compare_set, delete_key, num_keys = map(_noted, ("compare_set", "delete_key", "num_keys"))
    multi_get, multi_set, append = map(_noted, ("multi_get", "multi_set", "append"))


@pytest.fixture
def hosts(monkeypatch):
    """Gives a function that asks one of two hosts which interface it takes."""
    for name in (*VARIABLES, "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "node0")

    def chosen(launch, store, *, own_name, towards, seconds=5):
        monkeypatch.setattr(join, "address_of_host", lambda: own_name)
        monkeypatch.setattr(join, "address_towards", lambda host: towards[host])
        monkeypatch.setattr(join, "interface_of", lambda address: INTERFACES.get(address, ""))
        for name in VARIABLES:
            os.environ.pop(name, None)
        join.choose_interface(launch, store, seconds)
        return [os.environ.get(name) for name in VARIABLES]

    return chosen


AWAY = {"node0": "10.0.0.2"}
AT_HOME = {"node0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}


def test_interface_is_found_if_the_host_name_is_a_loopback(hosts):
    """The node of the master finds the way by what comes from elsewhere."""
    store = CountingStore(dist.HashStore())
    away = hosts(Launch(1, 2, 0, 1), store, own_name="127.0.1.1", towards=AWAY)
    assert away == ["ib0", "=ib0"]
    at_home = hosts(Launch(0, 2, 0, 1), store, own_name="127.0.1.1", towards=AT_HOME)
    assert at_home == ["eth1", "=eth1"]
    assert hosts(Launch(1, 2, 0, 1), dist.HashStore(), own_name="", towards=AWAY) == away
    # However many ranks there are: each says that it is there, one a node its address.
    assert store.counts == {"set": 1, "add": 3, "check": 1, "get": 1}


def test_node_of_the_master_waits_for_another_node(hosts):
    store = dist.HashStore()
    later = []

    def start():
        later.append(hosts(Launch(0, 2, 0, 1), store, own_name="127.0.1.1", towards=AT_HOME))

    thread = Thread(target=start)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    store.set(join._ADDRESS, "10.0.0.2")
    store.add(join._ARRIVED, 1)
    thread.join()
    assert later == [["eth1", "=eth1"]]


def test_interfaces_are_not_set_without_need(hosts, monkeypatch):
    """A name that others reach, one node, "nodes" of one host, and what the user has set."""
    good = "10.0.0.2"
    launch = Launch(1, 2, 0, 1)
    assert hosts(launch, dist.HashStore(), own_name=good, towards=AWAY) == [None, None]
    one_node = Launch(1, 2, 1, 2)
    assert hosts(one_node, dist.HashStore(), own_name="127.0.1.1", towards=AWAY) == [None, None]
    store = dist.HashStore()
    for rank in (1, 0):
        here = {"own_name": "127.0.1.1", "towards": {"node0": "127.0.0.1"}, "seconds": 0}
        assert hosts(Launch(rank, 2, 0, 1), store, **here) == [None, None]
    monkeypatch.setattr(join, "interface_of", lambda address: "eth9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setattr(join, "address_towards", lambda host: "10.0.0.2")
    monkeypatch.setattr(join, "address_of_host", lambda: "127.0.1.1")
    join.choose_interface(launch, dist.HashStore(), 5)
    assert [os.environ[name] for name in VARIABLES] == ["mine", "=eth9"]


def test_interfaces_of_local_addresses():
    assert join.is_local(join.address_towards("127.0.0.1")) and join.is_local("")
    assert join.is_local("::1") and not join.is_local("fe80::1%eth0")
    assert join.interface_of("127.0.0.1").startswith("lo") and not join.interface_of("9.9.9")
    assert join.address_towards("no such host.invalid") == ""


def aside_on_demand(rank, on_demand):
    """Sockets and store operations of a mesh of six, after its group aside was used in each way."""
    soft = 128
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    meet = join.meet
    stores = []

    def meet_and_count(*args):
        stores.append(CountingStore(meet(*args)))
        return stores[0]

    join.meet = meet_and_count
    if on_demand:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    mesh = Mesh(dp=6)
    assert mesh.messages.gather_texts("x" * rank, aside=True) == ["x" * r for r in range(6)]
    assert on_first(mesh, lambda: {"rank": mesh.rank}) == {"rank": 0}
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    sockets = sum("socket" in os.readlink(file) for file in files if os.path.islink(file))
    counts = stores[0].counts.copy()
    mesh.barrier()
    return sockets, counts, resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_only_communicating_ranks_are_connected():
    """gloo beside NCCL is a ring and a tree, by sockets and by what a rank reads of the others.

    Of N ranks it reads two neighbours' addresses and a tree's, log N; not N. And the limit of open
    files is raised to the most.
    """
    each, some = (run_locally(aside_on_demand, 6, on_demand) for on_demand in (False, True))
    assert all(raised for _, _, raised in each + some)
    for (all_sockets, all_counts, _), (sockets, counts, _) in zip(each, some, strict=True):
        assert sockets < all_sockets, (each, some)
        assert counts["get"] <= 1 + 2 + ceil(log2(6)) < all_counts["get"], (each, some)
        assert counts["set"] == all_counts["set"] <= 8, (each, some)


@pytest.fixture
def two_hosts(tmp_path):
    """Two network namespaces and a cable; gives a command's beginning for each."""
    names = ("parallel3d-0", "parallel3d-1")
    run = subprocess.run
    try:
        for name in names:
            run(["ip", "netns", "add", name], check=True, capture_output=True)
        cable = "ip link add p3d0 netns parallel3d-0 type veth peer name p3d1 netns parallel3d-1"
        run(cable.split(), check=True, capture_output=True)
        commands = []
        for node, name in enumerate(names):
            for words in (
                f"addr add 10.99.7.{node + 1}/24 dev p3d{node}",
                f"link set p3d{node} up",
            ):
                run(["ip", "-n", name, *words.split()], check=True, capture_output=True)
            run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            table = tmp_path / f"hosts{node}"
            other = 1 - node
            table.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 node{node}\n10.99.7.{other + 1} node{other}"
            )
            script = f'mount --bind {table} /etc/hosts; hostname node{node}; exec "$@"'
            inside = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
            commands.append(["ip", "netns", "exec", name, *inside])
        yield commands
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in names:
            run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("as_before", [0, 1])
def test_two_hosts_with_loopback_names_join(two_hosts, as_before):
    """Four real ranks; where gloo chooses, they do not find each other."""
    words = [sys.executable, "-m", "tests.mesh.two_hosts"]
    ranks = [
        subprocess.Popen(
            [*command, *words, str(node), str(local), str(as_before)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, command in enumerate(two_hosts)
        for local in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                break  # the others wait for it
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate() for rank in ranks]
    if as_before:
        assert any("timed out connecting" in err for _, err in outputs), outputs
        return
    everyone = [f"node{node} {local}" for node in range(2) for local in range(2)]
    for place, (out, err) in enumerate(outputs):
        interface = f"p3d{place // 2}"
        assert out, err
        assert json.loads(out) == [everyone, [interface, f"={interface}"]]
