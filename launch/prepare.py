"""Prepare the data of a config alone: `python launch/prepare.py --config ds.json [--json]`."""

import argparse
import json
import sys

from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.data.progress import shown_progress
from parallel3d.errors import Parallel3DError


def main() -> int:
    """Give the exit code: 0, or 2 where the config or the data cannot be used."""
    parser = argparse.ArgumentParser(
        description="Tokenise the corpus of a config into the cache, and say what is in it.",
        epilog="Any value of the config is set by its path: --parallel3d.data.vocab_size 8192",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="a config file, or a name in configs/")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args, overrides = parser.parse_known_args()
    try:
        config = RunConfig.from_json(args.config, overrides)
        with shown_progress() as progress:
            corpus = prepare(config.parallel3d.data, progress)
    except Parallel3DError as error:
        print(error, file=sys.stderr)
        return 2
    summary = corpus.summary()
    if args.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            shown = f"{value:,}" if isinstance(value, int) else value
            print(f"{name:<24}{shown:.4f}" if isinstance(value, float) else f"{name:<24}{shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
