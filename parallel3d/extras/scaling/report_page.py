"""Report of a fit: the same tables on the terminal and on an HTML page, which also has plots.

It lists every choice that is needed to repeat the fit (the checklist of arXiv:2502.18969).
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.extras.report.page import (
    LINE,
    MARK,
    Part,
    Plots,
    figures,
    html,
    png,
    style,
    table,
    write_page,
)
from parallel3d.extras.scaling import frontier
from parallel3d.extras.scaling.estimator import EXPONENTS, LAWS
from parallel3d.extras.scaling.forecast import ONE_RUN, Forecast
from parallel3d.extras.scaling.frontier import profiles
from parallel3d.extras.scaling.points import Fit, interval
from parallel3d.extras.scaling.posterior import posterior

if TYPE_CHECKING:  # importing matplotlib takes a second
    from matplotlib.figure import Figure

_NOT_KNOWN = (
    "learning-rate schedule and final rate, warm-up, batch size, learning rate, seeds, tokenizer "
    "and vocabulary, training data, architecture"
)
_LOSS = "loss (nats per token)"
Picture = tuple["Figure", str]
"""A figure and its caption."""


def parts(fit: Fit, settings: Mapping[str, str] | None = None) -> list[Part]:
    """Return the tables of a fit's report that have rows.

    - `settings`: training settings to list among the choices, by name.
    """
    diagnostics = fit.diagnostics
    forecasts = [_forecast_row(row) for row in diagnostics.get("forecasts", ())]
    tables = [
        Part("Parameters", ("", "estimate", "std. error", "95 %"), _parameters(fit)),
        Part(
            "Registered forecasts",
            ("registered, UTC", "FLOPs", "x fitted", "forecast", "95 %", "truth", "error", "held"),
            forecasts,
        ),
        back_tests((diagnostics.get("frontier") or {}).get("back_test", ())),
        Part("Choices", ("", ""), [*_choices(fit), *(settings or {}).items()], numeric=False),
        Part("Dropped rows", ("row", "reason"), fit.points.dropped, numeric=False),
    ]
    return [part for part in tables if part.rows]


def _forecast_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["registered_at"][:16].replace("T", " "),
        f"{row['flops']:.3g}",
        f"{row['beyond']:.3g}",
        f"{row['predicted']:.4f}",
        _range(row["interval"]),
        "no run yet" if row["loss"] is None else f"{row['loss']:.4f}",
        "" if row["error"] is None else f"{row['error']:+.2%}",
        {True: "yes", False: "NO", None: ""}[row["held"]],
    )


def back_tests(tests: Sequence[Mapping[str, Any]]) -> Part:
    """Return the table of the forecasts of the largest budgets from the smaller ones."""
    rows = [
        (
            f"last {test['points']} from {test['fitted_on']} before",
            f"{test['beyond']:.3g}",
            f"{test['mean_error']:.2%}",
            f"{test['held']} of {test['points']}",
        )
        for test in tests
    ]
    return Part("Back-test of the forecasts", ("budgets", "x FLOPs", "error", "held"), rows)


def summary(fit: Fit) -> str:
    """Return a sentence with the law and the range of the fitted runs."""
    points = fit.points
    law = LAWS.get(fit.law)
    formula = f", {law.formula} ({law.source})" if law else ""
    spans = (
        f"{values.min():.3g} to {values.max():.3g} {unit}"
        for values, unit in (
            (points.flops, "FLOPs"),
            (points.params, "parameters"),
            (points.tokens, "tokens"),
        )
    )
    return f"{fit.law} law{formula}, fitted to {len(points)} runs of {', '.join(spans)}."


def _parameters(fit: Fit) -> list[tuple[str, ...]]:
    diagnostics = fit.diagnostics
    errors = fit.standard_errors
    intervals = fit.intervals
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{value:.6g}",
            "" if errors[name] is None else f"{errors[name]:.3g}",
            _range(intervals[name]),
        )
        for name, value in fit.parameters.items()
    ]
    compared = diagnostics.get("n_compared", {})
    main = diagnostics.get("n_counts")
    for name, value in fit.optimal.items():
        if f"{name}_exponent" not in fit.parameters:
            spread = interval(fit.optimal_samples.get(name))
            rows.append((f"best {name} grows as C^", f"{value:.4f}", "", _range(spread)))
    for name, other in compared.items():
        if name != main and "N" in other["optimal_exponents"]:
            value = other["optimal_exponents"]["N"]
            rows.append((f"best N (counted as {name}) grows as C^", f"{value:.4f}", "", ""))
    for method, value in diagnostics.get("methods", {}).items():
        if value is not None:
            rows.append((f"best N by {method} grows as C^", f"{value:.4f}", "", ""))
    if bias := diagnostics.get("parabola_bias"):
        rows.append(("bias of the parabola's exponent", f"{bias['N_exponent']:+.4f}", "", ""))
    return rows


def _choices(fit: Fit) -> list[tuple[str, str]]:
    diagnostics = fit.diagnostics
    columns = fit.points.columns
    points = fit.points
    others = [name for name in diagnostics.get("n_compared", {}) if name != diagnostics["n_counts"]]
    compared = f"; compared with {', '.join(others)}" if others else ""
    repeats = "unique tokens unknown"
    if points.unique is not None:
        most = float((points.tokens / points.unique).max())
        repeats = f"at most {most:.3g} times the unique tokens"
    starts, strap, rest, floor, curve, held = (
        diagnostics.get(name)
        for name in ("starts", "bootstrap", "residuals", "noise_floor", "frontier", "held_out")
    )
    low, high = EXPONENTS
    choices = {
        "N": f"counted as {diagnostics.get('n_counts', columns.get('params', ''))}{compared}",
        "D": f"{columns.get('tokens', 'C / 6N')}; {repeats}",
        "C": columns.get("flops", "6 N D"),
        "loss": f"{columns.get('loss', 'loss')}, nats per token; standard error: "
        f"{columns.get('standard_error', 'not known')}",
        "objective": fit.estimator,
        "search": starts
        and f"L-BFGS-B with exact gradients; {starts['reached']} of "
        f"{starts['number']} starts reached the optimum; converged: {diagnostics['converged']}",
        "bounds": starts
        and f"coefficients above 0, exponents from {low:g} to {high:g}; hit: "
        f"{', '.join(diagnostics['bounds_hit']) or 'none'}",
        "condition number": starts and f"{diagnostics['condition']:.3g} (normalised gradients)",
        "intervals": strap
        and f"bootstrap percentiles; {strap['draws']} resamples of the runs "
        f"(seed {strap['seed']}, {strap['redrawn']} drawn again)",
        "residuals": rest
        and f"of log(loss): rms {rest['rms']:.2%}, worst {rest['worst']:+.2%} "
        f"({rest['worst_row']})",
        "noise": floor
        and f"{floor['standard_deviation']:.2%} between {floor['runs']} runs in "
        f"{floor['groups']} groups of equal size and tokens",
        "forecasts": curve
        and "E + A C^-gamma through the best losses of "
        f"{curve['budgets']} budgets, Student-t posterior: "
        + ", ".join(
            f"{name} {value:.4g} ({_range(curve['intervals'][name])})"
            for name, value in curve["parameters"].items()
        )
        + f"; {curve['distant_runs']} runs further than x4 from the best size of their "
        "budget count for less",
        "held-out check": held
        and f"{held['points']} of the largest budgets, from "
        f"{held['flops'][0]:.3g} FLOPs; a fit to the other {held['fitted_on']} is off by "
        f"{held['mean_error']:.2%} (mean), {held['worst_error']:.2%} (worst)",
        "data": f"{diagnostics.get('table', '')}, SHA-256 of the fitted points {points.digest}",
        "rows used": ", ".join(diagnostics.get("where", ())),
    }
    return [(name, text) for name, text in choices.items() if text]


def show_fit(fit: Fit, out: Console) -> None:
    """Print the report of a fit."""
    terminal.say(out, summary(fit))
    for part in parts(fit):
        _show(part, out)
    for warning in fit.diagnostics["warnings"]:
        terminal.say(out, f"WARNING: {warning}", "  ")


def _show(part: Part, out: Console) -> None:
    terminal.say(out, f"\n{part.title}")
    columns = [Column(head, right=part.numeric and n > 0) for n, head in enumerate(part.heads)]
    terminal.show(out, columns, part.rows)


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
        ("loss", "" if forecast.loss is None else f"{forecast.loss:.4f}", _range(spread["loss"])),
        ("loss of one run", "", _range(spread[ONE_RUN])),
    ]
    columns = (Column("", right=False), Column("value"), Column("95 %"))
    terminal.show(out, columns, rows)
    terminal.say(out, f"{forecast.beyond:.3g} times the FLOPs of the largest fitted run")
    if (part := back_tests(forecast.back_test)).rows:
        _show(part, out)
    for warning in forecast.warnings:
        terminal.say(out, f"WARNING: {warning}", "  ")


def write(fit: Fit, folder: Path, *, title: str, settings: Mapping[str, str] | None = None) -> Path:
    """Write report.html, and its plots as PNGs to report/ beside it; return the page's path."""
    drawn = pictures(fit)
    path = folder / "report.html"
    write_page(path, page(fit, title, drawn, settings), drawn)
    return path


