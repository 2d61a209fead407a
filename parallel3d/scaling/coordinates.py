"""Sizes of activations over the width: their slopes, a table and a picture.

Under muP every activation, and its change by training, is as large in a wide model as in a narrow
one (arXiv:2203.03466, appendix D.1).
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.arguments import Parser, output_file, whole_number
from parallel3d.base.errors import ConfigError
from parallel3d.base.terminal import Column
from parallel3d.config import RunConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.scaling.flags import NO_EXTRA
from parallel3d.scaling.plots import png, style
from parallel3d.scaling.result import finite

WIDTHS = (64, 128, 256, 512)
MOST = 0.1  # of |slope| where the theory says that there is none
START, TRAINED, CHANGE = "start", "trained", "change"
LOGITS = "head.output"
Sizes = Mapping[str, Mapping[str, float]]
"""Layer -> measure -> mean |x|: at the start, after the steps, and of the change between them."""


@dataclass(frozen=True)
class Layer:
    """One layer's slopes by measure: log size over log width, the mean over the seeds.

    `errors`: of these means, NaN of one seed. `sizes`: for each width, their geometric mean.
    """

    name: str
    slopes: Mapping[str, float]
    errors: Mapping[str, float]
    sizes: Mapping[str, tuple[float, ...]]

    @property
    def claimed(self) -> tuple[str, ...]:
        """The measures that the theory says are flat.

        The first logits fall with the width; only their change is claimed.
        """
        return (CHANGE,) if self.name == LOGITS else (START, TRAINED, CHANGE)

    @property
    def slope(self) -> float:
        """The steepest of those that are claimed to be flat; NaN where a size is not finite."""
        slopes = [self.slopes[measure] for measure in self.claimed]
        return slopes[int(np.argmax(np.abs(slopes)))]  # a NaN is the largest

    @property
    def flat(self) -> bool:
        """True if none of them is steeper than the tolerance."""
        return abs(self.slope) <= MOST

    @property
    def undecided(self) -> bool:
        """True if slopes are beyond the tolerance by less than two of their standard errors."""
        steep = [m for m in self.claimed if not abs(self.slopes[m]) <= MOST]
        beyond = [abs(self.slopes[m]) - 2 * self.errors[m] for m in steep]
        return bool(steep) and all(least <= MOST for least in beyond)

    def to_json(self) -> dict[str, Any]:
        """Return what --json prints of the layer."""
        return {
            "name": self.name, "slope": self.slope, "flat": self.flat, "slopes": dict(self.slopes),
            "standard_errors": dict(self.errors), "sizes": dict(self.sizes),
        }  # fmt: skip


@dataclass(frozen=True)
class CoordinateCheck:
    """The layers of a model at several widths."""

    widths: tuple[int, ...]
    layers: tuple[Layer, ...]
    seeds: int

    @property
    def passed(self) -> bool:
        """True if every layer is flat that is to be."""
        return all(layer.flat for layer in self.layers)

    @property
    def undecided(self) -> bool:
        """True if all that is not flat may be noise of the seeds; more of them would tell."""
        return not self.passed and all(layer.flat or layer.undecided for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return what --json prints; a slope that is no number is null."""
        return {
            "passed": self.passed, "widths": list(self.widths), "seeds": self.seeds,
            "layers": [layer.to_json() for layer in self.layers],
        }  # fmt: skip


def slopes(found: Mapping[int, Sequence[Sizes]]) -> CoordinateCheck:
    """Return the check of sizes by width and seed; a size of 0 or infinity makes a slope NaN."""
    widths = tuple(sorted(found))
    seeds = len(found[widths[0]])
    x = np.log(np.array(widths, dtype=float))
    x -= x.mean()
    layers = []
    for name, measures in found[widths[0]][0].items():
        means, errors, typical = dict[str, float](), dict[str, float](), {}
        for measure in measures:
            sizes = np.array([[seed[name][measure] for seed in found[width]] for width in widths])
            logs = np.log(np.where((sizes > 0) & (sizes < np.inf), sizes, np.nan))
            each = x @ logs / (x @ x)
            means[measure] = float(each.mean())
            errors[measure] = float(each.std(ddof=1) / seeds**0.5) if seeds > 1 else np.nan
            typical[measure] = tuple(np.exp(logs.mean(axis=1)).tolist())
        layers.append(Layer(name, means, errors, typical))
    return CoordinateCheck(widths, tuple(layers), seeds)


def draw(title: str, check: CoordinateCheck) -> bytes:
    """Return a PNG: a panel for each measure, with a line for each layer."""
    titles = {START: "at the start", TRAINED: "after training", CHANGE: "change by training"}
    names = [layer.name for layer in check.layers]
    with style() as plt:
        figure, panels = plt.subplots(1, 3, figsize=(8.4, 3.1))
        colours = plt.cm.viridis(np.linspace(0, 0.92, len(names)))
        for axes, (measure, words) in zip(panels, titles.items(), strict=True):
            for layer, colour in zip(check.layers, colours, strict=True):
                line = ".-" if measure in layer.claimed else ".:"
                axes.plot(check.widths, layer.sizes[measure], line, color=colour, lw=1)
            axes.set(xscale="log", yscale="log", title=f"{title}: {words}", xlabel="width")
            axes.set_xticks(check.widths, map(str, check.widths))
            axes.minorticks_off()
        panels[0].set_ylabel("mean |activation|")
        lines = panels[0].get_lines()
        figure.legend(lines, names, loc="outside lower center", ncols=4, fontsize=7)
        return png(plt, figure)


def add(parser: Parser) -> None:
    """Add the flags of `coordcheck`; what else is on the command line are settings by path."""
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
    """Return the config of the flags, which is to be measured on the CPU; raises ConfigError."""
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
    rows = []
    for layer in found.layers:
        cells = []
        for measure, slope in layer.slopes.items():
            error = f" ± {layer.errors[measure]:.3f}" if found.seeds > 1 else ""
            cell = f"{slope:+.3f}{error}"
            cells.append(cell if measure in layer.claimed else f"({cell})")
        rows.append((layer.name, *cells, "" if layer.flat else "NOT FLAT"))
    heads = [Column(measure) for measure in (START, TRAINED, CHANGE)]
    terminal.show(console, (Column("layer", right=False), *heads, Column("", right=False)), rows)
    verdict = "flat" if found.passed else "NOT FLAT"
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    console.print(
        f"{args.kind}: {verdict} over the widths {', '.join(map(str, found.widths))}, {seeds} (a "
        f"slope of log size over log width is flat up to {MOST:g}; those in brackets are not "
        "claimed)"
    )
    if args.plot:
        args.plot.write_bytes(draw(args.kind, found))
        console.print(f"written: {args.plot}")
    if args.json:
        print(json.dumps(finite(found.to_json())))
