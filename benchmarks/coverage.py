"""How often the 95 % intervals of launch/scale.py fit hold the truth.

    OMP_NUM_THREADS=1 python benchmarks/coverage.py [--draws 200 --bootstraps 200 --json]

Each draw makes the losses of a ladder of runs from a known law with 1 % of noise, fits it as the
command does, and asks of each parameter, and of the best N's exponent, whether the interval of the
bootstrap holds the true value. Binomial standard error of a coverage of 95 % in 200 draws: 1.5 %.
"""

import argparse
import json
import time
from collections.abc import Mapping

import numpy as np

from parallel3d.extras.scaling.estimator import PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.points import Array, Points, interval

LAW = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}  # arXiv:2203.15556
NOISE = 0.01  # standard deviation of log(loss)


def main() -> None:
    """Print the coverage of each interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--bootstraps", type=int, default=200)
    parser.add_argument("--estimator", choices=("huber", "likelihood", "squares"), default="huber")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    estimator = Estimator(args.estimator)
    found = coverage(args.draws, args.bootstraps, estimator)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({"coverage": found, "draws": args.draws, "seconds": seconds}))
        return
    print(f"{estimator}; {args.draws} draws of {len(ladder(0))} runs x {args.bootstraps} resamples")
    for name, share in found.items():
        print(f"{name:<8}{share:.1%}")
    print(f"{seconds:.0f} s")


def ladder(seed: int) -> Points:
    """Fifteen budgets over a factor of 500, nine sizes each, with noise from the seed."""
    flops = np.repeat(np.geomspace(6e18, 3e21, 15), 9)
    around = np.tile(np.geomspace(1 / 8, 8, 9), 15)
    params = around * PARAMETRIC.best(LAW, flops)[0]
    tokens = flops / 6 / params
    noise = NOISE * np.random.default_rng(seed).standard_normal(len(flops))
    loss: Array = PARAMETRIC.loss(LAW, params, tokens) * np.exp(noise)
    return Points(params, tokens, flops, loss, tuple(map(str, range(len(flops)))), {})


def coverage(draws: int, bootstraps: int, estimator: Estimator) -> dict[str, float]:
    """Of each parameter, and of the exponent of the best N, the share of intervals that hold it."""
    truth: Mapping[str, float] = LAW | {"N ~ C^": float(PARAMETRIC.optimal(LAW)[0])}
    held = dict.fromkeys(truth, 0)
    for draw in range(draws):
        runs = ladder(draw)
        fit = fit_law(runs, PARAMETRIC, estimator, draws=bootstraps, seed=draw, brief=True)
        intervals = fit.intervals | {"N ~ C^": interval(fit.optimal_samples["N"])}
        for name, value in truth.items():
            both = intervals[name]
            assert both is not None
            held[name] += both[0] <= value <= both[1]
    return {name: count / draws for name, count in held.items()}


if __name__ == "__main__":
    main()
