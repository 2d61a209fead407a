"""Power laws of the best runs: over budgets, or of the best value of a swept setting.

IsoFLOP profiles and the envelope of all runs give the best size and its tokens for several budgets
C, to which power laws are fitted: N = k C^a, D = m C^b (arXiv:2203.15556, approaches 1 and 2). The
law of the loss is a `posterior`. Runs from which no reliable forecast can be made are warned of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.extras.scaling.estimator import LAWS, PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law, noise_floor
from parallel3d.extras.scaling.points import (
    FLOPS_PER_ND,
    SAME_BUDGET,
    Array,
    Fit,
    Points,
    groups,
    interval,
)
from parallel3d.extras.scaling.posterior import BestLoss, back_test, best_loss, posterior
from parallel3d.extras.scaling.runs import Table, number

BEST_VALUE = "best-value"
NAMES = ("isoflop", "envelope")
WITH_FRONTIER = (PARAMETRIC.name, *NAMES)
"""Laws whose fits forecast the loss by the posterior of the best losses."""
Method = Literal["akima", "parabola"]
METHODS: dict[Method, int] = {"akima": 4, "parabola": 3}
"""Method to find the minimum of a profile -> smallest number of sizes that it needs."""
LEAST_BUDGETS = 6
LEAST_SPAN = 30


@dataclass(frozen=True)
class Power:
    """A power law: y = coefficient * product over i of x_i^exponent_i."""

    coefficient: float
    exponents: tuple[float, ...]

    def __call__(self, *x: Array | float) -> Array:
        """Return y at x."""
        powers = [np.power(v, e) for v, e in zip(x, self.exponents, strict=True)]
        return np.asarray(self.coefficient * np.prod(powers, axis=0))


def power_law(x: Sequence[Array], y: Array, log_error: Array | None = None) -> Power:
    """Fit a power law of x to y by least squares of logarithms.

    - `x`: one array [values] per exponent.
    - `y`: [values].
    - `log_error`: standard error of each log(y), for weights 1 / log_error^2.

    Raises ConfigError if the values do not determine the exponents.
    """
    weight = np.ones(len(y)) if log_error is None else 1 / log_error
    known = np.isfinite(y) & np.isfinite(weight) & (weight > 0)
    logs = np.log(np.array([v[known] for v in x]))
    middles = logs.mean(axis=1)
    design = np.column_stack([np.ones(known.sum()), (logs - middles[:, None]).T])
    weight = weight[known]
    solution, _, rank, _ = np.linalg.lstsq(
        design * weight[:, None], np.log(y[known]) * weight, rcond=None
    )
    if rank < len(solution):
        raise ConfigError(
            f"{known.sum()} values: too few or too similar for a power law with {len(x)} "
            "exponents; add runs of other sizes"
        )
    return Power(float(np.exp(solution[0] - solution[1:] @ middles)), tuple(solution[1:].tolist()))


def law_draws(x: Sequence[Array], y: Array, draws: int, seed: int) -> Array:
    """Return draws of a power law's coefficient and exponents [1 + exponents, draws].

    They are from the Student-t posterior of `power_law` with equal errors and flat priors. There
    are no rows if no degree of freedom is left.
    """
    law = power_law(x, y)
    free = len(y) - len(x) - 1
    if free < 1 or not draws:
        return np.zeros((0, draws))
    design = np.column_stack([np.ones(len(y)), *np.log(x)])
    residual = np.log(y / law(*x))
    random = np.random.default_rng(seed)
    scale = np.sqrt(residual @ residual / random.chisquare(free, draws))
    drawn = np.linalg.pinv(design) @ random.standard_normal((len(y), draws)) * scale
    drawn += np.array([[np.log(law.coefficient)], *([e] for e in law.exponents)])
    most = np.array([[300.0], *([5.0] for _ in x)])  # with these, powers of 1e30 are finite
    drawn = np.clip(drawn, -most, most)
    return np.vstack([np.exp(drawn[:1]), drawn[1:]])


def best_values(points: Points, setting: Array) -> tuple[list[JsonObject], list[str]]:
    """Return the best value of a swept setting for each size and length.

    It is the vertex of a parabola through the best value and its two neighbours. The second list
    has a text for each sweep that was left out.
    """
    best_rows = []
    left_out = []
    for params, tokens in np.unique(
        np.column_stack([points.params, points.tokens]), axis=0
    ).tolist():
        rows = np.flatnonzero((points.params == params) & (points.tokens == tokens))
        place = f"N = {params:.4g}, D = {tokens:.4g}"
        values = np.unique(setting[rows])
        losses = np.array([points.loss[rows[setting[rows] == v]].mean() for v in values])
        least = int(np.argmin(losses))
        if len(values) < 3:
            left_out.append(f"{place}: has {len(values)} values of the setting, needs 3 or more")
        elif least in (0, len(values) - 1):
            left_out.append(f"{place}: the best value, {values[least]:g}, is at the sweep's edge")
        else:
            curve = list(zip(np.log(values), losses, strict=True))
            best_rows.append(
                {
                    "params": params,
                    "tokens": tokens,
                    "best": float(np.exp(lowest(curve))),
                    "values": len(values),
                    "loss": float(losses[least]),
                }
            )
    return best_rows, left_out


def lowest(curve: Sequence[tuple[float, float]]) -> float:
    """Return where the parabola through the lowest point and its neighbours has its minimum.

    It is the point itself if it is the first or the last.
    """
    place = min(range(len(curve)), key=lambda i: curve[i][1])
    if place in (0, len(curve) - 1):
        return curve[place][0]
    (x0, y0), (x1, y1), (x2, y2) = curve[place - 1 : place + 2]
    # slopes away from the lowest
    left = (y0 - y1) / (x1 - x0)
    right = (y2 - y1) / (x2 - x1)
    if not 0 < left + right < inf:  # a neighbour diverged
        return x1
    return (left * (x1 + x2) + right * (x0 + x1)) / (2 * (left + right))


def fit_best(points: Points, setting: Array, column: str, *, draws: int, seed: int) -> Fit:
    """Fit the best value of `column` as a power law of N, of D or of both (arXiv:2503.04715).

    N and D that do not vary are left out, and so is D if it is a multiple of N. Intervals are those
    of `law_draws`. Raises ConfigError if there are fewer pairs than exponents + 2.
    """
    best, left_out = best_values(points, setting)
    columns = {"N": "params", "D": "tokens"}
    arrays = {name: np.array([row[key] for row in best]) for name, key in columns.items()}
    names = [name for name, values in arrays.items() if len(np.unique(values)) > 1]
    if len(names) == 2 and abs(np.corrcoef(np.log([*arrays.values()]))[0, 1]) > 1 - 1e-9:
        names = ["N"]  # with a constant ratio of tokens to parameters D adds nothing
    if len(best) < len(names) + 2 or not names:
        why = f"; {left_out[0]}" if left_out else ""
        raise ConfigError(
            f"--setting-column = {column}: the best value is known for {len(best)} pairs of N and "
            f"D, but {max(3, len(names) + 2)} different ones are needed{why}; widen the sweep"
        )
    x = [arrays[name] for name in names]
    y = np.array([row["best"] for row in best])
    law = power_law(x, y)
    labels = ["coefficient", *(f"{name}_exponent" for name in names)]
    scatter = np.log(y / law(*x))
    diagnostics = {
        "setting": column,
        "best": best,
        "left_out": left_out,
        "warnings": [f"left out: {text}" for text in left_out],
    }
    formula = " ".join(f"{name}^{e:.4f}" for name, e in zip(names, law.exponents, strict=True))
    return Fit(
        law=BEST_VALUE,
        estimator=f"least squares of log(best {column}): {law.coefficient:.4g} {formula}; "
        "Student-t intervals",
        parameters=dict(zip(labels, (law.coefficient, *law.exponents), strict=True)),
        objective=float(scatter @ scatter),
        points=points,
        optimal={},
        samples=dict(zip(labels, law_draws(x, y, draws, seed), strict=False)),
        scatter=scatter,
        diagnostics=diagnostics,
    )


class Best(NamedTuple):
    """The best run of a budget; `sizes` is the number of sizes that were compared."""

    flops: float
    params: float
    tokens: float
    loss: float
    sizes: int


@dataclass(frozen=True)
class Profile:
    """The runs of one budget."""

    flops: float
    size: npt.NDArray[np.intp]  # [runs], index of the size of each
    logs: Array  # [3, runs]: log of parameters, loss and tokens

    def least(self, method: Method) -> Best | None:
        """Return the best size, or None if there are no sizes on both sides of it.

        - `method`: "parabola" fits one to log(loss) over log(N), "akima" interpolates it. Runs of
          equal size are averaged.
        """
        counts = np.bincount(self.size)
        if len(counts) < METHODS[method]:
            return None
        x, y, z = (np.bincount(self.size, log) / counts for log in self.logs)
        vertex = _parabola(x, y) if method == "parabola" else _akima_least(x, y)
        if vertex is None:
            return None
        params, loss = np.exp(vertex)
        tokens = float(np.exp(np.interp(vertex[0], x, z)))
        return Best(self.flops, float(params), tokens, float(loss), len(counts))


def profiles(points: Points) -> list[Profile]:
    """Return a profile for each budget with at least three sizes, in ascending order."""
    profiles = []
    for rows in groups(points.flops, SAME_BUDGET):
        sizes = groups(points.params[rows])
        if len(sizes) >= 3:
            label = np.zeros(len(rows), dtype=np.intp)
            for i, members in enumerate(sizes):
                label[members] = i
            columns = (points.params, points.loss, points.tokens)
            logs = np.log([column[rows] for column in columns])
            flops = float(np.exp(np.log(points.flops[rows]).mean()))
            profiles.append(Profile(flops, label, logs))
    return profiles


def _parabola(x: Array, y: Array) -> tuple[float, float] | None:
    middle = x.mean()
    square, slope, offset = np.polyfit(x - middle, y, 2)
    if square <= 0 or not x[0] < (at := middle - slope / (2 * square)) < x[-1]:
        return None
    return float(at), float(offset - slope**2 / (4 * square))


def _akima_least(x: Array, y: Array) -> tuple[float, float] | None:
    """Return the lowest stationary point of an Akima interpolation if it is below both ends."""
    from scipy.interpolate import Akima1DInterpolator  # scipy comes with the extra `scaling`

    curve = Akima1DInterpolator(x, y)
    turns = curve.derivative().roots(extrapolate=False)
    turns = turns[np.isfinite(turns)]  # a constant piece has a NaN among its roots
    values = curve(turns)
    if not len(turns) or not values.min() < min(y[0], y[-1]):
        return None
    return float(turns[np.argmin(values)]), float(values.min())


def envelope(points: Points) -> list[Best]:
    """Return the runs with a lower loss than every cheaper run; the cheapest run is left out.

    Only final losses count: with a decaying schedule, a loss within a run is not that of a shorter
    run.
    """
    order = np.lexsort((points.loss, points.flops))
    before = np.minimum.accumulate(points.loss[order])[:-1]
    rows = order[1:][points.loss[order][1:] < before]
    columns = np.column_stack((points.flops, points.params, points.tokens, points.loss))[rows]
    return [
        Best(flops, params, tokens, loss, 1) for flops, params, tokens, loss in columns.tolist()
    ]


def exponents(bests: Sequence[Best]) -> dict[str, float]:
    """Fit N and D as powers of C, by least squares of logarithms."""
    flops, *columns = np.array(bests).T[:3]
    laws = {name: power_law([flops], column) for name, column in zip("ND", columns, strict=True)}
    values = {}
    for name, law in laws.items():
        values[f"{name}_coefficient"] = law.coefficient
        values[f"{name}_exponent"] = law.exponents[0]
    return values


def losses_of(points: Points, law: str) -> tuple[list[BestLoss], list[float]]:
    """Return the best losses that a law's fit forecasts from, and the budgets left out [FLOPs].

    Budgets of three sizes or more count, unless their best one is the smallest or the largest.
    """
    if law == "envelope":
        return [BestLoss(best.flops, best.loss) for best in envelope(points)], []
    all_profiles = profiles(points) if law in WITH_FRONTIER else []
    bests = [best_loss(profile.flops, *profile.logs[:2]) for profile in all_profiles]
    at_edge = [p.flops for p, best in zip(all_profiles, bests, strict=True) if not best]
    return [best for best in bests if best], at_edge


def fit_frontier(
    points: Points, kind: str, method: Method, estimator: Estimator, *, draws: int, seed: int
) -> Fit:
    """Fit the laws of the best runs, with intervals by `law_draws`; `kind` is one of NAMES.

    Raises ConfigError if fewer than two budgets have their minimum within their sizes.
    """
    all_profiles = profiles(points)
    bests, left_out = _bests(points, kind, method, all_profiles)
    if len(bests) < 2 or len({b.flops for b in bests}) < 2:
        why = f"; {left_out[0]}" if left_out else ""
        raise ConfigError(
            f"{len(points)} points: {len(bests)} budgets have sizes on both sides of the best one; "
            f"the {kind} law needs 2 or more{why}; add runs"
        )
    values = exponents(bests)
    losses = losses_of(points, kind)[0]
    flops, params, tokens = np.array(bests).T[:3]
    drawn = [
        *law_draws([flops], params, draws, seed),
        *law_draws([flops], tokens, draws, seed),
    ]
    samples = dict(zip(values, drawn, strict=False))
    exponent_draws = {name: samples[f"{name}_exponent"] for name in "ND"} if samples else {}
    diagnostics: dict[str, Any] = {
        "best": [best._asdict() for best in bests],
        "left_out": left_out,
        "noise_floor": noise_floor(points),
        "held_out": next(iter(back_test(losses)), None),
        "surface": surface(points, estimator),
        "warnings": [f"left out: {text}" for text in left_out],
    }
    if kind == "isoflop":
        bests_by_method = {name: _bests(points, kind, name, all_profiles)[0] for name in METHODS}
        diagnostics["methods"] = {
            name: exponents(method_bests)["N_exponent"] if len(method_bests) > 1 else None
            for name, method_bests in bests_by_method.items()
        }
        diagnostics["parabola_bias"] = parabola_bias(points, diagnostics["surface"])
    method_name = {"akima": "Akima interpolation", "parabola": "a parabola"}[method]
    description = (
        f"{method_name} of log(loss) over log(N)" if kind == "isoflop" else "the best runs"
    )
    residual = np.log(params / (values["N_coefficient"] * flops ** values["N_exponent"]))
    scatter = np.zeros(0)
    objective = float(np.sum(residual**2))
    if law := posterior(losses):
        draws_of = law.parameters()
        values |= {name: float(np.median(draws)) for name, draws in draws_of.items()}
        samples |= draws_of if samples else {}
        scatter = np.log([best.loss / np.median(law.loss(best.flops)) for best in losses])
    return Fit(
        law=kind,
        estimator=f"{description}, least squares of logarithms, Student-t intervals; "
        "loss by its posterior",
        parameters=values,
        objective=objective,
        points=points,
        optimal={"N": values["N_exponent"], "D": values["D_exponent"]},
        samples=samples,
        optimal_samples=exponent_draws,
        scatter=scatter,
        diagnostics=diagnostics,
    )


def _bests(
    points: Points, kind: str, method: Method, profiles: Sequence[Profile]
) -> tuple[list[Best], list[str]]:
    """Return the best run of each budget, and a text for each budget that has none."""
    if kind == "envelope":
        return envelope(points), []
    found = [(profile, profile.least(method)) for profile in profiles]
    left_out = [
        f"budget of {profile.flops:.3g} FLOPs: its {int(profile.size.max()) + 1} sizes do not "
        "bracket a minimum of the loss"
        for profile, best in found
        if not best
    ]
    return [best for _, best in found if best], left_out


def surface(points: Points, estimator: Estimator) -> dict[str, float] | None:
    """Return the parametric law of the points; None if they do not determine it."""
    try:
        return dict(fit_law(points, PARAMETRIC, estimator, draws=0, brief=True).parameters)
    except ConfigError:
        return None


def parabola_bias(points: Points, law: Mapping[str, float] | None) -> dict[str, float] | None:
    """Estimate the bias of the parabola method on these sizes.

    If alpha and beta differ, the vertex of a parabola is not at the minimum of the loss. To measure
    by how much, the parametric `law` of the points is evaluated at them without noise. Returns None
    without a law.
    """
    if law is None:
        return None
    clean = replace(points, loss=PARAMETRIC.loss(law, points.params, points.tokens))
    bests, _ = _bests(clean, "isoflop", "parabola", profiles(clean))
    if len(bests) < 2:
        return None
    sizes = [b.params / float(PARAMETRIC.best(law, b.flops)[0]) for b in bests]
    return {
        "N_exponent": exponents(bests)["N_exponent"] - float(PARAMETRIC.optimal(law)[0]),
        "params_ratio": float(np.exp(np.mean(np.log(sizes)))),
    }


def with_checks(fit: Fit, table: Table) -> Fit:
    """Return the fit with its frontier, the frontier's back-test, and warnings about its runs.

    - `table`: the table of the fitted runs.
    """
    losses, at_edge = losses_of(fit.points, fit.law)
    warnings = _units(fit.points) + _design(fit, len(losses), at_edge, table)
    checks: JsonObject = {
        "warnings": [*fit.diagnostics["warnings"], *warnings],
        "forecast_warnings": warnings,
        "frontier": None,
    }
    if law := posterior(losses):
        draws = law.parameters()
        checks["frontier"] = {
            "budgets": len(losses),
            "distant_runs": sum(best.distant for best in losses),
            "parameters": {name: float(np.median(values)) for name, values in draws.items()},
            "intervals": {name: interval(values) for name, values in draws.items()},
            "back_test": back_test(losses),
        }
    return replace(fit, diagnostics={**fit.diagnostics, **checks})


def _design(fit: Fit, budgets: int, at_edge: Sequence[float], table: Table) -> list[str]:
    flops = fit.points.flops
    sizes = len(groups(fit.points.params))
    rates = [
        {number(row.get(name)) for row in table.rows}
        for name in ("lr", "learning_rate", "peak_lr", "max_lr")
    ]
    is_mup = {row.get("parametrization") for row in table.rows} == {"mup"}
    is_one = sizes > 1 and not is_mup and any(len(rate) == 1 and None not in rate for rate in rates)
    edges = ", ".join(f"{edge:.3g}" for edge in at_edge)
    texts = {
        f"only {budgets} budgets have their best size between others; forecasts need "
        f"{LEAST_BUDGETS} or more: add budgets": fit.law in WITH_FRONTIER
        and budgets < LEAST_BUDGETS,
        f"the budgets span a factor of {flops.max() / flops.min():.3g} in FLOPs; forecasts need "
        f"{LEAST_SPAN} or more: add smaller budgets": flops.max() < LEAST_SPAN * flops.min(),
        f"the best size of {edges} FLOPs is the smallest or the largest; these budgets do not "
        "count for forecasts: add sizes beyond it": bool(at_edge),
        f"all {sizes} sizes have the same learning rate, which is not the best for each: tune it "
        "by size, or train with muP": is_one,
    }
    return [text for text, is_true in texts.items() if is_true and fit.law in (*LAWS, *NAMES)]


def _units(points: Points) -> list[str]:
    """Return signs that losses are not in nats, and that a column is in another unit."""
    loss = points.loss.min()
    flops = points.flops.max()
    remedy = "write single parameters, tokens and FLOPs in every row"
    texts = {
        f"the largest run has {flops:.3g} FLOPs: these look like units of 1e18; {remedy}": flops
        < 1e9
    }
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
        }
    signs = [text for text, is_true in texts.items() if is_true][:1]  # one mistake causes several
    # The best run of a ladder is below 6 nats per token, and most perplexities are above.
    if loss > 6.0:
        signs.insert(
            0, f"the lowest loss is {loss:.3g}: these look like perplexities; use their logarithms"
        )
    return signs
