"""Report of a fit: the same tables on the terminal and on an HTML page, which also has plots.

It lists every choice that is needed to repeat the fit (the checklist of arXiv:2502.18969).
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.report.page import LINE, MARK, Part, figures, html, png, style, table, write_page
from parallel3d.scaling import frontier
from parallel3d.scaling.estimator import EXPONENTS, LAWS
from parallel3d.scaling.forecast import ONE_RUN, Forecast
from parallel3d.scaling.frontier import profiles
from parallel3d.scaling.points import FLOPS_PER_ND, LEVEL, Fit, groups, interval
from parallel3d.scaling.posterior import posterior

if TYPE_CHECKING:  # of an extra
    from matplotlib.figure import Figure

PAGE, PICTURES = "report.html", "report"
_MOST = 12  # dropped rows to print; the page and fit.json list all of them
_NOT_KNOWN = (
    "learning-rate schedule and final rate, warm-up, batch size, learning rate, seeds, tokenizer "
    "and vocabulary, training data, architecture"
)
_HELD = {True: "yes", False: "NO", None: ""}
_T = TypeVar("_T")
_MOST_LINES = 9  # lines of one plot that can be told apart
_LOSS = "loss (nats per token)"
Picture = tuple["Figure", str]
"""A figure and its caption."""


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
    columns = [Column(head, right=part.numeric and n > 0) for n, head in enumerate(part.heads)]
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
        terminal.say(out, "WARNING: no intervals: the fit has no draws of its parameters", "  ")
    terminal.say(out, f"{forecast.beyond:.3g} times the FLOPs of the largest fitted run")
    if (part := back_tests(forecast.back_test)).rows:
        _show(part, out)
    for warning in forecast.warnings:
        terminal.say(out, f"WARNING: {warning}", "  ")


def write(fit: Fit, folder: Path, *, title: str, settings: Mapping[str, str] | None = None) -> Path:
    """Write report.html, and its plots as PNGs to report/ beside it; return the page's path."""
    drawn, path = pictures(fit), folder / PAGE
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


def pictures(fit: Fit) -> dict[str, tuple[bytes, str]]:
    """Draw every plot that the fit has data for; return name -> (PNG, caption)."""
    with style() as plt:
        drawn = {
            "loss": loss(plt, fit), "isoflop": isoflop(plt, fit), "optima": optima(plt, fit),
            "residuals": residuals(plt, fit), "held_out": held_out(plt, fit),
        }  # fmt: skip
        return {name: (png(plt, plot[0]), plot[1]) for name, plot in drawn.items() if plot}


def _some(items: Sequence[_T]) -> list[_T]:
    """Return at most _MOST_LINES of the items, evenly spaced and including both ends."""
    places = np.linspace(0, len(items) - 1, min(len(items), _MOST_LINES)).round().astype(int)
    return [items[i] for i in places]


