"""Verify a config on this machine's CPU: `parallel3d verify --config ds.json`.

Trains a small version of the config's model on several meshes, and compares loss, gradient norm and
weights with one process of plain transformers. `python -m tests.museum` tests this check itself: it
plants published silent bugs one at a time, and each must be detected (docs/museum.md).
"""

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, prints_errors_as
from parallel3d.config import RunConfig
from parallel3d.plan.impossible import refuse_impossible


@prints_errors_as("verify")
def main() -> int:
    """Run the command `verify`; return 0 if all is equal, 1 for a difference, 2 for bad input."""
    args, overrides = parse_args()
    # Always on the CPU, because a mesh of eight ranks would need eight GPUs.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    console = terminal.console(args.json)
    config = RunConfig.from_json(args.config, overrides)
    # "auto" counts as one rank on its axis.
    refuse_impossible(config, 1 if config.is_planned else config.mesh.sizes.ranks)
    with TemporaryDirectory(prefix="parallel3d-verify-") as folder:
        # Imported late, because these load torch and DeepSpeed; an invalid config ends before.
        from parallel3d.verify.shrink import MESHES, parse_meshes
        from parallel3d.verify.table import verify

        meshes = parse_meshes(args.meshes) if args.meshes else MESHES
        report = verify(config, meshes, Path(folder), console, chosen=bool(args.meshes))
    if args.json:
        terminal.print_json(report)
    return DONE if report["passed"] else FAILED


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `verify`, and the rest of the command line: settings by their path."""
    parser = Parser(
        __doc__, "Every setting of the config is also an option: --zero_optimization.stage 1"
    )
    if "--museum" in sys.argv:
        parser.error("--museum: was removed; run `python -m tests.museum` in a checkout")
    parser.add_config()
    parser.add_argument(
        "--meshes",
        metavar="MESHES",
        help="meshes as PPxDPxTP or PPxDPxCPxTP, such as 1x1x1,2x2x2 (default: eight meshes)",
    )
    parser.add_json()
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