def page(
    fit: Fit,
    title: str,
    drawn: Plots,
    settings: Mapping[str, str] | None,
) -> str:
    """Return the report as HTML.


    - `settings`: as in `parts`; None adds a reminder to document them.
    """
    settings = settings or {"not in the table; document separately": _NOT_KNOWN}
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(summary(fit))}</p>",
        *(f"<p class=warn>{escape(text)}.</p>" for text in fit.diagnostics["warnings"]),
        *map(table, parts(fit, settings)),
        "<h2>Plots</h2>",
        *figures(drawn),
    ]
    return html(title, body)


def _range(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.5g} to {bounds[1]:.5g}"


def pictures(fit: Fit) -> Plots:
    """Draw every plot that the fit has data for."""
    with style() as plt:
        drawn = {
            "loss": loss(plt, fit),
            "isoflop": isoflop(plt, fit),
            "optima": optima(plt, fit),
            "residuals": residuals(plt, fit),
            "held_out": held_out(plt, fit),
        }
        return {name: (png(plt, plot[0]), plot[1]) for name, plot in drawn.items() if plot}


def loss(plt: ModuleType, fit: Fit) -> Picture:
    """Draw the loss over FLOPs, coloured by size, with the laws of the best runs."""
    points = fit.points
    figure, axes = plt.subplots()
    dots = axes.scatter(points.flops, points.loss, c=points.params, norm="log", s=13, zorder=3)
    figure.colorbar(dots, label="parameters")
    axes.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=_LOSS)
    axes.yaxis.set(minor_formatter="{x:.3g}", major_formatter="{x:.3g}")
    caption = "Loss of every fitted run over its FLOPs, coloured by size"
    flops = np.geomspace(points.flops.min(), points.flops.max() * 10, 100)
    if law := LAWS.get(fit.law):
        best = law.loss(fit.parameters, *law.best(fit.parameters, flops))
        axes.plot(flops, best, "--", color=MARK, label="the law's best N and D")
        caption += "; dashed: the fitted law at the best size"
    bests, _ = frontier.losses_of(points, fit.law)
    if best_law := posterior(bests):
        low, middle, high = np.percentile([best_law.loss(c) for c in flops], [2.5, 50, 97.5], 1)
        axes.plot(flops, middle, color=LINE, lw=1.8, label="frontier, 95 %")
        axes.fill_between(flops, low, high, color=LINE, alpha=0.2, lw=0)
        axes.plot(*np.array(bests).T[:2], "D", color=LINE, mfc="white", ms=4, label="best losses")
        caption += "; diamonds: best losses of the budgets, with the law through them"
    axes.legend()
    return figure, f"{caption}."


