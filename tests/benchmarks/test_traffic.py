"""benchmarks/traffic.py counts what the schedules say, and its least is a least."""

import json

import pytest

from benchmarks import traffic

pytestmark = pytest.mark.gloo

SIZES = {"microbatches": 4, "length": 16, "hidden": 64, "layers": 4, "vocab": 128}
ARGUMENTS = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def rows(capsys, *arguments):
    assert traffic.main([*ARGUMENTS, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.slow
def test_moved_bytes_are_near_the_least_possible(capsys):
    for row in rows(capsys, "--only", "gpipe"):
        moved = row["bytes"]
        least = row["least"]
        assert set(least) == {"weights", "gradients", "activations"}
        assert all(moved[kind] >= least[kind] * (1 - 1e-9) for kind in least)
        times = {"per_step": 1, "per_microbatch": 2 * 4}[row["weights"]]
        assert moved["weights"] == pytest.approx(times * least["weights"], rel=0.02)
        assert moved["gradients"] == pytest.approx(least["gradients"], rel=0.02)
        assert moved["activations"] == least["activations"]
        assert moved["tensor"] == 0


@pytest.mark.slow
def test_tensor_parallel_bytes_match_the_layers(capsys):
    [row] = rows(capsys, "--only", "one_f", "--mesh", "1x1x2")[:1]
    assert row["bytes"]["tensor"] == pytest.approx(row["least"]["tensor"], rel=0.05)
    assert row["bytes"]["weights"] == row["bytes"]["activations"] == 0


def test_kind_of_an_operation_follows_from_its_group():
    kinds = {
        ("dp=world", "all_gather"): "weights",
        ("dp", "reduce_scatter"): "gradients",
        ("pp", "send"): "activations",
        ("pp=world", "send"): "activations",
        ("tp", "all_gather"): "tensor",
        ("ends", "all_reduce"): "rest",
        ("world", "all_reduce"): "rest",
    }
    for place, kind in kinds.items():
        assert traffic.kind_of(*place) == kind
