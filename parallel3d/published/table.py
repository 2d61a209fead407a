"""The outcome of a validation as tables for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    ("rows", "rows"),
    ("left_out", "left out"),
    ("mean_error", "mean error"),
    ("worst_error", "worst"),
    ("bias", "bias"),
    ("constant_mean_error", "constant"),
    ("rank_correlation", "rank"),
    ("flops_rank_correlation", "of FLOP/s"),
    ("mesh_regret", "regret"),
)
COUNTS, SIGNED, PLAIN = (
    ("rows", "left_out"),
    ("bias",),
    ("rank_correlation", "flops_rank_correlation"),
)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints what `validate` returned: by source, by group and over all, then what was left out."""
    console.print(
        "Each group is predicted with curves that were fitted on the other groups only. Errors are "
        "fractions of the measured step time; `constant` is the error of the constant efficiency "
        "that the other groups had on that chip."
    )
    for name in ("sources", "groups"):
        lines = dict(report[name])
        if name == "groups":
            lines["all"] = report["overall"]
        console.print(_table(name, lines))
    if memory := report.get("memory"):
        figures = {name: value for name, value in memory.items() if not isinstance(value, dict)}
        console.print("memory: " + ", ".join(f"{n} {_text(n, v)}" for n, v in figures.items()))
    reasons: dict[tuple[str, str], list[int]] = {}
    for out in report["left_out"]:
        reasons.setdefault((out["source"], out["reason"]), []).append(out["row"])
    for (source, reason), lines_left in reasons.items():
        where = ", ".join(map(str, lines_left[:6])) + (" ..." if len(lines_left) > 6 else "")
        console.print(f"left out: {source}, line {where}: {reason}", highlight=False)


def _table(name: str, lines: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(name[:-1], no_wrap=True)
    for _, title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for line, values in lines.items():
        table.add_row(line, *(_text(key, values.get(key)) for key, _ in COLUMNS))
    return table


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key in COUNTS or not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if key in PLAIN else f"{value:+.1%}" if key in SIGNED else f"{value:.1%}"
