"""Plots of a fit, each a PNG as bytes."""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from parallel3d.report.page import LINE, MARK, png, style
from parallel3d.scaling import frontier
from parallel3d.scaling.frontier import profiles
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.points import FLOPS_PER_ND, groups
from parallel3d.scaling.posterior import posterior
from parallel3d.scaling.result import Fit
from parallel3d.scaling.runs import Curve

if TYPE_CHECKING:  # of an extra
    from matplotlib.figure import Figure

_T = TypeVar("_T")
_MOST = 9  # lines of one plot that can be told apart
_LOSS = "loss (nats per token)"
Picture = tuple["Figure", str]
"""A figure and its caption."""


def pictures(fit: Fit, curves: Sequence[Curve] = ()) -> dict[str, tuple[bytes, str]]:
    """Draw every plot that the fit has data for; return name -> (PNG, caption)."""
    with style() as plt:
        drawn = {
            "loss": loss(plt, fit), "isoflop": isoflop(plt, fit), "optima": optima(plt, fit),
            "residuals": residuals(plt, fit), "held_out": held_out(plt, fit),
            "curves": loss_curves(plt, curves),
        }  # fmt: skip
        return {name: (png(plt, plot[0]), plot[1]) for name, plot in drawn.items() if plot}


def _some(items: Sequence[_T]) -> list[_T]:
    """Return at most _MOST of the items, evenly spaced and including both ends."""
    places = np.linspace(0, len(items) - 1, min(len(items), _MOST)).round().astype(int)
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


def loss_curves(plt: ModuleType, curves: Sequence[Curve]) -> Picture | None:
    """Draw the training loss of every run over its tokens, with its held-out loss."""
    if not curves:
        return None
    figure, axes = plt.subplots()
    for shade, curve in zip(np.linspace(0, 0.9, len(curves)), curves, strict=True):
        axes.plot(curve.tokens, curve.loss, color=plt.cm.viridis(shade), lw=0.8, alpha=0.7)
        axes.plot(*np.reshape(curve.held_out, (-1, 2)).T, "o", color=MARK, ms=2.5, zorder=3)
    axes.set(xscale="log", xlabel="tokens", ylabel=_LOSS)
    return figure, "Training loss of every run (lines) and its held-out loss (dots)."
