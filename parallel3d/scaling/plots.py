"""Pictures of a fit, each a PNG as bytes (matplotlib is imported late)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallel3d.scaling import frontier
from parallel3d.scaling.checks import groups
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.profile import profiles
from parallel3d.scaling.result import Fit, interval
from parallel3d.scaling.runs import Curve
from parallel3d.scaling.style import colour_bar, coloured, log_axis, new, plain, png, style

_MARK, _QUIET = "#c0392b", "#777777"
_MOST = 9  # lines of one picture that can be told apart


def pictures(fit: Fit, curves: Sequence[Curve] = ()) -> dict[str, tuple[bytes, str]]:
    """PNG and caption, by name, of each picture for which the fit has data."""
    drawn: dict[str, Callable[[Fit], tuple[Any, str] | None]] = {
        "loss": loss, "isoflop": isoflop, "optima": optima, "residuals": residuals,
        "intervals": intervals, "held_out": held_out,
    }  # fmt: skip
    found = {}
    with style() as plt:
        for name, draw in drawn.items():
            if made := draw(fit):
                found[name] = (png(plt, made[0]), made[1])
        if curves:
            figure, caption = loss_curves(curves)
            found["curves"] = (png(plt, figure), caption)
    return found


def _some(items: Sequence[Any]) -> list[Any]:
    """At most so many as can be told apart, the ends among them."""
    if len(items) <= _MOST:
        return list(items)
    places = np.unique(np.linspace(0, len(items) - 1, _MOST).round().astype(int))
    return [items[i] for i in places]


def loss(fit: Fit) -> tuple[Any, str] | None:
    """A picture of loss over FLOPs, coloured by size, with the law of each size."""
    points = fit.points
    figure, axes = new()
    colour, mapped = coloured(points.params)
    axes.scatter(points.flops, points.loss, c=colour(points.params), s=13, lw=0, zorder=3)
    caption = "The loss of every fitted run over its FLOPs, coloured by size"
    if law := LAWS.get(fit.law):
        drawn = 0
        lines = [float(points.params[group].mean()) for group in groups(points.params)]
        for size in _some(lines):
            own = points.tokens[np.abs(points.params / size - 1) < 1e-3]
            if len(groups(own)) < 3:
                continue
            drawn += 1
            tokens = np.geomspace(own.min() / 1.5, own.max() * 1.5, 60)
            values = law.loss(fit.parameters, np.full(60, size), tokens)
            axes.plot(6 * size * tokens, values, color=colour(size), lw=0.9, alpha=0.8)
        flops = np.geomspace(points.flops.min(), points.flops.max() * 10, 100)
        params, tokens = law.best(fit.parameters, flops)
        best = law.loss(fit.parameters, params, tokens)
        axes.plot(flops, best, "--", color=_MARK, lw=1.1, label="the law's best N and D")
        axes.legend(loc="upper right")
        caption += "; lines: the fitted law at a run's size" * bool(drawn)
        caption += "; dashed: the law at its best size and length"
    log_axis(axes, "x", points.flops)
    axes.set_yscale("log")
    plain(axes.yaxis)
    axes.set(xlabel="training FLOPs", ylabel="loss (nats per token)")
    colour_bar(figure, axes, mapped, "parameters")
    return figure, f"{caption}."


def isoflop(fit: Fit) -> tuple[Any, str] | None:
    """A picture of loss over size at each budget, with the best sizes by both methods."""
    found = _some(profiles(fit.points))
    if len(found) < 2:
        return None
    figure, axes = new()
    colour, mapped = coloured(fit.points.flops)
    for profile in found:
        shade = colour(profile.flops)
        params, losses, tokens = np.exp(profile.logs)
        axes.plot(params, losses, "o", color=shade, ms=3.2)
        if fit.law not in LAWS:
            order = np.argsort(params)
            axes.plot(params[order], losses[order], color=shade, lw=0.6)
        sizes = np.geomspace(params.min(), params.max(), 80)
        if law := LAWS.get(fit.law):
            tokens = float(np.exp(np.log(params * tokens).mean())) / sizes
            axes.plot(sizes, law.loss(fit.parameters, sizes, tokens), color=shade, lw=0.9)
        for method, mark in (("akima", "D"), ("parabola", "x")):
            if best := profile.least(method):
                axes.plot(best.params, best.loss, mark, color=_MARK, ms=5, mfc="none", zorder=4)
    from matplotlib.lines import Line2D

    kinds = [("D", "best size, Akima"), ("x", "best size, parabola")]
    axes.legend(handles=[
        Line2D([], [], marker=m, color=_MARK, mfc="none", ls="", ms=5, label=text)
        for m, text in kinds
    ])  # fmt: skip
    log_axis(axes, "x", fit.points.params)
    axes.set_yscale("log")
    plain(axes.yaxis)
    axes.set(xlabel="parameters", ylabel="loss (nats per token)")
    colour_bar(figure, axes, mapped, "training FLOPs")
    lines = "; lines: the fitted law" if fit.law in LAWS else ""
    return figure, f"IsoFLOP profiles: the runs of each budget over their size{lines}."


def optima(fit: Fit) -> tuple[Any, str] | None:
    """A picture of the best size over the budget, or setting over size, with the power law."""
    best = fit.diagnostics.get("best")
    if not best:
        return None
    figure, axes = new(height=3.3)
    if fit.law in frontier.NAMES:
        flops, params = (np.array([row[k] for row in best]) for k in ("flops", "params"))
        axes.plot(flops, params, "D", color=_MARK, mfc="none", ms=5)
        line = np.geomspace(flops.min(), flops.max() * 10, 50)
        values = fit.parameters["N_coefficient"] * line ** fit.parameters["N_exponent"]
        axes.plot(line, values, color="#31276b")
        if "N_exponent" in fit.samples:
            drawn = (
                fit.samples["N_coefficient"][:, None] * line ** (fit.samples["N_exponent"][:, None])
            )
            low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
            axes.fill_between(line, low, high, color="#31276b", alpha=0.15, lw=0)
        axes.set(xlabel="training FLOPs", ylabel="best number of parameters")
        caption = "The best size of each budget, the power law through them, and its 95 % interval."
    else:
        size, value = (np.array([row[k] for row in best]) for k in ("params", "best"))
        axes.plot(size, value, "o", color="#31276b", ms=4)
        axes.set(xlabel="parameters", ylabel=f"best {fit.diagnostics['setting']}")
        caption = "The best value of each sweep over the size of its runs."
    axes.set(xscale="log", yscale="log")
    return figure, caption


def residuals(fit: Fit) -> tuple[Any, str] | None:
    """A picture of the law's residuals over FLOPs, and their distribution."""
    if len(fit.scatter) != len(fit.points):
        return None
    figure, (left, right) = new(2, width_ratios=[4, 1], sharey=True, height=2.9)
    colour, mapped = coloured(fit.points.params)
    left.axhline(0, color=_QUIET, lw=0.8)
    left.scatter(
        fit.points.flops, 100 * fit.scatter, c=colour(fit.points.params), s=13, lw=0, zorder=3
    )
    caption = "log(loss) - log(law) of every run, in per cent"
    if floor := fit.diagnostics.get("noise_floor"):
        two = 200 * floor["standard_deviation"]
        left.axhspan(-two, two, color="#31276b", alpha=0.1, lw=0)
        caption += "; shaded: two standard deviations of runs of equal size and tokens"
    log_axis(left, "x", fit.points.flops)
    left.set(xlabel="training FLOPs", ylabel="residual (%)")
    right.hist(100 * fit.scatter, bins=25, orientation="horizontal", color="#2c6e8f")
    right.set_xlabel("runs")
    right.grid(False)
    colour_bar(figure, right, mapped, "parameters")
    return figure, f"{caption}."


