"""A fit and a forecast as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.scaling.forecast import ONE_RUN, Forecast
from parallel3d.scaling.result import StoredFit

_MOST = 12  # dropped rows that are printed; the rest are counted


def show_fit(report: Mapping[str, Any], out: Console) -> None:
    """Print a fit: the figures that `--json` has."""
    found = report["diagnostics"]
    terminal.say(out, f"{report['law']} law, {report['points']} points; {report['estimator']}")
    rows = [
        (name, f"{value:.6g}", _number(report["standard_errors"][name]),
         _range(report["intervals"][name]))
        for name, value in report["parameters"].items()
    ]  # fmt: skip
    spread = found.get("optimal_exponents_intervals", {})
    for name, value in report["optimal_exponents"].items():
        rows.append((f"{name} ~ C^", f"{value:.4f}", "", _range(spread.get(name))))
    columns = (Column("", right=False), Column("value"), Column("std. error"), Column("95 %"))
    terminal.show(out, columns, rows)
    for line in _diagnosed(found):
        terminal.say(out, line)
    for one in found["forecasts"]:
        terminal.say(out, _judged(one), "  ")
    dropped = report["dropped"]
    for gone in dropped[:_MOST]:
        terminal.say(out, f"dropped {gone['row']}: {gone['reason']}", "  ")
    if len(dropped) > _MOST:
        terminal.say(out, f"and {len(dropped) - _MOST} more rows, which fit.json lists")
    for warning in found["warnings"]:
        terminal.say(out, f"WARNING: {warning}", "  ")


def show_forecast(made: Forecast, fit: StoredFit, out: Console) -> None:
    """Print a forecast, and how far it reaches beyond the runs that it is made from."""
    spread = made.intervals
    terminal.say(out, f"{fit.law} law of {len(fit.flops)} runs; {made.flops:.4g} FLOPs")
    rows = [
        ("N", f"{made.params:.4g}", _range(spread["params"])),
        ("D", f"{made.tokens:.4g}", _range(spread["tokens"])),
    ]
    if made.loss is not None:
        rows.append(("loss", f"{made.loss:.4f}", _range(spread["loss"])))
        rows.append(("loss of one run", "", _range(spread[ONE_RUN])))
    columns = (Column("", right=False), Column("value"), Column("95 %"))
    terminal.show(out, columns, rows)
    if made.loss is None:
        terminal.say(out, "WARNING: no loss: the fit had too few budgets for a law of it", "  ")
    elif spread["loss"] is None:
        terminal.say(out, "WARNING: no intervals: the fit has no bootstrap", "  ")
    terminal.say(out, f"{made.beyond:.3g} times the FLOPs of the largest fitted run")


def _judged(one: Mapping[str, Any]) -> str:
    said = f"forecast of {one['registered_at']}, {one['flops']:.3g} FLOPs: {one['predicted']:.4f}"
    if one["interval"]:
        said += f" ({_range(one['interval'])})"
    if one["loss"] is None:
        return f"{said}; its run is not here yet"
    held = {True: "the interval held", False: "the interval DID NOT HOLD", None: "no interval"}
    return (
        f"{said}; {one['row']} came to {one['loss']:.4f}: off by {one['error']:+.2%}, "
        + (held[one["held"]])
    )


def _diagnosed(found: Mapping[str, Any]) -> Sequence[str]:
    lines = []
    if "starts" in found:
        starts, hit = found["starts"], ", ".join(found["bounds_hit"]) or "none"
        lines.append(
            f"{starts['reached']} of {starts['number']} starts reached the optimum; bounds hit: "
            f"{hit}; condition {found['condition']:.3g}"
        )
    if found.get("bootstrap"):
        strap = found["bootstrap"]
        lines.append(
            f"bootstrap: {strap['draws']} draws of the runs, seed {strap['seed']}, percentiles"
        )
    if found.get("residuals"):
        rest = found["residuals"]
        lines.append(
            f"residuals of log(loss): rms {rest['rms']:.2%}, worst {rest['worst']:+.2%} "
            f"({rest['worst_row']})"
        )
    if floor := found.get("noise_floor"):
        lines.append(
            f"noise floor: {floor['standard_deviation']:.2%}, of {floor['runs']} runs of sizes and "
            "tokens that others have, too"
        )
    if held := found.get("held_out"):
        lines.append(
            f"held out: what has {held['flops'][0]:.3g} FLOPs and more ({held['points']} of them), "
            f"predicted by the rest within {held['mean_error']:.2%} (mean), "
            f"{held['worst_error']:.2%} (worst)"
        )
    if methods := found.get("methods"):
        both = (f"{k} {'none' if v is None else format(v, '.4f')}" for k, v in methods.items())
        lines.append(f"N ~ C^ by method: {', '.join(both)}")
    if bias := found.get("parabola_bias"):
        lines.append(
            f"a parabola's bias on these sizes, of the parametric law fitted to them: exponent "
            f"{bias['N_exponent']:+.4f}, size {bias['params_ratio'] - 1:+.1%}"
        )
    for name, other in found.get("n_compared", {}).items():
        grows = other["optimal_exponents"].get("N")
        if grows is not None and len(found["n_compared"]) > 1:
            lines.append(f"N counted as {name}: N ~ C^{grows:.4f}")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _range(both: Sequence[float] | None) -> str:
    return "" if both is None else f"{both[0]:.5g} to {both[1]:.5g}"
