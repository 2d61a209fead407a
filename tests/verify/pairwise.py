"""A small set of rows in which every pair of settings appears that can appear at all."""

import random
from itertools import combinations


def pairs(row):
    """The pairs of settings that a row (a dict of setting to value) exercises."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def possible_pairs(settings, valid, tries=300, seed=0):
    """Every pair for which a valid row was found, with such rows."""
    rng = random.Random(seed)
    examples = {}
    for (a, xs), (b, ys) in combinations(settings.items(), 2):
        for x in xs:
            for y in ys:
                for _ in range(tries):
                    row = draw(settings, rng) | {a: x, b: y}
                    if valid(row):
                        examples[frozenset([(a, x), (b, y)])] = row
                        break
    return examples


def draw(settings, rng):
    return {name: rng.choice(values) for name, values in settings.items()}


def pairwise(settings, valid, seed=0, wanted=lambda pair: True, cost=lambda row: 1):
    """Rows that cover every possible pair that is wanted, found greedily; as on every call.

    The next row has the most pairs that are missing for its cost.
    """
    rng = random.Random(seed)
    possible = possible_pairs(settings, valid)
    examples = {pair: row for pair, row in possible.items() if wanted(pair)}
    missing = dict.fromkeys(examples)
    rows = []
    while missing:
        pair = next(iter(missing))
        drawn = (draw(settings, rng) | dict(pair) for _ in range(400))
        candidates = [examples[pair], *(row for row in drawn if valid(row))]
        best = max(candidates, key=lambda row: sum(p in missing for p in pairs(row)) / cost(row))
        for p in pairs(best):
            missing.pop(p, None)
        rows.append(best)
    return rows
