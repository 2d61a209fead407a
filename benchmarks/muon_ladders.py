"""How many tokens Muon saves at equal held-out loss: two ladders of the same runs, compared.

    python benchmarks/muon_ladders.py runs/ladder-cpu-adamw runs/ladder-cpu-muon [--draw FILE.png]

Fits L = E + A / N^a + B / (s D)^b to the runs that have finished in both ladders, with s = 1 for
the first: a run of the second has the loss of a run of the first on s times its tokens. The
interval is that of 1,000 resamples of the pairs of runs. Also prints the loss of each pair.
"""

import argparse
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from parallel3d.extras.report.page import png, style
from parallel3d.extras.scaling.points import Points, points_of
from parallel3d.extras.scaling.runs import read_runs

DRAWS = 1000


def fit(params: np.ndarray, tokens: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return log E, log A, a, log B, b, log s of the least Huber losses of log(loss) beyond 1 %.

    params, tokens: [pairs], in units of their geometric means. losses: [2, pairs].
    """

    def residuals(x: np.ndarray) -> np.ndarray:
        size = np.exp(x[1] - x[2] * np.log(params))
        data = np.exp(x[3] - x[4] * (np.log(tokens) + np.array([[0.0], [x[5]]])))
        # Weak priors keep E, a and b from running off: few runs determine them. s needs none.
        prior = [0.05 * (x[0] - np.log(1.5)), 0.05 * (x[2] - 0.3) / 0.3, 0.05 * (x[4] - 0.3) / 0.3]
        return np.append((np.log(np.exp(x[0]) + size + data) - np.log(losses)).ravel(), prior)

    start = np.array([np.log(1.5), np.log(0.7), 0.3, np.log(0.7), 0.3, 0.0])
    return least_squares(residuals, start, loss="huber", f_scale=0.01).x


def paired(folders: list[Path]) -> tuple[Points, np.ndarray]:
    """Return the first ladder's runs that both have, and the losses of both [2, pairs]."""
    first, second = (points_of(read_runs(folder), {}) for folder in folders)
    names = [name for name in first.names if name in second.names]
    rows = [[points.names.index(name) for name in names] for points in (first, second)]
    if not np.allclose(first.tokens[rows[0]], second.tokens[rows[1]], rtol=0.01):
        raise SystemExit("the ladders have other tokens; give two ladders of the same runs")
    return first.take(np.array(rows[0])), np.array([first.loss[rows[0]], second.loss[rows[1]]])


def main() -> None:
    """Fit, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ladders", type=Path, nargs=2)
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    points, losses = paired(args.ladders)
    scale = [np.exp(np.log(x).mean()) for x in (points.params, points.tokens)]
    params = points.params / scale[0]
    tokens = points.tokens / scale[1]
    for name, one, other in zip(points.names, *losses, strict=True):
        print(f"{name:16} {one:.4f} {other:.4f} {other - one:+.4f}")
    best = fit(params, tokens, losses)
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        rows = random.integers(len(params), size=len(params))
        drawn.append(np.exp(fit(params[rows], tokens[rows], losses[:, rows])[5]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    found = f"{np.exp(best[5]):.2f} (95 %: {low:.2f} to {high:.2f})"
    print(f"tokens of the first for the loss of the second, over its own: {found}")
    if args.draw:
        args.draw.write_bytes(draw(points, losses, found))


def draw(points: Points, losses: np.ndarray, found: str) -> bytes:
    """Return a PNG: loss over tokens, a colour for each size, a marker for each ladder."""
    with style() as plt:
        figure, axes = plt.subplots(figsize=(5.4, 3.4), constrained_layout=True)
        sizes = sorted(set(points.params))
        for size, colour in zip(
            sizes, plt.cm.viridis(np.linspace(0, 0.85, len(sizes))), strict=True
        ):
            rows = np.flatnonzero(points.params == size)
            rows = rows[np.argsort(points.tokens[rows])]
            for loss, line, name in zip(losses, ("o-", "s--"), ("AdamW", "Muon"), strict=True):
                label = f"{name}, {size / 1e3:.0f}k parameters"
                axes.plot(points.tokens[rows], loss[rows], line, ms=4, color=colour, label=label)
        axes.set(xscale="log", xlabel="training tokens", ylabel="held-out loss (nats per token)")
        axes.set_xticks([2e5, 5e5, 1e6, 2e6], ["200k", "500k", "1M", "2M"])
        axes.minorticks_off()
        axes.set_title(f"AdamW's tokens over Muon's at equal loss: {found}", fontsize=8)
        axes.legend(fontsize=7)
        return png(plt, figure)


if __name__ == "__main__":
    main()
