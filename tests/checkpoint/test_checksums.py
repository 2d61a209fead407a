"""Checksums and digests of the state: one number on every mesh, and a flipped bit changes it."""

import json
import math
import sys
from functools import cache

import numpy as np
import pytest
import torch

from launch import runs as command
from parallel3d.checkpoint.chunk_runs import bit_sum, state_checksums
from parallel3d.model.spec import named_params
from parallel3d.train.digests import DIGESTS, append_digest, compare_runs, digest_of
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("operators")]

SHAPE = (5, 3, 4)


def counted_by_hand(array):
    """The sum of the definition, in Python's own integers."""
    total = 0
    for index, bits in enumerate(array.reshape(-1).view(np.int32).tolist()):
        weight = index * 0x9E3779B97F4A7C15 % 2**64
        signed = weight - 2**64 if weight >= 2**63 else weight
        total += bits * ((signed ^ signed >> 29) | 1)
    return (total + 2**63) % 2**64 - 2**63


def test_bit_sum_matches_its_definition():
    array = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    tensor = torch.from_numpy(array)
    whole = int(bit_sum(tensor, (0, 0, 0), SHAPE))
    assert whole == counted_by_hand(array)
    assert int(bit_sum(torch.tensor(2.5), (), ())) == counted_by_hand(np.float32(2.5))
    parts = [
        bit_sum(tensor[:2, :, :1], (0, 0, 0), SHAPE),
        bit_sum(tensor[:2, :, 1:], (0, 0, 1), SHAPE),
        bit_sum(tensor[2:, :, :1], (2, 0, 0), SHAPE),
        bit_sum(tensor[2:, :, 1:], (2, 0, 1), SHAPE),
    ]
    assert int(torch.stack(parts).sum()) == whole
    for element in (0, 17, 59):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32).view(-1)[element] ^= -(2**31) if bit == 31 else 1 << bit
            assert int(bit_sum(flipped, (0, 0, 0), SHAPE)) != whole


def digest_on_rank(rank, case):
    """The digest of the state before the first step."""
    return _digest(Trainer(case))


@cache
def digest_alone(tied):
    """Return the digest of one process before the first step."""
    return run_locally(digest_on_rank, 1, Case(zero_stage=0, tied=tied, **SIZES))[0]


def digests_around_a_flip(rank, case):
    """Return digests: at first, after a step, and after rank 1 has flipped a bit of a moment.

    The last value is the name of that moment's parameter.
    """
    trainer = Trainer(case)
    first = _digest(trainer)
    trainer.executor.run(trainer.batches()[0])
    trainer.engine.step(trainer.lr)
    before = _digest(trainer)
    with trainer.engine.states.opened(0, write=True) as tensors:
        tensors[0]["exp_avg"].view(torch.int32)[0] ^= rank
    return first, before, _digest(trainer), trainer.engine.states.blocks[0][0].held.name


def _digest(trainer):
    shapes = {n: s.shape for n, s in named_params(trainer.parts.layers).items()}
    return digest_of(state_checksums(trainer.engine, trainer.mesh, shapes))


SIZES = {"batch": 4, "microbatches": 2, "steps": 1, "model": {"num_hidden_layers": 2}}
PLACES = [
    {"mesh": (2, 2, 1), "zero_stage": 3},
    {"mesh": (1, 2, 1), "zero_stage": 0},
    {"mesh": (1, 2, 2), "zero_stage": 1, "offload": "cpu"},
    {"mesh": (4, 1, 1), "zero_stage": 2},
    {"mesh": (1, 1, 4), "zero_stage": 3, "tied": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_digest_is_equal_on_every_mesh(place):
    """Before the first step all meshes have the same bits: weights by name, moments of zeros."""
    case = Case(**place, **SIZES)
    digests = run_locally(digest_on_rank, case.world_size, case)
    assert all(digest == digest_alone(case.tied) for digest in digests)


@pytest.mark.parametrize("zero_stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bit_of_a_moment_is_located(zero_stage):
    """Before the first step two ranks have the digest of one; each says the same."""
    case = Case((1, 2, 1), zero_stage=zero_stage, **SIZES)
    one, other = run_locally(digests_around_a_flip, 2, case)
    *digests, _ = one
    *same, name = other
    assert digests == same
    first, before, after = digests
    assert first == digest_alone(case.tied)
    assert after != before
    differing = [n for n, d in before["parameters"].items() if d != after["parameters"][n]]
    assert differing == [name]


def write_run(folder, losses, states):
    folder.mkdir()
    lines = [{"step": i, "loss": x, "grad_norm": 1.0} for i, x in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for step, (a, b) in states.items():
        append_digest(folder, step, {"a": [a, 1, 2], "b": [b, 3, 4]})
    return folder


def chain_of(run):
    """Return the chained digests of a run, one for each line."""
    return [json.loads(line)["chain"] for line in (run / DIGESTS).read_text().splitlines()]


@pytest.fixture
def diff(monkeypatch, capsys):
    """Give a function that runs the command: exit code, standard output, standard error."""

    def run_it(*arguments):
        monkeypatch.setattr(sys, "argv", ["runs.py", "diff", *map(str, arguments)])
        code = command.main()
        return code, *capsys.readouterr()

    return run_it


@pytest.mark.parametrize(
    ("one", "other", "bound", "is_same"),
    [
        (math.nan, math.nan, 0.0, True),
        (math.nan, math.nan, 1e-4, True),
        (None, None, 1e-4, True),
        (math.inf, math.inf, 1e-4, True),
        (math.inf, -math.inf, 1e-4, False),
        (math.inf, 3.0, 1e-4, False),
        (math.nan, 3.0, 1e-4, False),
        (None, math.nan, 0.0, False),
        ("NaN", 3.0, 1e-4, False),
    ],
)
def test_losses_that_are_not_finite_are_compared(tmp_path, one, other, bound, is_same):
    runs = [write_run(tmp_path / str(n), [5.0, x], {}) for n, x in enumerate((one, other))]
    assert compare_runs(*runs, bound)["same"] == is_same


def test_comparison_of_two_runs_names_the_first_difference(tmp_path, diff):
    losses = [5.0, 4.0, 3.5, 3.0]
    one = write_run(tmp_path / "one", losses, {2: (1, 2), 4: (5, 6)})
    same = write_run(tmp_path / "same", losses[:3], {2: (1, 2)})
    other = write_run(tmp_path / "other", [5.0, 4.0, 3.6, 3.1], {2: (1, 2), 4: (5, 7)})
    assert compare_runs(one, same) == {
        "same": True,
        "steps": 3,
        "first_step": None,
        "values": {},
        "digests": 1,
        "first_digest": None,
        "parameters": [],
    }
    assert chain_of(one)[0] == chain_of(same)[0] == chain_of(other)[0]
    assert chain_of(one)[1] != chain_of(other)[1]
    code, output, _ = diff(one, other, "--json")
    assert code == 1
    assert json.loads(output) == {
        "same": False,
        "steps": 4,
        "first_step": 3,
        "values": {"loss": [3.5, 3.6]},
        "digests": 2,
        "first_digest": 4,
        "parameters": ["b"],
    }
    _, output, error = diff(one, other)
    assert "step 3 is the first that differs: loss 3.5 and 3.6" in output + error
    code, _, error = diff(one, tmp_path)
    assert code == 2 and "use the folder of a run" in error
