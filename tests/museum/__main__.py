"""Plant published silent bugs in the check that `parallel3d verify` runs, and say which it sees.

`python -m tests.museum` plants each in the first of the museum's own configs that can hold it; with
--config in that config (docs/museum.md).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel3d.base import terminal
from parallel3d.base.arguments import Parser
from parallel3d.base.errors import ConfigError, Parallel3DError
from parallel3d.config import RunConfig
from tests.museum.command import show

DONE = 0
FAILED = 1
BAD_INPUT = 2


def main() -> int:
    """Show the museum: 0 all seen, 1 one is missed, 2 bad config."""
    args, overrides = parse_args()
    # On the CPU, wherever it runs: a mesh of eight wants eight devices.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    try:
        if overrides and args.config is None:
            raise ConfigError(f"{overrides[0]}: changes a config, and none is named; add --config")
        config = RunConfig.from_json(args.config, overrides) if args.config else None
        with TemporaryDirectory(prefix="parallel3d-museum-") as folder:
            report = show(config, Path(folder), terminal.console(args.json))
    except Parallel3DError as error:
        print(f"museum: {error}", file=sys.stderr)
        return BAD_INPUT
    if args.json:
        print(json.dumps(report))
    return DONE if report["passed"] else FAILED


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line, and what is left of it: settings by their path."""
    parser = Parser(
        __doc__, "Every value of the config can be set by its path: --zero_optimization.stage 1"
    )
    parser.add_config(required=False)
    parser.add_json()
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
