"""Makes a rank dead to its peers, while it can still report to the test."""

import os
import socket
import stat


def vanish():
    """Let this process die, as a rank does that fails, and go on in a copy without connections.

    `run_ranks` keeps ranks alive until all have reported; but a real rank's failure reaches its
    peers by its end.
    """
    if os.fork():
        os._exit(0)
    # gloo's threads are not in the copy: nobody here misses what is closed.
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                connection = socket.socket(fileno=fd)
                if connection.family == socket.AF_UNIX:  # the pipe to the test
                    connection.detach()
                else:
                    connection.close()
        except OSError:
            continue  # the listing's own
