"""Report of a fit: one HTML page with its pictures in it, for a paper's appendix.

The checklist is that of arXiv:2502.18969: what a reader must know to fit the same again.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from parallel3d.base.atomic import replaced
from parallel3d.scaling.estimator import EXPONENTS
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.plots import pictures
from parallel3d.scaling.result import LEVEL, Fit, interval
from parallel3d.scaling.runs import Curve
from parallel3d.scaling.style import DOTS

PAGE, PICTURES = "report.html", "report"
_CSS = """
body { font: 15px/1.5 Georgia, serif; color: #222; max-width: 46rem; margin: 2.5rem auto;
  padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; margin: .8rem 0; font-size: .92em; width: 100% }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; vertical-align: top;
  border-bottom: 1px solid #e4e4e4 }
td:first-child { min-width: 9.5rem }
th { font-weight: 600; border-bottom: 1px solid #888 } td.n, th.n { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap }
figure { margin: 1.6rem 0; break-inside: avoid } img { max-width: 100% }
figcaption { font-size: .88em; color: #444 } .warn { border-left: 3px solid #c0392b;
  padding-left: .8rem } code { font-size: .88em; overflow-wrap: anywhere } .q { color: #666 }
"""
_NOT_KNOWN = (
    "learning-rate schedule and its end", "warm-up", "batch size", "learning rate", "seeds",
    "tokenizer and vocabulary", "training data", "architecture",
)  # fmt: skip


def write(
    fit: Fit, folder: Path, *, title: str, curves: Sequence[Curve] = (),
    settings: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write report.html, and its pictures beside it in report/; gives the page's path.

    `settings`: how the runs were trained, where that is known.
    """
    drawn = pictures(fit, curves)
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for name, (image, _) in drawn.items():
        with replaced(folder / PICTURES / f"{name}.png") as partial:
            partial.write_bytes(image)
    path = folder / PAGE
    with replaced(path) as partial:
        partial.write_text(page(fit, title, drawn, settings), encoding="utf-8")
    return path


def page(
    fit: Fit, title: str, drawn: Mapping[str, tuple[bytes, str]],
    settings: Mapping[str, str] | None,
) -> str:  # fmt: skip
    """The report as HTML; `drawn`: PNG and caption of each picture."""
    found = fit.diagnostics
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_summary(fit))}</p>",
        *(f"<p class=warn>{escape(text)}.</p>" for text in found["warnings"]),
        "<h2>Parameters</h2>", _parameters(fit),
        _forecasts(found.get("forecasts", ())), _held_out(found.get("held_out")),
        "<h2>Pictures</h2>", *(_figure(name, *made) for name, made in drawn.items()),
        "<h2>Choices</h2>",
        _table(("", ""), _choices(fit, settings), numbers=()),
        "<h2>Rows that were left out</h2>",
        _table(("row", "why"), fit.dropped, numbers=()) if fit.dropped else "<p>None.</p>",
    ]  # fmt: skip
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_CSS}</style><body>{''.join(parts)}</body></html>\n"
    )


def _summary(fit: Fit) -> str:
    points, law = fit.points, LAWS.get(fit.law)
    formula = f", {law.formula} ({law.source})" if law else ""
    low, high = points.flops.min(), points.flops.max()
    text = f"The {fit.law} law{formula}, fitted to {len(points)} runs of {low:.3g} to {high:.3g} "
    text += f"FLOPs, {points.params.min():.3g} to {points.params.max():.3g} parameters and "
    text += f"{points.tokens.min():.3g} to {points.tokens.max():.3g} tokens."
    if rest := fit.diagnostics.get("residuals"):
        text += f" It leaves residuals of {rest['rms']:.2%} (rms of log loss)"
        floor = fit.diagnostics.get("noise_floor")
        deviation = floor["standard_deviation"] if floor else 0
        text += f"; runs of equal size and tokens scatter by {deviation:.2%}." * bool(floor)
        text += "." * (not floor)
    return text


def _parameters(fit: Fit) -> str:
    errors, both = fit.standard_errors, fit.intervals
    rows = [
        (name, f"{value:.6g}", _short(errors[name]), _range(both[name]))
        for name, value in fit.parameters.items()
    ]
    for name, value in fit.optimal.items():
        if f"{name}_exponent" in fit.parameters:
            continue
        rows.append((f"best {name} grows as C^", f"{value:.4f}", "",
                     _range(interval(fit.optimal_samples.get(name)))))  # fmt: skip
    for name, other in fit.diagnostics.get("n_compared", {}).items():
        if name != fit.diagnostics["n_counts"] and "N" in other["optimal_exponents"]:
            exponent = other["optimal_exponents"]["N"]
            rows.append((f"best N, N counted as {name}, as C^", f"{exponent:.4f}", "", ""))
    for method, value in fit.diagnostics.get("methods", {}).items():
        if value is not None:
            rows.append((f"best N by {method}, as C^", f"{value:.4f}", "", ""))
    if bias := fit.diagnostics.get("parabola_bias"):
        said = f"{bias['N_exponent']:+.4f}"
        rows.append(("of which a parabola's bias on these sizes", said, "", ""))
    return _table(("", "estimate", "standard error", f"{LEVEL} %"), rows, numbers=(1, 2, 3))


