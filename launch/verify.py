"""Prove a config on this machine: `parallel3d verify --config ds.json`.

Every mesh trains the config's model in small, and is compared with one process of plain
transformers: loss, gradient norm and weights. `python -m tests.museum` proves this check: it plants
published silent bugs one at a time, each of which must be seen (docs/museum.md).
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, named
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.plan.impossible import refuse_impossible


@named("verify")
def main() -> int:
    """Run the command `verify`: 0 all equal, 1 a difference, 2 bad config."""
    args, overrides = parse_args()
    # On the CPU, wherever it runs: a mesh of eight wants eight devices.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    console = terminal.console(args.json)
    if args.museum:
        raise ConfigError("--museum: has moved; run `python -m tests.museum` in a checkout")
    if args.config is None:
        raise ConfigError("--config: is missing; add it")
    config = RunConfig.from_json(args.config, overrides)
    refuse_impossible(config, ranks_of(config))
    with TemporaryDirectory(prefix="parallel3d-verify-") as folder:
        # Only now: torch and DeepSpeed wait for a config that is right.
        from parallel3d.verify.shrink import MESHES, parse_meshes
        from parallel3d.verify.table import verify

        meshes = parse_meshes(args.meshes) if args.meshes else MESHES
        report = verify(config, meshes, Path(folder), console, chosen=bool(args.meshes))
    if args.json:
        print(json.dumps(report))
    return DONE if report["passed"] else FAILED


def ranks_of(config: RunConfig) -> int:
    """Number of ranks that the config's mesh names, "auto" counting as one on its axis."""
    sizes = () if config.is_planned else (config.mesh.pp, config.mesh.dp, config.mesh.tp)
    return math.prod(size for size in sizes if isinstance(size, int))


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line of `verify`, and what is left of it: settings by their path."""
    parser = Parser(
        __doc__, "Every value of the config can be set by its path: --zero_optimization.stage 1"
    )
    parser.add_config(required=False)
    parser.add_argument(
        "--meshes", metavar="MESHES", help="pp x dp x tp, as in 1x1x1,2x2x2; else eight of them"
    )
    parser.add_argument("--museum", action="store_true", help=argparse.SUPPRESS)  # has moved
    parser.add_json()
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
