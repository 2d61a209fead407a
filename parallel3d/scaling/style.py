"""Style of pictures, for matplotlib."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8, "lines.linewidth": 1.2, "axes.titlesize": 9.5, "figure.dpi": 160,
    "axes.edgecolor": "#555555", "figure.figsize": (6.4, 3.7),
    "figure.constrained_layout.use": True,
}  # fmt: skip


@contextmanager
def style() -> Iterator[Any]:
    """Give matplotlib's pyplot in this style, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        yield plt


def png(plt: Any, figure: Any) -> bytes:
    """Return the figure as a PNG, and close it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": ""})
    plt.close(figure)
    return out.getvalue()
