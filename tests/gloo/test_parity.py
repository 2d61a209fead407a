"""The same seed and data give the same numbers on every mesh as on one process of plain PyTorch.

Each pair of settings appears in at least one case (`test_every_pair_of_settings_appears` says so);
`pytest -m slow` runs every mesh with every ZeRO stage, schedule and reduction.
"""

from itertools import combinations, cycle, product

import pytest

from tests.gloo.parity import Case, measure, train_on_rank
from tests.ranks import run_ranks

SETTINGS = {
    "mesh": [
        (1, 1, 1), (1, 4, 1), (1, 1, 4), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)
    ],
    "zero": [(1, "none"), (3, "none"), (3, "cpu")],
    "microbatches": [1, 3, 4],
    "schedule": ["gpipe", "one_f_one_b"],
    "reduction": ["per_step", "per_microbatch"],
    "checkpointing": ["none", "full"],
    "tied": [True, False],
}  # fmt: skip


def pairs(row):
    """The pairs of settings that a row of values exercises."""
    return {frozenset(pair) for pair in combinations(zip(SETTINGS, row, strict=True), 2)}


def pairwise():
    """Few rows in which every pair of settings appears, found greedily."""
    rows = list(product(*SETTINGS.values()))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def case(row):
    values = dict(zip(SETTINGS, row, strict=True))
    zero_stage, offload = values.pop("zero")
    return Case(zero_stage=zero_stage, offload=offload, **values)


CASES = [case(row) for row in pairwise()]


def test_every_pair_of_settings_appears():
    covered = set().union(*map(pairs, pairwise()))
    expected = {
        frozenset([(a, x), (b, y)])
        for a, b in combinations(SETTINGS, 2)
        for x in SETTINGS[a]
        for y in SETTINGS[b]
    }
    assert covered == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity_with_plain_pytorch(case):
    errors = measure(case)
    print(f"{case!s:72} {errors}")
    assert errors.within(1e-5), errors


def in_full():
    """Every mesh x ZeRO stage x schedule x reduction, the other settings taking turns."""
    axes = ("mesh", "zero", "schedule", "reduction")
    turns = zip(*(cycle(SETTINGS[name]) for name in SETTINGS if name not in axes), strict=True)
    others = [name for name in SETTINGS if name not in axes]
    for row, rest in zip(product(*(SETTINGS[name] for name in axes)), turns, strict=False):
        values = dict(zip(axes, row, strict=True)) | dict(zip(others, rest, strict=True))
        yield case([values[name] for name in SETTINGS])


@pytest.mark.slow
@pytest.mark.parametrize("case", list(in_full()), ids=str)
def test_parity_in_full(case):
    errors = measure(case)
    print(f"{case!s:72} {errors}")
    assert errors.within(1e-5), errors


def test_bf16_follows_fp32():
    """The loss curve of bf16 stays within 2 % of fp32 over 50 steps."""
    curves = {}
    for precision in ("fp32", "bf16"):
        run = Case(mesh=(2, 2, 1), precision=precision, steps=50, microbatches=2)
        curves[precision], _, _ = run_ranks(train_on_rank, run.world_size, run)[0]
    for step, (bf16, fp32) in enumerate(zip(curves["bf16"], curves["fp32"], strict=True)):
        assert abs(bf16 - fp32) / fp32 < 0.02, (step, bf16, fp32)
