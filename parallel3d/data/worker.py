"""One tokenising process of `pool`: reads shard numbers, one a line, and writes lines of JSON."""

import json
import os
import signal
import sys
from pathlib import Path

from parallel3d.base.errors import DataError
from parallel3d.data.shards import ShardPlan, make_shard


def main() -> None:
    """Make the shards that are asked for, until the requests end."""
    # Ctrl-C goes to all; the process that started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not get between the lines.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: int | str) -> None:
        print(json.dumps(message), file=out)

    try:
        plan = ShardPlan.open(Path(sys.argv[1]))
        tokenizer = plan.tokenizer()
        for line in sys.stdin:
            number = int(line)
            make_shard(plan, number, tokenizer, lambda documents: say(documents=documents))
            say(done=number)
    except DataError as error:
        say(error=str(error))
    except BrokenPipeError:
        # Nobody listens any more; what is flushed at exit would fail again.
        os._exit(1)


if __name__ == "__main__":
    main()