def intervals(fit: Fit) -> tuple[Any, str] | None:
    """A picture of each parameter's bootstrap, and of the exponents of the best N and D."""
    drawn = dict(fit.samples)
    drawn |= {f"{name} ~ C^": values for name, values in fit.optimal_samples.items()}
    values = dict(fit.parameters) | {f"{k} ~ C^": v for k, v in fit.optimal.items()}
    names = [n for n in values if n in drawn and np.ptp(drawn[n]) > 0]
    if "N_exponent" in names:  # which these are
        names = [n for n in names if not n.endswith("^")]
    if not names:
        return None
    import matplotlib.pyplot as plt

    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(6.9, 1.75 * rows), constrained_layout=True, squeeze=False
    )
    for axes, name in zip(grid.flat, names, strict=False):
        draws = drawn[name]
        both = interval(draws)
        assert both is not None
        wide = both[0] > 1e-3 * values[name] and both[1] > 20 * both[0]
        low, high = np.percentile(draws, [0.5, 99.5])
        bins = np.geomspace(low, high, 41) if wide else np.linspace(low, high, 41)
        axes.hist(draws, bins=bins, color="#b9cbd6")
        if wide:
            axes.set_xscale("log")
        else:
            axes.locator_params(axis="x", nbins=4)
        for end in both:
            axes.axvline(end, color="#31276b", lw=1, ls=":")
        axes.axvline(values[name], color=_MARK, lw=1.3)
        joint = "" if name.endswith("^") else " = "
        axes.set_title(f"{name}{joint}{values[name]:.4g}")
        axes.set_yticks([])
        axes.grid(False)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    return figure, (
        "The bootstrap of each parameter and of the exponents of the best N and D: estimate (line) "
        "and 95 % interval (dotted)."
    )


