"""A process that has loaded torch, and answers one request after another for those without it.

Each line of its input is the JSON of a module's name and a text for the module's `answer`; each
line of its output the JSON of True and the answer, or of False and an error. It ends when nothing
has been asked for a while.
"""

import json
import os
import sys
from importlib import import_module
from select import select

_IDLE_SECONDS = 30.0


def main() -> None:
    """Answer what is asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    while select([sys.stdin], [], [], _IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        module, request = json.loads(line)
        try:
            reply = True, import_module(module).answer(request)
        # Broad: the modules of an architecture raise errors of many types.
        except Exception as error:
            reply = False, f"{type(error).__name__}: {error}"
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