def loss(plt: ModuleType, fit: Fit) -> Picture:
    """Draw the loss over FLOPs, coloured by size, with the law's curve for some sizes."""
    points = fit.points
    figure, axes = plt.subplots()
    dots = axes.scatter(points.flops, points.loss, c=points.params, norm="log", s=13, zorder=3)
    figure.colorbar(dots, label="parameters")
    axes.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=_LOSS)
    axes.yaxis.set(minor_formatter="{x:.3g}", major_formatter="{x:.3g}")
    caption = "Loss of every fitted run over its FLOPs, coloured by size"
    flops = np.geomspace(points.flops.min(), points.flops.max() * 10, 100)
    if law := LAWS.get(fit.law):
        lengths = {size: points.tokens[points.params == size] for size in np.unique(points.params)}
        for size in _some([n for n, tokens in lengths.items() if len(groups(tokens)) >= 3]):
            tokens = np.geomspace(lengths[size].min() / 1.5, lengths[size].max() * 1.5, 60)
            values = law.loss(fit.parameters, np.full(60, size), tokens)
            axes.plot(FLOPS_PER_ND * size * tokens, values, color=dots.to_rgba(size), lw=0.9)
        best = law.loss(fit.parameters, *law.best(fit.parameters, flops))
        axes.plot(flops, best, "--", color=MARK, label="the law's best N and D")
        caption += (
            "; lines: the fitted law at sizes with at least three lengths; dashed: at the best size"
        )
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
    shown = _some(profiles(fit.points))
    if len(shown) < 2:
        return None
    figure, axes = plt.subplots()
    colours = plt.cm.ScalarMappable(
        plt.matplotlib.colors.LogNorm(shown[0].flops, shown[-1].flops), "viridis"
    )
    best: dict[frontier.Method, tuple[str, str]] = {
        "akima": ("D", "best size, Akima"),
        "parabola": ("x", "best size, parabola"),
    }
    for profile in shown:
        shade = colours.to_rgba(profile.flops)
        params, losses, tokens = np.exp(profile.logs[:, np.argsort(profile.logs[0])])
        axes.plot(params, losses, "o" if fit.law in LAWS else "o-", color=shade, ms=3.2, lw=0.6)
        if law := LAWS.get(fit.law):
            sizes = np.geomspace(params[0], params[-1], 80)
            budget = np.exp(np.log(params * tokens).mean())
            axes.plot(sizes, law.loss(fit.parameters, sizes, budget / sizes), color=shade, lw=0.9)
        for method, (mark, label) in best.items():
            if least := profile.least(method):
                axes.plot(least.params, least.loss, mark, color=MARK, mfc="none", label=label)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())
    axes.set(xscale="log", xlabel="parameters", ylabel=_LOSS)
    figure.colorbar(colours, ax=axes, label="training FLOPs")
    lines = "; lines: the fitted law" if fit.law in LAWS else ""
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
    """Draw the residuals of the law over FLOPs, and their histogram."""
    if len(fit.scatter) != len(fit.points):
        return None
    figure, (left, right) = plt.subplots(1, 2, width_ratios=[4, 1], sharey=True)
    flops, params = fit.points.flops, fit.points.params
    dots = left.scatter(flops, 100 * fit.scatter, c=params, norm="log", s=13, zorder=3)
    caption = "Residuals log(loss) - log(law) of every run, in per cent"
    if floor := fit.diagnostics.get("noise_floor"):
        two = 200 * floor["standard_deviation"]
        left.axhspan(-two, two, color=LINE, alpha=0.1, lw=0)
        caption += "; shaded: two standard deviations between runs of equal size and tokens"
    left.set(xscale="log", xlabel="training FLOPs", ylabel="residual (%)")
    right.hist(100 * fit.scatter, bins=25, orientation="horizontal")
    right.set_xlabel("runs")
    figure.colorbar(dots, ax=right, label="parameters")
    return figure, f"{caption}."


def held_out(plt: ModuleType, fit: Fit) -> Picture | None:
    """Draw predicted over true loss, for the held-out budgets and for registered forecasts."""
    diagnostics = fit.diagnostics
    held = (diagnostics.get("held_out") or {}).get("rows", ()) if fit.law in LAWS else ()
    tests = (diagnostics.get("frontier") or {}).get("back_test", ())
    forecasts = [row for row in diagnostics.get("forecasts", ()) if row["loss"] is not None]
    sets = {
        "largest budgets, by the fitted law": ("o", "#888888", held),
        "their best losses, by the frontier, 95 %":
            ("s", LINE, tests[-1]["rows"] if tests else ()),
        "registered forecasts, 95 %": ("D", MARK, forecasts),
    }  # fmt: skip
    if len(held) + len(tests) + 2 * len(forecasts) < 2:
        return None  # a single held-out run needs no plot
    figure, axes = plt.subplots(figsize=(4.4, 3.9))
    for label, (mark, colour, rows) in sets.items():
        if rows:
            truth, predicted = np.array([[row["loss"], row["predicted"]] for row in rows]).T
            bounds = [row.get("interval") or [np.nan] * 2 for row in rows]
            axes.errorbar(
                truth, predicted, np.abs(np.transpose(bounds) - predicted), fmt=mark, ms=4,
                color=colour, capsize=3, label=label,
            )  # fmt: skip
    axes.axline(truth[:1].repeat(2), slope=1, color="#777777", lw=0.8)
    axes.set(xlabel="true loss", ylabel="predicted loss")
    axes.legend()
    return figure, (
        "Predicted over true loss, for runs that were not fitted: the largest budgets, predicted "
        "from the others, and registered forecasts."
    )
