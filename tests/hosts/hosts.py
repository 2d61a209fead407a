"""Hosts of one machine: namespaces with a network, a name, processes and mounts of their own.

A host lives as long as a shell, its process 1, which ends with its standard input: with the test's
process, however that one ends. The kernel then kills all that runs in the host, and its network
goes with it. A switch, which is one more namespace, has a cable to each host.
"""

import ctypes
import os
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

CLONE = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000, "pid": 0x20000000}
_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
_UNSHARE += ["--mount-proc", "--kill-child", "sh", "-c"]


class NoHosts(Exception):
    """Raised where this machine gives no namespaces, with what it says."""


@dataclass
class Host:
    """One host; its process 1 and the switch's are named by their pids outside."""

    name: str
    address: str
    pid: int
    switch: int
    port: str

    def words(self, *command, folder="/"):
        """A command as it is started here to run in the host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid"]
        return [*enter, "sh", "-c", 'cd "$0"; exec "$@"', str(folder), *map(str, command)]

    def do(self, *command, **options):
        """Run a command in the host to its good end."""
        return _do(*self.words(*command), **options)

    def enter(self):
        """Bring this process, which has one thread, into the host, and its children to come."""
        libc = ctypes.CDLL(None, use_errno=True)
        files = {kind: os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY) for kind in CLONE}
        for kind, file in files.items():
            assert libc.setns(file, CLONE[kind]) == 0, os.strerror(ctypes.get_errno())
            os.close(file)

    def processes(self):
        """The command lines of what runs in the host, but its process 1."""
        pid_namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        command_lines = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_inside = os.readlink(folder / "ns/pid") == pid_namespace
                if line and is_inside and int(folder.name) != self.pid:
                    command_lines.append(line)
            except OSError:
                continue
        return command_lines

    def kill(self):
        """Kill all that runs in the host; its network stays and says so."""
        subprocess.run(self.words("sh", "-c", "kill -9 -1"), capture_output=True)

    def set_link(self, state):
        """`ip link set` the host's network up or down, within the host."""
        self.do(*f"ip link set eth0 {state}".split())

    def set_port(self, state):
        """The switch's end of its cable, up or down: the host sees no carrier."""
        _in_network(self.switch, f"ip link set {self.port} {state}")

    def slow_down(self, rate):
        """Its cable carries so much in each direction."""
        queue = f"root tbf rate {rate} burst 128kb latency 200ms"
        _in_network(self.switch, f"tc qdisc add dev {self.port} {queue}")
        self.do(*f"tc qdisc add dev eth0 {queue}".split())


@contextmanager
def hosts(folder, count=2, loopback=(), name="node"):
    """So many hosts on a switch; those in `loopback` have Debian's 127.0.1.1 for their own name.

    Each has its own table of names. Raises NoHosts where this machine has no such namespaces.
    """
    places = [(f"{name}{n}", f"10.99.7.{n + 1}") for n in range(count)]
    with ExitStack() as stack:
        switch = stack.enter_context(_alive(["true"]))
        try:
            _in_network(switch, "ip link add switch type bridge")
            _in_network(switch, "ip link set switch up")
            made = []
            for number, (host_name, address) in enumerate(places):
                table = Path(folder, f"{host_name}.hosts")
                named = {n: a for n, a in places if n != host_name}
                named[host_name] = "127.0.1.1" if number in loopback else address
                lines = (f"{address} {name}" for name, address in named.items())
                table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
                mount = ["mount", "--bind", str(table), "/etc/hosts"]
                pid = stack.enter_context(_alive(mount, ["hostname", host_name]))
                host = Host(host_name, address, pid, switch, f"port{number}")
                cable = f"ip link add {host.port} type veth peer name eth0 netns {pid}"
                _in_network(host.switch, cable)
                _in_network(host.switch, f"ip link set {host.port} master switch up")
                for words in (f"addr add {address}/24 dev eth0", "link set lo up"):
                    host.do("ip", *words.split())
                host.set_link("up")
                made.append(host)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoHosts(getattr(error, "stderr", None) or str(error)) from None
        yield made


@contextmanager
def _alive(*commands):
    """A shell in namespaces of its own, after these commands; gives the pid of its process 1."""
    script = "; ".join(f"{' '.join(command)} || exit" for command in commands)
    words = [*_UNSHARE, f"{script}; echo ready; read line"]
    try:
        process = subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
    except OSError as error:
        raise NoHosts(str(error)) from None
    try:
        if process.stdout.readline() != "ready\n":
            process.stdin.close()
            raise NoHosts(process.stderr.read())
        yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    finally:
        process.stdin.close()
        process.kill()  # unshare's, with which its child is killed
        process.wait()


def _in_network(pid, command):
    return _do("nsenter", f"--target={pid}", "--net", *command.split())


def _do(*command, **options):
    settings = {"check": True, "capture_output": True, "text": True} | options
    return subprocess.run([*map(str, command)], **settings)


def wait_until(look, seconds, message):
    """Wait until `look` is true; return the seconds that it took."""
    start = time.monotonic()
    while not look():
        assert time.monotonic() - start < seconds, message() if callable(message) else message
        time.sleep(0.05)
    return time.monotonic() - start