def isoflop(plt: ModuleType, fit: Fit) -> Picture | None:
    """Draw the loss over the size at each budget, with the best size by both methods."""
    shown = profiles(fit.points)
    if len(shown) < 2:
        return None
    figure, axes = plt.subplots()
    colours = plt.cm.ScalarMappable(
        plt.matplotlib.colors.LogNorm(shown[0].flops, shown[-1].flops), "viridis"
    )
    law = LAWS.get(fit.law)
    for profile in shown:
        shade = colours.to_rgba(profile.flops)
        params, losses, tokens = np.exp(profile.logs[:, np.argsort(profile.logs[0])])
        axes.plot(params, losses, "o" if law else "o-", color=shade, ms=3.2, lw=0.6)
        if law:
            sizes = np.geomspace(params[0], params[-1], 80)
            budget = np.exp(np.log(params * tokens).mean())
            axes.plot(sizes, law.loss(fit.parameters, sizes, budget / sizes), color=shade, lw=0.9)
    for method, mark in zip(frontier.METHODS, "Dx", strict=True):
        bests = [profile.least(method) for profile in shown]
        axes.plot(
            [best.params for best in bests if best],
            [best.loss for best in bests if best],
            mark,
            color=MARK,
            mfc="none",
            label=f"best size by {method}",
        )
    axes.legend()
    axes.set(xscale="log", xlabel="parameters", ylabel=_LOSS)
    figure.colorbar(colours, ax=axes, label="training FLOPs")
    lines = "; lines: the fitted law" if law else ""
    return figure, f"IsoFLOP profiles: loss of the runs of each budget over their size{lines}."


