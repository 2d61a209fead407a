"""A rank of one of two hosts, whose own names stand for 127.0.1.1 as Debian's installer has it."""

import json
import os
import socket
import sys

from parallel3d.mesh import join
from parallel3d.mesh.mesh import Mesh


def find_none(address):
    """Return no interface for an address."""
    return ""


def main():
    """Join the other three ranks; print what all of them say, and through which interface."""
    node, local, as_before = map(int, sys.argv[1:])
    os.environ |= {
        "RANK": str(2 * node + local),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29517",
    }
    assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
    if as_before:
        join.interface_of = find_none
    mesh = Mesh(dp=2, tp=2)
    places = mesh.messages.gather_texts(f"{socket.gethostname()} {local}", aside=True)
    names = [os.environ.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL")]
    print(json.dumps([places, names]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
