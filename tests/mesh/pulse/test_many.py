"""The cost of the arbiter of a thousand ranks, and how soon all of them hear of a death."""

import json
import resource
import socket
import time

import psutil
import pytest

from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.arbiter import Report

pytestmark = [pytest.mark.pure, pytest.mark.slow]

RANKS = 1024
BEATS = 5
MOST_OF_A_CORE = 0.1  # 0.025 where nothing else runs
DEAD = 500


@pytest.fixture
def arbitrated(monkeypatch):
    """Rank 0's sentry, which is a real one, and lines to it as the other sentries have them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2 * RANKS:
        pytest.skip(f"{most} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    monkeypatch.setattr(pulse, "_page", None)
    published = []
    with socket.create_server(("127.0.0.1", 0)) as store:
        others = psutil.Process().children()  # the server that ranks are forked from
        pulse.begin(0, RANKS, store.getsockname(), ["127.0.0.1"], published.append, lambda: "")
        token, _, port = json.loads(published[0])
        [sentry] = set(psutil.Process().children()) - set(others)
        lines = {r: socket.create_connection(("127.0.0.1", port)) for r in range(1, RANKS)}
        yield sentry, lines, token
        for line in lines.values():
            line.close()
        sentry.kill()
        sentry.wait()


def beat(lines, token, since):
    for rank, line in lines.items():
        report = Report(f"node{rank // 8}", "runs", "1F0 of step 3", since, False, 300.0)
        message = {"token": token, "rank": rank, "report": report}
        line.sendall(json.dumps(message).encode() + b"\n")


def test_arbiter_of_a_thousand_ranks(arbitrated):
    sentry, lines, token = arbitrated
    beat(lines, token, 0.0)
    time.sleep(1)
    start = time.monotonic()
    before = sum(sentry.cpu_times()[:2])
    for number in range(BEATS):
        beat(lines, token, 1.0 + number)
        time.sleep(2)
    share = (sum(sentry.cpu_times()[:2]) - before) / (time.monotonic() - start)
    print(f"{100 * share:.1f} % of a core for {RANKS} ranks")
    assert share < MOST_OF_A_CORE
    start = time.monotonic()
    lines.pop(DEAD).close()
    messages = [last_message(line) for line in lines.values()]
    print(f"all heard of a death after {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < 30  # a few seconds where nothing else runs
    assert {message["outcome"].partition(" at ")[0] for message in messages} == {
        f"rank {DEAD} on node{DEAD // 8} died"
    }
    speaking = [r for r, message in zip(lines, messages, strict=True) if message["speaks"]]
    # Rank 0 is on this machine, and not on node0.
    assert speaking == [1, *range(8, RANKS, 8)]


def last_message(line):
    line.settimeout(10)
    received = b""
    while b'"outcome": "rank' not in received or not received.endswith(b"\n"):
        received += line.recv(2**16)
    return json.loads(received.splitlines()[-1])
