"""Style of a fit's pictures: colours by size, plain ticks."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parallel3d.scaling.points import Array

DOTS = 160  # per inch
_STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8, "lines.linewidth": 1.2, "axes.titlesize": 9.5, "figure.dpi": DOTS,
    "axes.edgecolor": "#555555",
}  # fmt: skip


@contextmanager
def style() -> Iterator[Any]:
    """Matplotlib's pyplot in this style, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        yield plt


def png(plt: Any, figure: Any) -> bytes:
    """The figure as a PNG; the figure is closed."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DOTS, metadata={"Software": ""})
    plt.close(figure)
    return out.getvalue()


def new(columns: int = 1, width: float = 6.4, height: float = 3.7, **ratios: Any) -> Any:
    """A figure of `columns` axes in a row, in inches."""
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(width, height), constrained_layout=True, **ratios)


def coloured(values: Array) -> tuple[Callable[[Any], Any], Any]:
    """A colour for each size, on a log scale, and the input of a colour bar."""
    from matplotlib import cm, colors

    low, high = float(values.min()), float(values.max())
    scale = colors.LogNorm(low, high if high > low else low * 1.01)
    mapped = cm.ScalarMappable(scale, colors.LinearSegmentedColormap.from_list(
        "sizes", ["#31276b", "#2c6e8f", "#35a07c", "#b3c843"]))  # fmt: skip
    return mapped.to_rgba, mapped


def colour_bar(figure: Any, axes: Any, mapped: Any, label: str) -> None:
    """Add a bar that says which colour is which size."""
    bar = figure.colorbar(mapped, ax=axes, pad=0.015, aspect=30)
    bar.set_label(label)
    bar.outline.set_visible(False)


def log_axis(axes: Any, which: str, values: Array) -> None:
    """Make an axis logarithmic; `which` is x or y."""
    getattr(axes, f"set_{which}scale")("log")
    if values.max() < 10 * values.min():
        plain(getattr(axes, f"{which}axis"))


def plain(axis: Any, most: int = 7, digits: int = 3) -> None:
    """Set plain numbers as ticks in place of powers of ten, on an axis of few decades."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.{digits}g}"))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_minor_formatter(ticker.NullFormatter())
