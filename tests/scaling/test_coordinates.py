"""Slopes of sizes over widths, and which of them a check is judged by."""

import json
from math import isnan, nan

import pytest

from parallel3d.base.step_lines import finite
from parallel3d.extras.scaling.coordinates import fit_slopes

pytestmark = pytest.mark.pure

WIDTHS = 64, 128, 256
MEASURES = "start", "trained", "change"


def measured(**powers):
    """Layers whose start, trained size and change go by these powers of the width, of two seeds."""
    return {
        width: [
            {
                name.replace("_", "."): {
                    m: seed * width**p for m, p in zip(MEASURES, of, strict=True)
                }
                for name, of in powers.items()
            }
            for seed in (1, 3)
        ]
        for width in WIDTHS
    }


def test_slope_equals_the_power():
    check = fit_slopes(measured(embedding=(0, 0.05, -0.25)))
    (layer,) = check.layers
    assert layer.slopes == pytest.approx({"start": 0, "trained": 0.05, "change": -0.25}, abs=1e-12)
    assert layer.slope == pytest.approx(-0.25) and not layer.flat and not check.passed
    assert layer.sizes["start"] == pytest.approx([3**0.5] * 3)  # geometric mean of two seeds


def seeds_with(*powers):
    """One layer, of each seed the power of the width by which its change goes."""
    sizes = [{w: {"start": 1, "trained": 1, "change": w**p} for w in WIDTHS} for p in powers]
    return {w: [{"embedding": of_seed[w]} for of_seed in sizes] for w in WIDTHS}


def test_standard_errors_come_from_the_seeds():
    """Standard errors by hand."""
    noisy = fit_slopes(seeds_with(0.02, 0.12, 0.22))
    assert noisy.layers[0].errors["change"] == pytest.approx(0.1 / 3**0.5)
    assert not noisy.passed and noisy.seeds == 3
    assert isnan(fit_slopes(seeds_with(0.12)).layers[0].errors["change"])  # one seed has none


def test_logits_are_judged_by_their_change():
    check = fit_slopes(measured(blocks_0=(0.1 - 1e-9, 0, 0), head_output=(-0.5, -0.3, 0.02)))
    assert [layer.flat for layer in check.layers] == [True, True] and check.passed
    assert not fit_slopes(measured(head_output=(0, 0, 0.11))).passed


@pytest.mark.parametrize("power", [nan, -1e6])
def test_nan_is_not_flat(power):
    check = fit_slopes(measured(embedding=(0, power, 0)))
    assert not check.passed
    printed = json.loads(json.dumps(finite(check.to_json()), allow_nan=False))
    assert printed["layers"][0]["slope"] is None and printed["layers"][0]["flat"] is False
