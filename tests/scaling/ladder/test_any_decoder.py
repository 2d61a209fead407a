"""Ladders of any decoder of transformers: its sizes are fields of its config.json."""

import pytest

from parallel3d.base.errors import ConfigError
from tests.models.every_decoder import without_measuring
from tests.scaling.ladder.cases import micro, runs_by_name

pytestmark = pytest.mark.gloo

SIZES = [20e3, {"model": {"hidden_size": 24, "num_hidden_layers": 2}}]
LLAMA = {"family": "transformers", "config": {"model_type": "llama", "num_key_value_heads": 1}}


def base(tmp_path, model):
    """The small ladder's base with another model."""
    own = micro(tmp_path)["base"]
    return own | {"parallel3d": own["parallel3d"] | {"model": model}}


def counts(tmp_path, model):
    """The parameters of each run's parts, by its name."""
    changes = {"base": base(tmp_path, model), "sizes": SIZES, "budgets": {"tokens": [512, 1024]}}
    with without_measuring():
        runs = runs_by_name(tmp_path, **changes)
    return {name: (run.counts, run.config.train.steps) for name, run in runs.items()}


def test_sizes_equal_those_of_the_written_family(tmp_path):
    written = counts(tmp_path, {"family": "llama", "num_key_value_heads": 1})
    assert len(written) == 4
    assert counts(tmp_path, LLAMA) == written


def test_inner_width_of_the_architecture_is_not_that_of_every_size(tmp_path):
    with pytest.raises(ConfigError, match="mlp_ratio = null: would leave every size"):
        runs_by_name(tmp_path, base=base(tmp_path, LLAMA), mlp_ratio=None)
