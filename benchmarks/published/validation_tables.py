"""The outcome of a validation as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_ERRORS = (
    ("rows", "rows", "rows"),
    ("left_out", "left out", "out"),
    ("mean_error", "mean error", "error"),
    ("worst_error", "worst", "worst"),
    ("bias", "bias", "bias"),
    ("constant_mean_error", "constant", "constant"),
    ("neighbour_mean_error", "neighbour", "neighbour"),
)
_ORDER = (
    ("rank_correlation", "rank", "rank"),
    ("flops_rank_correlation", "of FLOP/s", "of FLOP/s"),
    ("mesh_regret", "regret", "regret"),
)
_SIGNED = ("bias",)
_PLAIN = ("rank_correlation", "flops_rank_correlation")
_WIDE = 118  # columns from which one table has room for all
_EXAMPLES = 6  # line numbers, and values, that are named

Columns = Sequence[tuple[str, str, str]]  # key, title where there is room, title where not
Lines = Mapping[str, Mapping[str, Any]]


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the outcome of a validation.

    Errors by source, by group and over all, then what was assumed and what was left out.
    """
    _print(
        console,
        "Each group is predicted with curves that were fitted on the other groups only. Errors are "
        "fractions of the measured step time. constant: the error of the constant efficiency that "
        "the other groups had on that chip; neighbour: of the efficiency of the three runs of other"
        " groups most alike, without physics.",
    )
    total = report["overall"]
    ends = {"all, by group": total, "all, by row": total["by_row"]}
    for name, lines in (("source", report["sources"]), ("group", {**report["groups"], **ends})):
        used = {title: line for title, line in lines.items() if line["rows"]}
        if not used:
            continue
        if console.width >= _WIDE:
            _print(console, _table(name, used, (*_ERRORS, *_ORDER), 1))
        else:
            _print(console, _table(name, used, _ERRORS, 2))
            ordered = {t: line for t, line in used.items() if any(line[k] for k, *_ in _ORDER)}
            if ordered:
                _print(console, _table(name, ordered, _ORDER, 2))
    if experts := report["experts"]:
        _print(console, "Mixtures of experts, which no curve was fitted on, and no line above has:")
        _print(console, _table("model", experts, _ERRORS, 2))
        _print(console, _of_experts([row for row in report["rows"] if row["model"] in experts]))
    elif not total["rows"]:
        _print(console, "No row could be used.")
    if (memory := report["memory"])["rows"]:
        _print(console, _memory(memory))
    if report["assumed"]:
        _print(console, _assumed(report["assumed"]))
    if report["asked"]:
        _print(console, _asked(report["asked"]))
    if report["left_out"]:
        _print(console, _left_out(report["left_out"]))


def _print(console: Console, what: str | Table) -> None:
    """Print, wrapped at the console's width."""
    console.print(what, highlight=False, soft_wrap=False)
    console.print()


def _table(name: str, lines: Lines, columns: Columns, title: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2 if title == 1 else 1, 0, 0))
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column[title], justify="right", no_wrap=True)
    for line, values in lines.items():
        table.add_row(line, *(_text(key, values.get(key)) for key, *_ in columns))
    return table


def markdown(report: Mapping[str, Any]) -> str:
    """Return the table of groups in docs/planner/validation.md."""
    total = report["overall"]
    ends = {"**all, by group**": total, "all, by row": total["by_row"]}
    lines = []
    for name, values in {**report["groups"], **ends}.items():
        cells = [_in_docs(key, values[key]) for key in _DOCS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


_DOCS = (
    "rows",
    "mean_error",
    "worst_error",
    "bias",
    "constant_mean_error",
    "neighbour_mean_error",
    "rank_correlation",
    "flops_rank_correlation",
    "mesh_regret",
    "mesh_sets",
)


def _in_docs(key: str, value: Any) -> str:
    text = _text(key, value).replace(",", "").replace("%", " %")
    return "–" if text == "-" else text


def _memory(memory: Mapping[str, Any]) -> str:
    lost = memory["out_of_memory_rows"]
    ran = memory["ran_rows"]
    wrong = len(memory["said_to_fit"]), len(memory["ran_but_said_not_to_fit"])
    return (
        f"memory: {memory['rows']} rows, mean error {memory['mean_error']:.1%}, worst "
        f"{memory['worst_error']:.1%}, bias {memory['bias']:+.1%}; said to fit: {wrong[0]} of "
        f"{lost} that ran out of memory; said not to fit: {wrong[1]} of {ran:,} that ran"
    )


def _of_experts(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds and model FLOP/s of a device of each run, measured and predicted."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("line", "model", "gpu", "mesh", "ep", "s", "predicted", "TFLOP/s", "predicted"):
        table.add_column(column, justify="left" if column in ("model", "gpu", "mesh") else "right")
    for row in rows:
        seconds = row["measured"], row["predicted"]
        flops = (f"{row['model_flops'] / each / 1e12:.0f}" for each in seconds)
        mesh = row["mesh"].rpartition(" ")[0]
        cells = row["row"], row["model"], row["gpu"], mesh, row["ep"]
        table.add_row(*map(str, cells), *(f"{each:.2f}" for each in seconds), *flops)
    return table


def _assumed(assumed: Mapping[str, Any]) -> Table:
    """Blanks that were filled: column, rows, and the values taken, most frequent first."""
    table = _plain(("assumed", "left"), ("rows", "right"), ("where the cell is blank", "left"))
    for name, column in assumed.items():
        values = sorted(column["values"].items(), key=lambda item: -item[1])
        shown = [f"{value} in {count:,}" for value, count in values[:_EXAMPLES]]
        table.add_row(name, f"{column['rows']:,}", _listed(shown, len(values)))
    return table


def _asked(asked: Mapping[str, Any]) -> Table:
    """Columns that would make rows usable, each once, with what to write and the rows' lines."""
    table = _plain(("please fill", "left"), ("rows", "right"), ("with", "left"), ("lines", "left"))
    for name, column in asked.items():
        lines = _listed([str(line) for line in column["lines"][:_EXAMPLES]], column["rows"])
        table.add_row(name, f"{column['rows']:,}", column["write"], lines)
    return table


def _left_out(left_out: Sequence[Mapping[str, Any]]) -> Table:
    """What was left out: rows and their lines by reason, with the first row's own words."""
    table = _plain(("left out", "right"), ("why", "left"), ("lines", "left"))
    rules: dict[str, list[Mapping[str, Any]]] = {}
    for out in left_out:
        rules.setdefault(out["rule"], []).append(out)
    for rule, same in sorted(rules.items(), key=lambda item: -len(item[1])):
        first = same[0]["reason"]
        why = first if len(same) == 1 or first == rule else f"{rule}. The first: {first}"
        lines = _listed([str(out["row"]) for out in same[:_EXAMPLES]], len(same))
        table.add_row(f"{len(same):,}", why, lines)
    return table


def _plain(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, justify in columns:
        table.add_column(title, justify=justify, overflow="fold")
    return table


def _listed(shown: Sequence[str], count: int) -> str:
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return "; ".join(shown) + more


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}"
    if key in _PLAIN:
        return f"{value:.2f}"
    return f"{value:+.1%}" if key in _SIGNED else f"{value:.1%}"
