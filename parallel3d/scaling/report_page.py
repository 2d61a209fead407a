"""Report of a fit: the same tables on the terminal and on an HTML page with plots.

It lists every choice that is needed to repeat the fit (the checklist of arXiv:2502.18969).
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.report.page import Part, figures, html, table, write_page
from parallel3d.scaling.estimator import EXPONENTS
from parallel3d.scaling.forecast import ONE_RUN, Forecast
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.plots import pictures
from parallel3d.scaling.result import LEVEL, Fit, interval
from parallel3d.scaling.runs import Curve

PAGE, PICTURES = "report.html", "report"
_MOST = 12  # dropped rows to print; the page and fit.json list all of them
_NOT_KNOWN = (
    "learning-rate schedule and final rate, warm-up, batch size, learning rate, seeds, tokenizer "
    "and vocabulary, training data, architecture"
)
_HELD = {True: "yes", False: "NO", None: ""}


def parts(fit: Fit, settings: Mapping[str, str] | None = None) -> list[Part]:
    """Return the tables of a fit's report that have rows.

    settings: training settings to list among the choices, by name.
    """
    diagnostics = fit.diagnostics
    forecasts = [
        (
            row["registered_at"][:16].replace("T", " "), f"{row['flops']:.3g}",
            f"{row['beyond']:.3g}", f"{row['predicted']:.4f}", _range(row["interval"]),
            "no run yet" if row["loss"] is None else f"{row['loss']:.4f}",
            "" if row["error"] is None else f"{row['error']:+.2%}", _HELD[row["held"]],
        )
        for row in diagnostics.get("forecasts", ())
    ]  # fmt: skip
    tables = [
        Part("Parameters", ("", "estimate", "std. error", f"{LEVEL} %"), _parameters(fit)),
        Part(
            "Registered forecasts",
            ("registered, UTC", "FLOPs", "x fitted", "forecast", f"{LEVEL} %", "truth", "error",
             "held"),
            forecasts,
        ),
        back_tests((diagnostics.get("frontier") or {}).get("back_test", ())),
        Part("Choices", ("", ""), [*_choices(fit), *(settings or {}).items()], numeric=False),
        Part("Dropped rows", ("row", "reason"), fit.points.dropped, numeric=False),
    ]  # fmt: skip
    return [part for part in tables if part.rows]


def back_tests(tests: Sequence[Mapping[str, Any]]) -> Part:
    """Return the table of the forecasts of the largest budgets from the smaller ones."""
    rows = [
        (f"last {test['points']} from {test['fitted_on']} before", f"{test['beyond']:.3g}",
         f"{test['mean_error']:.2%}", f"{test['held']} of {test['points']}")
        for test in tests
    ]  # fmt: skip
    return Part("Back-test of the forecasts", ("budgets", "x FLOPs", "error", "held"), rows)


def summary(fit: Fit) -> str:
    """Return a sentence with the law and the range of the fitted runs."""
    points, law = fit.points, LAWS.get(fit.law)
    formula = f", {law.formula} ({law.source})" if law else ""
    spans = (
        f"{values.min():.3g} to {values.max():.3g} {unit}"
        for values, unit in (
            (points.flops, "FLOPs"), (points.params, "parameters"), (points.tokens, "tokens"),
        )
    )  # fmt: skip
    return f"{fit.law} law{formula}, fitted to {len(points)} runs of {', '.join(spans)}."


def _parameters(fit: Fit) -> list[tuple[str, ...]]:
    diagnostics, errors, intervals = fit.diagnostics, fit.standard_errors, fit.intervals
    rows: list[tuple[str, ...]] = [
        (name, f"{value:.6g}", "" if errors[name] is None else f"{errors[name]:.3g}",
         _range(intervals[name]))
        for name, value in fit.parameters.items()
    ]  # fmt: skip
    exponents = [
        (f"best {name} grows as C^", value, interval(fit.optimal_samples.get(name)))
        for name, value in fit.optimal.items()
        if f"{name}_exponent" not in fit.parameters
    ]
    for name, other in diagnostics.get("n_compared", {}).items():
        if name != diagnostics["n_counts"] and "N" in other["optimal_exponents"]:
            label = f"best N (counted as {name}) grows as C^"
            exponents.append((label, other["optimal_exponents"]["N"], None))
    for method, value in diagnostics.get("methods", {}).items():
        if value is not None:
            exponents.append((f"best N by {method} grows as C^", value, None))
    rows += [(label, f"{value:.4f}", "", _range(spread)) for label, value, spread in exponents]
    if bias := diagnostics.get("parabola_bias"):
        rows.append(("bias of the parabola's exponent", f"{bias['N_exponent']:+.4f}", "", ""))
    return rows


def _choices(fit: Fit) -> list[tuple[str, str]]:
    diagnostics, columns, points = fit.diagnostics, fit.points.columns, fit.points
    others = [name for name in diagnostics.get("n_compared", {}) if name != diagnostics["n_counts"]]
    compared = f"; compared with {', '.join(others)}" if others else ""
    repeats = "unique tokens unknown"
    if points.unique is not None:
        most = float((points.tokens / points.unique).max())
        repeats = f"at most {most:.3g} times the unique tokens"
    rows = [
        ("N", f"counted as {diagnostics.get('n_counts', columns.get('params', ''))}{compared}"),
        ("D", f"{columns.get('tokens', 'C / 6N')}; {repeats}"),
        ("C", columns.get("flops", "6 N D")),
        ("loss", f"{columns.get('loss', 'loss')}, nats per token; standard error: "
         f"{columns.get('standard_error', 'not known')}"),
        ("objective", fit.estimator),
    ]  # fmt: skip
    if starts := diagnostics.get("starts"):
        low, high = EXPONENTS
        rows += [
            ("search", f"L-BFGS-B with exact gradients; {starts['reached']} of {starts['number']} "
             "starts reached the optimum; converged: "
             f"{'yes' if diagnostics['converged'] else 'no'}"),
            ("bounds", f"coefficients above 0, exponents from {low:g} to {high:g}; hit: "
             f"{', '.join(diagnostics['bounds_hit']) or 'none'}"),
            ("condition number", f"{diagnostics['condition']:.3g} (normalised gradients)"),
        ]  # fmt: skip
    if strap := diagnostics.get("bootstrap"):
        rows.append(("intervals", f"bootstrap percentiles; {strap['draws']} resamples of the runs "
                     f"(seed {strap['seed']}, {strap['redrawn']} drawn again)"))  # fmt: skip
    if rest := diagnostics.get("residuals"):
        rows.append(("residuals", f"of log(loss): rms {rest['rms']:.2%}, worst {rest['worst']:+.2%}"
                     f" ({rest['worst_row']})"))  # fmt: skip
    if floor := diagnostics.get("noise_floor"):
        rows.append(("noise", f"{floor['standard_deviation']:.2%} between {floor['runs']} runs in "
                     f"{floor['groups']} groups of equal size and tokens"))  # fmt: skip
    if frontier := diagnostics.get("frontier"):
        spread = ", ".join(
            f"{name} {value:.4g} ({_range(frontier['intervals'][name])})"
            for name, value in frontier["parameters"].items()
        )
        rows.append(
            ("forecasts", "E + A C^-gamma through the best losses of "
             f"{frontier['budgets']} budgets, Student-t posterior: {spread}; "
             f"{frontier['distant_runs']} runs further than x4 from the best size of their budget "
             "count for less")
        )  # fmt: skip
    if held := diagnostics.get("held_out"):
        rows.append(
            ("held-out check", f"{held['points']} of the largest budgets, from "
             f"{held['flops'][0]:.3g} FLOPs; a fit to the other {held['fitted_on']} is off by "
             f"{held['mean_error']:.2%} (mean), {held['worst_error']:.2%} (worst)")
        )  # fmt: skip
    rows.append(
        ("data", f"{diagnostics.get('table', '')}, SHA-256 of the fitted points {points.digest}")
    )
    if conditions := diagnostics.get("where"):
        rows.append(("rows used", ", ".join(conditions)))
    return rows


def show_fit(fit: Fit, out: Console) -> None:
    """Print the report of a fit."""
    terminal.say(out, summary(fit))
    for part in parts(fit):
        _show(part, out)
    if len(fit.points.dropped) > _MOST:
        terminal.say(out, f"{len(fit.points.dropped) - _MOST} more rows are listed in fit.json")
    for warning in fit.diagnostics["warnings"]:
        terminal.say(out, f"WARNING: {warning}", "  ")


def _show(part: Part, out: Console) -> None:
    terminal.say(out, f"\n{part.title}")
    last = len(part.heads) - 1
    columns = [
        Column(head, right=part.numeric and place > 0, wraps=not part.numeric and place == last)
        for place, head in enumerate(part.heads)
    ]
    terminal.show(out, columns, part.rows[:_MOST] if part.heads[0] == "row" else part.rows)


def show_forecast(forecast: Forecast, fit: Fit, out: Console) -> None:
    """Print a forecast, and how far beyond the fitted runs it is."""
    spread = forecast.intervals
    terminal.say(
        out,
        f"forecast at {forecast.flops:.4g} FLOPs, by the {fit.law} law fitted to "
        f"{len(fit.points)} runs; loss by {forecast.by}",
    )
    rows = [
        ("N", f"{forecast.params:.4g}", _range(spread["params"])),
        ("D", f"{forecast.tokens:.4g}", _range(spread["tokens"])),
    ]
    if forecast.loss is not None:
        rows.append(("loss", f"{forecast.loss:.4f}", _range(spread["loss"])))
        rows.append(("loss of one run", "", _range(spread[ONE_RUN])))
    columns = (Column("", right=False), Column("value"), Column(f"{LEVEL} %"))
    terminal.show(out, columns, rows)
    if forecast.loss is None:
        terminal.say(out, "WARNING: no loss: the fit has too few budgets for a law of it", "  ")
    elif spread["loss"] is None:
        terminal.say(out, "WARNING: no intervals: the fit has no bootstrap draws", "  ")
    terminal.say(out, f"{forecast.beyond:.3g} times the FLOPs of the largest fitted run")
    if (part := back_tests(forecast.back_test)).rows:
        _show(part, out)
    for warning in forecast.warnings:
        terminal.say(out, f"WARNING: {warning}", "  ")


def write(
    fit: Fit, folder: Path, *, title: str, curves: Sequence[Curve] = (),
    settings: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write report.html, and its plots as PNGs to report/ beside it; return the page's path."""
    drawn, path = pictures(fit, curves), folder / PAGE
    write_page(path, page(fit, title, drawn, settings), drawn)
    return path


def page(
    fit: Fit, title: str, drawn: Mapping[str, tuple[bytes, str]],
    settings: Mapping[str, str] | None,
) -> str:  # fmt: skip
    """Return the report as HTML.

    drawn: name -> (PNG, caption) of each plot.
    settings: as in `parts`; None adds a reminder to document them.
    """
    unknown_settings = {"not in the table; document separately": _NOT_KNOWN}
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(summary(fit))}</p>",
        *(f"<p class=warn>{escape(text)}.</p>" for text in fit.diagnostics["warnings"]),
        *map(table, parts(fit, settings or unknown_settings)),
        "<h2>Plots</h2>", *figures(drawn),
    ]  # fmt: skip
    return html(title, body)


def _range(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.5g} to {bounds[1]:.5g}"
