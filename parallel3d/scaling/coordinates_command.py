"""What launch/scale.py coordcheck asks for, and what it prints (floor 0)."""

import argparse
import json
import os
from importlib.util import find_spec
from math import isnan

from rich.console import Console
from rich.table import Table

from parallel3d.base.arguments import Parser, output_file, whole_number
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.scaling.command import NO_EXTRA
from parallel3d.scaling.coordinates import MOST, CoordinateCheck, Layer, draw
from parallel3d.scaling.result import finite

WIDTHS = (64, 128, 256, 512)


def add(parser: Parser) -> None:
    """The flags of `coordcheck`; what is left of the command line are settings by their path."""
    parser.add_config()
    parser.add_argument(
        "--widths", type=whole_number(), nargs="+", default=list(WIDTHS), metavar="N",
        help=f"else {' '.join(map(str, WIDTHS))}",
    )  # fmt: skip
    parser.add_argument("--steps", type=whole_number(), default=5, metavar="N", help="else 5")
    parser.add_argument("--seeds", type=whole_number(), default=3, metavar="N", help="else 3")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw the sizes, as PNG")
    parser.add_json()


def prepare(args: argparse.Namespace) -> RunConfig:
    """The config that the flags name. Raises ConfigError for it, and for widths that tell nothing.

    The measurement is made on the CPU, wherever it runs: each mesh wants its own devices.
    """
    if len(set(args.widths)) < 2:
        raise ConfigError(f"--widths {args.widths[0]}: is one width; a slope needs two or more")
    if args.plot and find_spec("matplotlib") is None:
        raise ConfigError(NO_EXTRA.format("matplotlib"))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    args.widths = sorted(set(args.widths))
    config = RunConfig.from_json(args.config, args.overrides)
    args.kind = parametrization_of(config.model).type
    return config


def report(found: CoordinateCheck, args: argparse.Namespace, console: Console) -> None:
    """Print each layer's slopes, draw them, and print the object that --json asks for."""
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "start", "trained", "change", ""):
        table.add_column(column, justify="left" if column in ("layer", "") else "right")
    for layer in found.layers:
        cells = (
            slope if measure in layer.claimed else f"({slope})"
            for measure, slope in ((m, _with_error(layer, m)) for m in layer.slopes)
        )
        table.add_row(layer.name, *cells, "" if layer.flat else "NOT FLAT")
    console.print(table)
    verdict = "flat" if found.passed else "NOT FLAT"
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    console.print(
        f"{args.kind}: {verdict} over the widths {', '.join(map(str, found.widths))}, {seeds} (a "
        f"slope of log size over log width is flat up to {MOST:g}; those in brackets are not "
        "claimed)"
    )
    if args.plot:
        args.plot.write_bytes(draw({args.kind: found}))
        console.print(f"written: {args.plot}")
    if args.json:
        print(json.dumps(finite(found.to_json())))


def _with_error(layer: Layer, measure: str) -> str:
    slope, error = layer.slopes[measure], layer.errors[measure]
    return f"{slope:+.3f}" + ("" if isnan(error) else f" ± {error:.3f}")
