"""The coordinate check: how activation sizes depend on the model's width.

Under muP, activations and their changes during training keep the same size as the model gets wider
(arXiv:2203.03466, appendix D.1). This module fits the slopes and prints, draws and encodes them.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.arguments import Parser, output_file, whole_number
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.base.terminal import Column
from parallel3d.config import RunConfig
from parallel3d.extras.report.page import png, style
from parallel3d.model.parametrization import parametrization_of

WIDTHS = (64, 128, 256, 512)
MOST = 0.1  # largest |slope| that still counts as flat
START = "start"
TRAINED = "trained"
CHANGE = "change"
Sizes = Mapping[str, Mapping[str, float]]
"""Layer -> measure -> mean |activation|; the measures are START, TRAINED and CHANGE."""


@dataclass(frozen=True)
class Layer:
    """The slopes of one layer: log(size) over log(width) for each measure."""

    name: str
    slopes: Mapping[str, float]
    """Mean over the seeds."""
    errors: Mapping[str, float]
    """Standard errors of the means; NaN with one seed."""
    sizes: Mapping[str, tuple[float, ...]]
    """Geometric mean over the seeds at each width."""

    @property
    def claimed(self) -> tuple[str, ...]:
        """The measures that muP keeps flat: all, but for the logits only their change.

        The logits at the start shrink as the width grows.
        """
        return (CHANGE,) if self.name == "head.output" else (START, TRAINED, CHANGE)

    @property
    def slope(self) -> float:
        """The steepest slope of the claimed measures; NaN if a size is not finite."""
        slopes = [self.slopes[measure] for measure in self.claimed]
        return slopes[int(np.argmax(np.abs(slopes)))]  # argmax returns a NaN if there is one

    @property
    def flat(self) -> bool:
        """True if no claimed slope exceeds the tolerance."""
        return abs(self.slope) <= MOST

    def to_json(self) -> JsonObject:
        """Return the layer's object in the output of --json."""
        return {
            "name": self.name,
            "slope": self.slope,
            "flat": self.flat,
            "slopes": dict(self.slopes),
            "standard_errors": dict(self.errors),
            "sizes": dict(self.sizes),
        }


@dataclass(frozen=True)
class CoordinateCheck:
    """The slopes of every layer of a model, measured at several widths."""

    widths: tuple[int, ...]
    layers: tuple[Layer, ...]
    seeds: int

    @property
    def passed(self) -> bool:
        """True if every layer is flat."""
        return all(layer.flat for layer in self.layers)

    def to_json(self) -> JsonObject:
        """Return the object that --json prints, where NaN becomes null."""
        return {
            "passed": self.passed,
            "widths": list(self.widths),
            "seeds": self.seeds,
            "layers": [layer.to_json() for layer in self.layers],
        }


def fit_slopes(sizes_by_width: Mapping[int, Sequence[Sizes]]) -> CoordinateCheck:
    """Fit the slope of every layer and measure.

    - `sizes_by_width`: width -> the sizes of each seed. A size of 0 or infinity makes its slope
      NaN.
    """
    widths = tuple(sorted(sizes_by_width))
    seeds = len(sizes_by_width[widths[0]])
    x = np.log(np.array(widths, dtype=float))
    x -= x.mean()
    layers = []
    for name, measures in sizes_by_width[widths[0]][0].items():
        means = dict[str, float]()
        errors = dict[str, float]()
        typical = {}
        for measure in measures:
            sizes = np.array(
                [[seed[name][measure] for seed in sizes_by_width[width]] for width in widths]
            )
            logs = np.log(np.where((sizes > 0) & (sizes < np.inf), sizes, np.nan))
            each = x @ logs / (x @ x)
            means[measure] = float(each.mean())
            errors[measure] = float(each.std(ddof=1) / seeds**0.5) if seeds > 1 else np.nan
            typical[measure] = tuple(np.exp(logs.mean(axis=1)).tolist())
        layers.append(Layer(name, means, errors, typical))
    return CoordinateCheck(widths, tuple(layers), seeds)


def draw(title: str, check: CoordinateCheck) -> bytes:
    """Return a PNG with one panel per measure and one line per layer."""
    titles = {START: "at the start", TRAINED: "after training", CHANGE: "change during training"}
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
    """Add the flags of `coordcheck`; other arguments override settings by path."""
    parser.add_config()
    parser.add_argument(
        "--widths",
        type=whole_number(),
        nargs="+",
        default=list(WIDTHS),
        metavar="N",
        help=f"widths to train (default: {' '.join(map(str, WIDTHS))})",
    )
    parser.add_argument(
        "--steps", type=whole_number(), default=5, metavar="N", help="training steps (default: 5)"
    )
    parser.add_argument(
        "--seeds", type=whole_number(), default=3, metavar="N", help="seeds per width (default: 3)"
    )
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="write a plot of the sizes as a PNG"
    )


def prepare(args: argparse.Namespace) -> RunConfig:
    """Return the config to check, and hide accelerators: the check runs on the CPU.

    Raises ConfigError for a wrong config, or fewer than two widths.
    """
    if len(set(args.widths)) < 2:
        raise ConfigError(
            f"--widths {args.widths[0]}: only one width; a slope needs at least two different ones"
        )
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    args.widths = sorted(set(args.widths))
    config = RunConfig.from_json(args.config, args.overrides)
    args.kind = parametrization_of(config.model).type
    return config


def report(check: CoordinateCheck, args: argparse.Namespace, console: Console) -> None:
    """Print the slopes of every layer, and write the plot if asked to."""
    rows = []
    for layer in check.layers:
        cells = {m: f"{slope:+.3f} ± {layer.errors[m]:.3f}" for m, slope in layer.slopes.items()}
        marked = [cell if m in layer.claimed else f"({cell})" for m, cell in cells.items()]
        rows.append((layer.name, *marked, "" if layer.flat else "NOT FLAT"))
    heads = [Column(measure) for measure in (START, TRAINED, CHANGE)]
    terminal.show(console, (Column("layer", right=False), *heads, Column("", right=False)), rows)
    verdict = "flat" if check.passed else "NOT FLAT"
    console.print(
        f"{args.kind}: {verdict} over the widths {', '.join(map(str, check.widths))}, by "
        f"{check.seeds} seeds (flat: |slope of log size over log width| up to {MOST:g}; slopes in "
        "brackets are not checked)"
    )
    if args.plot:
        args.plot.write_bytes(draw(args.kind, check))
        console.print(f"wrote {args.plot}")
