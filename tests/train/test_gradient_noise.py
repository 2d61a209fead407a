"""train.noise_scale_every: norms of ranks' own gradients, against runs of their samples alone."""

import json
from functools import partial

import pytest

from parallel3d.train.ending import DONE
from tests.checkpoint.drill import changed, prepared_config
from tests.config.configs import error_of
from tests.train.running import folder_of, start

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

DROPOUT = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
SLOW = partial(pytest.param, marks=pytest.mark.slow)
EVERY = "parallel3d.train.noise_scale_every"
REDUCTION = "parallel3d.pipeline.gradient_reduction"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run whose rate is too small to change a weight."""
    raw = prepared_config(tmp_path_factory.mktemp("noise"))
    settings = {f"parallel3d.model.{name}": value for name, value in DROPOUT.items()}
    settings |= {"optimizer.params": {"lr": 1e-30}, "gradient_clipping": 0.5}
    settings |= {"parallel3d.checkpoint.every": 0}
    settings |= {"parallel3d.pipeline.activation_checkpointing": "none"}
    return changed(raw, settings)


def lines(raw, name, mesh, batch, **settings):
    settings |= {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 1}
    raw = changed(raw, {"parallel3d.run.name": name, **settings})
    raw.pop("gradient_accumulation_steps", None)
    ranks = start(raw, mesh)
    assert [ended.code for ended in ranks] == [DONE] * len(ranks), ranks
    return list(map(json.loads, (folder_of(raw) / "metrics.jsonl").read_text().splitlines()))


@pytest.fixture(scope="module")
def squares(config):
    """Squared norms of the gradients of the first samples, each alone."""
    settings = {"parallel3d.train.steps": 8, "zero_optimization.stage": 1}
    steps = lines(config, "alone", (1, 1, 1), 1, **settings)
    return [line["grad_norm"] ** 2 for line in steps]


CASES = [
    ((1, 2, 1), {"zero_optimization.stage": 1}),
    SLOW((1, 2, 2), {"zero_optimization.stage": 1, "parallel3d.mesh.sequence_parallel": True}),
    SLOW((2, 2, 1), {"zero_optimization.stage": 0}),
    SLOW((1, 4, 1), {"zero_optimization.stage": 3, "zero_optimization.overlap_comm": True}),
    SLOW((2, 2, 1), {"zero_optimization.stage": 3, "parallel3d.pipeline.weights": "per_step"}),
    SLOW((2, 2, 1), {"zero_optimization.stage": 2, REDUCTION: "per_step"}),
]


@pytest.mark.parametrize(("mesh", "settings"), CASES, ids=str)
def test_noise_scale_is_computed_from_samples_of_each_rank(mesh, settings, config, squares):
    """Of a sample a rank, by the two formulas of arXiv:1812.06162, appendix A.1."""
    dp = mesh[1]
    settings = settings | {"parallel3d.train.steps": 2, EVERY: 2}
    name = f"{mesh} {len(settings)} {settings['zero_optimization.stage']}"
    first, second = lines(config, name.replace(" ", ""), mesh, dp, **settings)
    assert "gradient_noise" not in first
    small = sum(squares[dp : 2 * dp]) / dp
    big = second["grad_norm"] ** 2
    noise = second["gradient_noise"]
    assert noise["square"] == pytest.approx((dp * big - small) / (dp - 1), rel=1e-4)
    assert noise["trace"] == pytest.approx((small - big) / (1 - 1 / dp), rel=1e-4)
    assert noise["scale"] == pytest.approx(noise["trace"] / noise["square"])


def test_noise_scale_without_gradient_per_rank_is_refused():
    alone = error_of(**{EVERY: 5, "parallel3d.mesh": {"pp": 1, "dp": 1, "tp": 1}})
    assert "noise_scale_every = 5: compares gradients of data-parallel ranks" in alone
    each = error_of(**{EVERY: 5, REDUCTION: "per_microbatch", "zero_optimization.stage": 1})
    assert "needs gradients that are reduced once per step" in each