def held_out(fit: Fit) -> tuple[Any, str] | None:
    """A picture of predicted against true loss, of the largest budgets and of forecasts."""
    held = fit.diagnostics.get("held_out")
    sworn = [one for one in fit.diagnostics.get("forecasts", ()) if one["loss"] is not None]
    if not sworn and len(held["rows"] if held else ()) < 2:
        return None  # one point says no more than the text
    figure, axes = new(width=4.4, height=3.9)
    ends: list[float] = []
    if held:
        pairs = [(row["loss"], row["predicted"]) for row in held["rows"]]
        truth, predicted = np.array(pairs).T
        axes.plot(truth, predicted, "o", color="#2c6e8f", ms=4, label="held-out largest budgets")
        ends += [*truth, *predicted]
    for i, one in enumerate(sworn):
        both = one["interval"] or [one["predicted"]] * 2
        bars = [[one["predicted"] - both[0]], [both[1] - one["predicted"]]]
        axes.errorbar(
            [one["loss"]], [one["predicted"]], yerr=bars, fmt="D", color=_MARK, ms=5, capsize=3,
            label=None if i else "registered forecasts, 95 %",
        )  # fmt: skip
        ends += [one["loss"], *both]
    edge = 0.05 * (max(ends) - min(ends)) + 1e-3 * max(ends)
    line = [min(ends) - edge, max(ends) + edge]
    axes.plot(line, line, color=_QUIET, lw=0.8)
    axes.set(xlabel="true loss", ylabel="predicted loss", xlim=line, ylim=line, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        plain(axis, most=5, digits=4)
    axes.legend(loc="upper left")
    return figure, (
        "Prediction against truth, of runs that the prediction had not seen: the largest budgets "
        "from a fit to the others, and registered forecasts."
    )


def loss_curves(curves: Sequence[Curve]) -> tuple[Any, str]:
    """A picture of every run's training loss over tokens, with its held-out loss."""
    figure, axes = new()
    colours = ["#31276b", "#2c6e8f", "#35a07c", "#b3c843"]
    for i, curve in enumerate(curves):
        shade = colours[i * len(colours) // len(curves)]
        axes.plot(curve.tokens, curve.loss, color=shade, lw=0.8, alpha=0.7)
        if curve.held_out:
            axes.plot(*np.array(curve.held_out).T, "o", color=_MARK, ms=2.5, zorder=3)
    axes.set(xscale="log", xlabel="tokens", ylabel="loss (nats per token)")
    return figure, "Training loss of every run (lines) and its held-out loss (dots)."
