"""Warn of runs from which no reliable forecast can be made."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parallel3d.scaling.frontier import NAMES, WITH_FRONTIER, losses_of
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.points import FLOPS_PER_ND, Points, groups
from parallel3d.scaling.posterior import back_test, posterior
from parallel3d.scaling.result import Fit, interval
from parallel3d.scaling.run_table import Table, number

LEAST_BUDGETS, LEAST_SPAN = 6, 30
HIGHEST_LOSS = 6.0  # nats per token; the best run of a ladder is below, most perplexities above
LEAST_FLOPS = 1e9  # of the largest run; 1,000 parameters on 100,000 tokens have 6e11
_RATES = ("lr", "learning_rate", "peak_lr", "max_lr")


def with_checks(fit: Fit, table: Table) -> Fit:
    """Return the fit with its frontier, the frontier's back-test, and warnings about its runs.

    table: the table of the fitted runs.
    """
    losses, at_edge = losses_of(fit.points, fit.law)
    warnings = _units(fit.points) + _design(fit, len(losses), at_edge, table)
    checks: dict[str, object] = {
        "warnings": [*fit.diagnostics["warnings"], *warnings], "forecast_warnings": warnings,
        "frontier": None,
    }  # fmt: skip
    if law := posterior(losses):
        draws = law.parameters()
        checks["frontier"] = {
            "budgets": len(losses), "distant_runs": sum(best.distant for best in losses),
            "parameters": {name: float(np.median(values)) for name, values in draws.items()},
            "intervals": {name: interval(values) for name, values in draws.items()},
            "back_test": back_test(losses),
        }  # fmt: skip
    return replace(fit, diagnostics={**fit.diagnostics, **checks})


def _design(fit: Fit, budgets: int, at_edge: Sequence[float], table: Table) -> list[str]:
    flops, sizes = fit.points.flops, len(groups(fit.points.params))
    rates = [{number(row.get(name)) for row in table.rows} for name in _RATES]
    is_mup = {row.get("parametrization") for row in table.rows} == {"mup"}
    is_one = sizes > 1 and not is_mup and any(len(rate) == 1 and None not in rate for rate in rates)
    edges = ", ".join(f"{edge:.3g}" for edge in at_edge)
    texts = {
        f"only {budgets} budgets have their best size between others; forecasts need "
        f"{LEAST_BUDGETS} or more: add budgets":
            fit.law in WITH_FRONTIER and budgets < LEAST_BUDGETS,
        f"the budgets span a factor of {flops.max() / flops.min():.3g} in FLOPs; forecasts need "
        f"{LEAST_SPAN} or more: add smaller budgets": flops.max() < LEAST_SPAN * flops.min(),
        f"the best size of {edges} FLOPs is the smallest or the largest; these budgets do not "
        "count for forecasts: add sizes beyond it": bool(at_edge),
        f"all {sizes} sizes have the same learning rate, which is not the best for each: tune it "
        "by size, or train with muP": is_one,
    }  # fmt: skip
    return [text for text, is_true in texts.items() if is_true and fit.law in (*LAWS, *NAMES)]


def _units(points: Points) -> list[str]:
    """Return signs that losses are not in nats, and that a column is in another unit."""
    loss, flops = points.loss.min(), points.flops.max()
    remedy = "write single parameters, tokens and FLOPs in every row"
    perplexity = (
        f"the lowest loss is {loss:.3g}: these look like perplexities; use their logarithms"
    )
    texts = {f"the largest run has {flops:.3g} FLOPs: these look like units of 1e18; {remedy}":
             flops < LEAST_FLOPS}  # fmt: skip
    counted = points.flops / (FLOPS_PER_ND * points.params * points.tokens)
    for name, values, low, high, most in (
        ("tokens per parameter", points.tokens / points.params, 1e-3, 1e6, 1e3),
        ("FLOPs / 6ND", counted, 0.1, 10, 10),
    ):
        order = np.argsort(values)
        steps = np.append(1, values[order][1:] / values[order][:-1])  # wide ladders have small ones
        pair = order[max(0, np.argmax(steps) - 1) :][:2]
        rows = " and ".join(f"{values[i]:.2g} in {points.names[i]}" for i in pair)
        texts |= {
            f"{name}: {rows}, nothing between: a column mixes units; {remedy}": steps.max() > most,
            f"{name}: {np.median(values):.2g} in the median run: a column has another unit; "
            f"{remedy}": not low < np.median(values) < high,
        }  # fmt: skip
    first = [text for text, is_true in texts.items() if is_true][:1]  # one mistake causes several
    return [perplexity] * int(loss > HIGHEST_LOSS) + first
