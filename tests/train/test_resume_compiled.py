"""A run that is compiled, stopped, and goes on: the numbers of the run that was not."""

import json

import pytest

from parallel3d.tensor import compiled
from parallel3d.train.ending import DONE, STOPPED
from tests.checkpoint.drill import changed, prepared_config
from tests.train.running import folder_of, start

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

MESH = (1, 2, 1)
HALF = 2
STEPS = 4


def by_graphs(rank):
    """Graphs as inductor would be given them, and no kernels."""
    compiled.BACKEND = "aot_eager"


def run(raw, name, mode, stop_after=None):
    settings = {"run.name": name, "train.compile": mode, "train.stop_after": stop_after}
    raw = changed(raw, {f"parallel3d.{key}": value for key, value in settings.items()})
    ranks = start(raw, MESH, by_graphs)
    assert [ended.code for ended in ranks] == [STOPPED if stop_after else DONE] * 2, ranks
    return raw, ranks


def numbers(raw):
    lines = map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines())
    keys = ("step", "loss", "grad_norm", "held_out_loss")
    return [[line.get(key, 0.0) for key in keys] for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A config with dropout, and its numbers when nothing is compiled."""
    settings = {
        "zero_optimization.stage": 1,
        "parallel3d.pipeline.activation_checkpointing": "none",
        "parallel3d.train.steps": STEPS,
        "parallel3d.train.evaluate_every": STEPS,
        "parallel3d.checkpoint.every": HALF,
    }
    raw = changed(prepared_config(tmp_path_factory.mktemp("compiled")), settings)
    return raw, numbers(run(raw, "plain", "none")[0])


@pytest.mark.parametrize("mode", ["pointwise", "block"])
def test_compiled_run_resumes(plain, mode):
    """To the bit what it is without a stop; the plain run's numbers but for rounding."""
    raw, expected = plain
    run(raw, f"{mode} again", mode, stop_after=HALF)
    again, ranks = run(raw, f"{mode} again", mode)
    whole, _ = run(raw, f"{mode} whole", mode)
    assert [line[0] for line in numbers(again)] == list(range(1, STEPS + 1))
    assert numbers(again) == numbers(whole)
    for ours, plain in zip(numbers(again), expected, strict=True):
        assert ours == pytest.approx(plain, rel=1e-5)
    assert ranks[0].says(f"compile {mode}: ") == 1  # in the first step of each process