def optima(plt: ModuleType, fit: Fit) -> Picture | None:
    """Draw the best size over the budget with its power law, or the best setting over the size."""
    best = fit.diagnostics.get("best")
    if not best:
        return None
    figure, axes = plt.subplots()
    if fit.law not in frontier.NAMES:
        size, value = (np.array([row[k] for row in best]) for k in ("params", "best"))
        axes.loglog(size, value, "o", color=LINE, ms=4)
        axes.set(xlabel="parameters", ylabel=f"best {fit.diagnostics['setting']}")
        return figure, "Best value of each sweep over the size of its runs."
    flops, params = (np.array([row[k] for row in best]) for k in ("flops", "params"))
    axes.loglog(flops, params, "D", color=MARK, mfc="none")
    line = np.geomspace(flops.min(), flops.max() * 10, 50)
    values = fit.parameters["N_coefficient"] * line ** fit.parameters["N_exponent"]
    axes.plot(line, values, color=LINE)
    if fit.samples:
        scale, power = (fit.samples[f"N_{name}"][:, None] for name in ("coefficient", "exponent"))
        low, high = np.percentile(scale * line**power, [2.5, 97.5], axis=0)
        axes.fill_between(line, low, high, color=LINE, alpha=0.15, lw=0)
    axes.set(xlabel="training FLOPs", ylabel="best number of parameters")
    return figure, "Best size of each budget, with the fitted power law and its 95 % interval."


def residuals(plt: ModuleType, fit: Fit) -> Picture | None:
    """Draw the residuals of the law over FLOPs."""
    if len(fit.scatter) != len(fit.points):
        return None
    figure, axes = plt.subplots()
    points = fit.points
    dots = axes.scatter(
        points.flops, 100 * fit.scatter, c=points.params, norm="log", s=13, zorder=3
    )
    caption = "Residuals log(loss) - log(law) of every run, in per cent"
    if floor := fit.diagnostics.get("noise_floor"):
        two = 200 * floor["standard_deviation"]
        axes.axhspan(-two, two, color=LINE, alpha=0.1, lw=0)
        caption += "; shaded: two standard deviations between runs of equal size and tokens"
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="residual (%)")
    figure.colorbar(dots, label="parameters")
    return figure, f"{caption}."


def held_out(plt: ModuleType, fit: Fit) -> Picture | None:
    """Draw predicted over true loss, for the held-out budgets and for registered forecasts."""
    diagnostics = fit.diagnostics
    held = (diagnostics.get("held_out") or {}).get("rows", ()) if fit.law in LAWS else ()
    tests = (diagnostics.get("frontier") or {}).get("back_test", ())
    forecasts = [row for row in diagnostics.get("forecasts", ()) if row["loss"] is not None]
    sets = {
        "largest budgets, by the fitted law": ("o", "#888888", held),
        "their best losses, by the frontier, 95 %": ("s", LINE, tests[-1]["rows"] if tests else ()),
        "registered forecasts, 95 %": ("D", MARK, forecasts),
    }
    if len(held) + len(tests) + 2 * len(forecasts) < 2:
        return None  # a single held-out run needs no plot
    figure, axes = plt.subplots(figsize=(4.4, 3.9))
    for label, (mark, colour, rows) in sets.items():
        if rows:
            truth, predicted = np.array([[row["loss"], row["predicted"]] for row in rows]).T
            bounds = [row.get("interval") or [np.nan] * 2 for row in rows]
            axes.errorbar(
                truth,
                predicted,
                np.abs(np.transpose(bounds) - predicted),
                fmt=mark,
                ms=4,
                color=colour,
                capsize=3,
                label=label,
            )
    axes.axline(truth[:1].repeat(2), slope=1, color="#777777", lw=0.8)
    axes.set(xlabel="true loss", ylabel="predicted loss")
    axes.legend()
    return figure, (
        "Predicted over true loss, for runs that were not fitted: the largest budgets, predicted "
        "from the others, and registered forecasts."
    )
