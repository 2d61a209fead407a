"""A small set of rows in which every pair of settings appears that can appear at all."""

import random
from itertools import combinations


def pairs(row):
    """The pairs of settings that a row (a dict of setting to value) exercises."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def possible_pairs(settings, valid, wanted=lambda pair: True, tries=300, seed=0):
    """Every pair that is wanted for which a valid row was found, with such rows."""
    rng = random.Random(seed)
    examples = {}
    for (a, xs), (b, ys) in combinations(settings.items(), 2):
        for x in xs:
            for y in ys:
                pair = frozenset([(a, x), (b, y)])
                for _ in range(tries if wanted(pair) else 0):
                    row = draw(settings, rng) | dict(pair)
                    if valid(row):
                        examples[pair] = row
                        break
    return examples


def draw(settings, rng):
    return {name: rng.choice(values) for name, values in settings.items()}


def pairwise(settings, valid, seed=0, wanted=lambda pair: True, cost=lambda row: 1):
    """Rows that cover every possible pair that is wanted, found greedily; as on every call.

    The next row has the most pairs that are missing for its cost.
    """
    rng = random.Random(seed)
    examples = possible_pairs(settings, valid, wanted)
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
