"""Muon's settings: what is accepted, and one message for each that cannot be."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.model import optimizers
from tests.config.configs import error_of, raw

pytestmark = pytest.mark.pure

MUON = optimizers.load("muon")
JORDAN = (3.4445, -4.775, 2.0315)
PARAMS = "optimizer.params"


def params(**changes):
    return MUON.Params(lr=0.02, **changes)


def after(polynomials, x):
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


def test_coefficients_give_one_polynomial_per_step():
    assert params().polynomials == (JORDAN,) * 5
    assert params(ns_steps=2).polynomials == (JORDAN,) * 2
    v4 = params(coefficients="deepseekv4").polynomials
    assert v4 == (JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2
    assert params(coefficients="deepseekv4", ns_steps=3).polynomials == v4[7:]
    # From arXiv:2505.16932: the first step's slope, over the safety factor.
    polar = params(coefficients="polar_express", ns_steps=12).polynomials
    assert polar[0][0] == pytest.approx(8.28721201814563 / 1.01) and polar[-1] == polar[7]
    for steps in (polar, v4):
        assert all(abs(after(steps, x) - 1) < 0.02 for x in (0.05, 0.3, 0.7, 1.0))
    assert params(coefficients=[2, -1.5, 0.5]).polynomials == ((2.0, -1.5, 0.5),) * 5
    two = [[3.4445, -4.775, 2.0315], [2, -1.5, 0.5]]
    assert params(coefficients=two).polynomials == (JORDAN, (2.0, -1.5, 0.5))
    assert params(coefficients=two, ns_steps=3).polynomials[-1] == (2.0, -1.5, 0.5)


@pytest.mark.parametrize(
    ("scale", "tall", "wide"),
    [("original", 2.0, 1.0), ("match_rms_adamw", 0.2 * 8, 0.2 * 8), ("spectral", 2.0, 0.5)],
)
def test_scale_sets_the_factor_of_an_update(scale, tall, wide):
    chosen = params(scale=scale)
    assert (chosen.factor(64, 16), chosen.factor(16, 64)) == pytest.approx((tall, wide))


IMPOSSIBLE = [
    ({f"{PARAMS}.coefficients": [9, -4, 2]}, "coefficients = [9.0, -4.0, 2.0]: makes a singul"),
    ({f"{PARAMS}.coefficients": [0.1, 0, 0]}, 'or shrink to nothing; use "jordan"'),
    ({f"{PARAMS}.coefficients": []}, "coefficients = []: has no triple; use [3.4445"),
    ({f"{PARAMS}.coefficients": "newton"}, "coefficients"),
    ({f"{PARAMS}.momentum": 1.0}, "momentum = 1.0: must be less than 1"),
    ({f"{PARAMS}.ns_steps": 100}, "ns_steps = 100: must be at most 20"),
    ({f"{PARAMS}.ns_method": "gram"}, 'ns_method = "gram": must be "standard"'),
    ({f"{PARAMS}.momentums": 0.9}, 'is not a setting; the nearest one is "momentum"'),
    (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer.device": "nvme",
            "zero_optimization.offload_optimizer.nvme_path": "/nvme",
        },
        'device = "nvme": cannot hold the state of muon; use "none" or "cpu"',
    ),
    (
        {"parallel3d.model.parametrization": {"type": "mup", "base_width": 32}},
        'scale = "original": has no learning rate that transfers over the width',
    ),
]


@pytest.mark.parametrize(("changes", "words"), IMPOSSIBLE)
def test_impossible_settings_give_one_message(changes, words):
    message = error_of(**{"optimizer.type": "Muon", **changes})
    assert words in message and message.startswith("1 problem "), message


def test_deepspeed_keys_are_accepted():
    keys = {"muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.9, "ns_method": "standard"}
    config = RunConfig.from_dict(
        raw(**{"optimizer.type": "Muon", **{f"{PARAMS}.{k}": v for k, v in keys.items()}})
    )
    assert config.optimizer.type == "muon"
    assert (config.optimizer.params.muon_lr, config.optimizer.params.adam_lr) == (0.02, 3e-4)
    assert RunConfig.from_dict(config.to_dict()) == config
