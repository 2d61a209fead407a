"""One HTML file with tables and plots in it, and the style of the plots."""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from parallel3d.base.atomic import replaced
from parallel3d.base.errors import ConfigError

if TYPE_CHECKING:  # importing matplotlib takes a second
    from matplotlib.figure import Figure

MARK = "#c0392b"
LINE = "#31276b"
_CSS = """
body { font: 15px/1.5 Georgia, serif; color: #222; max-width: 72rem; margin: 2.5rem auto;
  padding: 0 1rem }
p, pre, .table { max-width: 46rem } .table { overflow-x: auto }
.plots { display: grid; column-gap: 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)) }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: .92em; width: 100% }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; vertical-align: top;
  border-bottom: 1px solid #e4e4e4; overflow-wrap: anywhere }
td:first-child { min-width: 8rem; overflow-wrap: normal }
.n td + td, .n th + th { text-align: right; white-space: nowrap }
figure { margin: 1rem 0; break-inside: avoid } img { width: 100% }
figcaption { font-size: .88em; color: #444 } .warn { border-left: 3px solid #c0392b;
  padding-left: .8rem } pre { font-size: .82em; white-space: pre-wrap; overflow-wrap: anywhere;
  background: #f6f6f6; padding: .6rem .8rem } summary { cursor: pointer }
"""
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.2,
    "axes.titlesize": 9.5,
    "figure.dpi": 160,
    "axes.edgecolor": "#555555",
    "figure.figsize": (6.4, 3.7),
    "figure.constrained_layout.use": True,
}


Plots = Mapping[str, tuple[bytes, str]]
"""Name -> (PNG, caption) of each plot."""


@dataclass(frozen=True)
class Part:
    """A table of a page with its title."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: bool = True  # all columns except the first are numbers


def require(package: str) -> None:
    """Raise ConfigError if a package of the extra `scaling` is not installed."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; run: pip install 'parallel3d[scaling]'")


@contextmanager
def style() -> Iterator[ModuleType]:
    """Yield matplotlib's pyplot in the pages' style, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        yield plt


def png(plt: ModuleType, figure: "Figure") -> bytes:
    """Return the figure as a PNG, and close it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": ""})
    plt.close(figure)
    return out.getvalue()


def figures(drawn: Plots) -> Iterator[str]:
    """Yield the HTML of plots, two beside each other on a wide screen."""
    yield "<div class=plots>"
    for name, (image, caption) in drawn.items():
        source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        yield (
            f'<figure id="{name}"><img alt="{escape(caption)}" src="{source}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    yield "</div>"


def table(part: Part) -> str:
    """Return a table with its title as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    heads = line(part.heads, "th") if any(part.heads) else ""
    rows = "".join(line(row, "td") for row in part.rows)
    kind = " class=n" if part.numeric else ""
    title = f"<h2>{escape(part.title)}</h2>"
    return f"{title}<div class=table><table{kind}>{heads}{rows}</table></div>"


def html(title: str, body: Iterable[str]) -> str:
    """Return a page of HTML parts, which fetches nothing."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style><body>{''.join(body)}</body></html>\n"
    )


def write_page(path: Path, text: str, drawn: Plots) -> None:
    """Write a page, and its plots as PNGs into a folder beside it that has the page's name."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (image, _) in drawn.items():
        with replaced(folder / f"{name}.png") as partial:
            partial.write_bytes(image)
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")
