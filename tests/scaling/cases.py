"""Points of known laws, which no file of the library made."""

from pathlib import Path

import numpy as np
import pytest

from parallel3d.extras.scaling.points import Points

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "scaling"
CHINCHILLA = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}


def published(name: str) -> Path:
    """A file of published runs; the test skips, and says so, where it is not there."""
    if not (PUBLISHED / name).exists():
        pytest.skip(f"needs {PUBLISHED / name}, which is not there")
    return PUBLISHED / name


def chinchilla(noise=0.0, seed=0, budgets=9, sizes=9, law=CHINCHILLA) -> Points:
    """IsoFLOP profiles of a parametric law, with a relative noise in the loss."""
    random = np.random.default_rng(seed)
    flops = np.repeat(np.geomspace(6e18, 3e21, budgets), sizes)
    around = np.tile(np.geomspace(0.15, 7, sizes), budgets)
    params = around * np.sqrt(flops / 6) / np.sqrt(20)
    tokens = flops / 6 / params
    loss = law["E"] + law["A"] / params ** law["alpha"] + law["B"] / tokens ** law["beta"]
    loss = loss * np.exp(noise * random.standard_normal(len(loss)))
    return points(params, tokens, loss)


def ladder(law=CHINCHILLA, seed=0, noise=0.003) -> Points:
    """Six budgets over a factor of 100 with seven sizes each, within about x4 of the best size."""
    random = np.random.default_rng(seed)
    flops = np.repeat(np.geomspace(1e18, 1e20, 6), 7)
    around = np.tile(np.geomspace(1 / 4, 4, 7), 6) * np.exp(random.uniform(-0.2, 0.2, 42))
    a = law["alpha"]
    b = law["beta"]
    best = (a * law["A"] / (b * law["B"])) ** (1 / (a + b)) * (flops / 6) ** (b / (a + b))
    params = around * best
    tokens = flops / 6 / params
    loss = law["E"] + law["A"] / params**a + law["B"] / tokens**b
    return points(params, tokens, loss * np.exp(noise * random.standard_normal(42)))


def points(params, tokens, loss, **others) -> Points:
    """Points of arrays."""
    params, tokens, loss = (np.asarray(x, dtype=float) for x in (params, tokens, loss))
    names = tuple(f"line {i}" for i in range(2, 2 + len(loss)))
    return Points(params, tokens, 6 * params * tokens, loss, names, {"params": "params"}, **others)


def write_csv(path: Path, **columns) -> Path:
    """A table of columns of equal length."""
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines))
    return path