def _forecasts(made: Sequence[Mapping[str, Any]]) -> str:
    if not made:
        return ""
    held = {True: "yes", False: "no", None: ""}
    rows = [
        (
            one["registered_at"][:16].replace("T", " "),
            f"{one['flops']:.3g}", f"{one['beyond']:.3g}", f"{one['predicted']:.4f}",
            _range(one["interval"]),
            "no run yet" if one["loss"] is None else f"{one['loss']:.4f}",
            "" if one["error"] is None else f"{one['error']:+.2%}", held[one["held"]],
        )
        for one in made
    ]  # fmt: skip
    heads = (
        "registered, UTC",
        "FLOPs",
        "× fitted",
        "forecast",
        f"{LEVEL} %",
        "truth",
        "error",
        "held",
    )
    return f"<h2>Registered forecasts</h2>{_table(heads, rows, numbers=range(1, 7))}"


def _held_out(held: Mapping[str, Any] | None) -> str:
    if not held:
        return ""
    text = (
        f"The largest budgets, from {held['flops'][0]:.3g} FLOPs ({held['points']} of them), "
        f"predicted by a fit to the other {held['fitted_on']} (up to "
        f"{held['fitted_flops'][1]:.3g} FLOPs): mean absolute error {held['mean_error']:.2%}, "
        f"bias {held['bias']:+.2%}, worst {held['worst_error']:.2%}."
    )
    return f"<h2>Held-out budgets</h2><p>{escape(text)}</p>"


def _figure(name: str, image: bytes, caption: str) -> str:
    data = base64.b64encode(image).decode()
    # A PNG's width in dots stands in its header; a CSS inch has 96.
    width = round(int.from_bytes(image[16:20], "big") * 96 / DOTS)
    return (
        f'<figure id="{name}"><img width="{width}" alt="{escape(caption)}" '
        f'src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _choices(fit: Fit, settings: Mapping[str, str] | None) -> list[tuple[str, str]]:
    found, columns = fit.diagnostics, fit.points.columns
    others = [name for name in found.get("n_compared", {}) if name != found["n_counts"]]
    counted = f"{found.get('n_counts', columns.get('params', ''))}"
    rows = [
        ("N counts", counted + (f"; compared with {', '.join(others)}" if others else "")),
        ("D", columns.get("tokens", "C / 6N") + _repeats(fit)),
        ("C", columns.get("flops", "6 N D")),
        ("loss", columns.get("loss", "loss") + ", nats per token; standard error: "
         + columns.get("standard_error", "not known")),
        ("objective", fit.estimator),
    ]  # fmt: skip
    if starts := found.get("starts"):
        rows += [
            ("search", f"{starts['number']} starts, coefficients by non-negative least squares; "
             f"{starts['reached']} reached the optimum"),
            ("bounds", f"coefficients not below 0, exponents {EXPONENTS[0]:g} to {EXPONENTS[1]:g}; "
             f"hit: {', '.join(found['bounds_hit']) or 'none'}"),
            ("minimiser", "L-BFGS-B, exact gradients, until the objective changes by less than 1e-15 of "
             f"itself; converged: {'yes' if found['converged'] else 'no'}"),
        ]  # fmt: skip
        if found.get("condition"):
            rows.append(("condition", f"{found['condition']:.3g} of the normalised gradients"))
    if strap := found.get("bootstrap"):
        rows.append(("intervals", f"percentiles of {strap['draws']} resamples of the runs, seed "
                     f"{strap['seed']}; {strap['redrawn']} drawn again"))  # fmt: skip
    floor = found.get("noise_floor")
    rows += [
        (
            "seeds",
            f"{floor['runs']} runs repeat in {floor['groups']} groups" if floor else "no repeats",
        ),
        ("runs", f"{len(fit.points)} fitted, {len(fit.dropped)} left out (below)"),
        ("data", f"{found.get('table', '')}, SHA-256 of the fitted points {fit.points.digest}"),
    ]
    if conditions := found.get("where"):
        rows.append(("rows taken", ", ".join(conditions)))
    if settings:
        return rows + list(settings.items())
    return [*rows, ("not in the table; say it beside this page", ", ".join(_NOT_KNOWN))]


def _repeats(fit: Fit) -> str:
    if fit.points.unique is None:
        return "; unique tokens not known"
    most = float((fit.points.tokens / fit.points.unique).max())
    return f"; up to {most:.3g} times the unique tokens"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> str:
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        made = (
            f"<{tag}{' class=n' if i in right else ''}>{escape(str(cell))}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    top = line(heads, "th") if any(heads) else ""
    return f"<table>{top}{''.join(line(row, 'td') for row in rows)}</table>"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _range(both: Sequence[float] | None) -> str:
    return "" if both is None else f"{both[0]:.5g} to {both[1]:.5g}"
