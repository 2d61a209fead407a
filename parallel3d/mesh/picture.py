"""The mesh as text, printed at start-up (floor 0)."""

from collections.abc import Sequence

_LIMIT = 8  # rows and columns shown; of a longer axis, the ends


def draw_mesh(grid: Sequence[Sequence[Sequence[int]]]) -> str:
    """Draw the ranks `grid[pp][dp][tp]`: a column for each pp coordinate, a row for each dp.

    A cell holds the ranks of one tp group.
    """
    pp, dp, tp = len(grid), len(grid[0]), len(grid[0][0])
    columns, rows = _shown(pp), _shown(dp)
    table = [["", *("" if p is None else f"pp {p}" for p in columns)]]
    for d in rows:
        cells = ["·" if p is None or d is None else _cell(grid[p][d]) for p in columns]
        table.append(["" if d is None else f"dp {d}", *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"mesh pp {pp} × dp {dp} × tp {tp} = {pp * dp * tp} rank{'s'[: pp * dp * tp > 1]}"]
    for i, row in enumerate(table):
        label, *cells = (f"{cell:^{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {label}  {(' → ' if i else '   ').join(cells)}".rstrip())
    legend = {"→ pp cuts the layers": pp, "rows: dp cuts the batch": dp}
    legend["[ ] tp cuts the matrices"] = tp
    said = [text for text, size in legend.items() if size > 1]
    return "\n".join([*lines, "  " + "   ".join(said)] if said else lines)


def _shown(size: int) -> list[int | None]:
    """The coordinates of an axis; None stands for those that are left out."""
    return list(range(size)) if size <= _LIMIT else [*range(_LIMIT - 2), None, size - 1]


def _cell(ranks: Sequence[int]) -> str:
    return f"[{' '.join(map(str, ranks))}]" if len(ranks) <= 4 else f"[{ranks[0]}..{ranks[-1]}]"
