"""What a run says of sets beside the held-out text, of a mixture's parts, or of none at all."""

import json
from itertools import combinations

import numpy as np
import pytest

from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.train.ending import DONE
from parallel3d.verify.local_ranks import run_locally
from tests.train.held_out import held_out_loss
from tests.train.test_metrics import KEYS
from tests.train.test_trainer import LENGTH, on_mesh, raw, run_on_rank  # noqa: F401

pytestmark = pytest.mark.gloo


def with_data(config, **changes):
    block = config["parallel3d"]
    data = block["data"] | {"held_out_fraction": 0} | changes
    return config | {"parallel3d": block | {"data": data}}


def test_validation_set_over_two_data_parallel_ranks(raw):  # noqa: F811
    """Without held-out text; the last batch is filled up on one coordinate more than the other."""
    config = with_data(on_mesh(raw, 1, 2, 1, steps=2, evaluate_samples=21, evaluate_every=0))
    ranks = run_locally(run_on_rank, 2, config)
    assert [ended for ended, _ in ranks] == [DONE] * 2
    first, last = ranks[0][1].lines
    assert list(first) == KEYS and list(last) == [*KEYS, "validation"]
    (logged,) = last["validation"].values()
    web = prepare(RunConfig.from_dict(config).data).validation["web"]
    mean, error = held_out_loss(ranks[0][1].directory, web, samples=21, length=LENGTH)
    assert logged["loss"] == pytest.approx(mean, rel=1e-5)
    assert logged["standard_error"] == pytest.approx(error, rel=1e-4)
    assert logged["tokens"] == 21 * LENGTH
    for result in [seen.result for _, seen in ranks]:
        assert result.validation["web"].to_json() == logged and result.held_out_loss is None


def test_nothing_to_evaluate(raw):  # noqa: F811
    config = with_data(on_mesh(raw, 1, 1, 1, save_weights=False, steps=1), validation={})
    config |= {"zero_optimization": {"stage": 1}}
    ((ended, seen),) = run_locally(run_on_rank, 1, config)
    assert ended == DONE
    assert [list(line) for line in seen.lines] == [KEYS]
    assert seen.result.validation == {}


@pytest.fixture(scope="module")
def mixed(raw, tmp_path_factory):  # noqa: F811
    """A mixture of the texts, 1 : 3, with rows of quite other words."""
    root = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(1)
    lines = [json.dumps({"text": " ".join(rng.choice([*"xyz0123"], 90))}) for _ in range(60)]
    (root / "rows.jsonl").write_text("\n".join(lines))
    rows = {"source": "jsonl", "paths": [f"{root}/rows.jsonl"], "weight": 3}
    texts = {"source": "text", "paths": raw["parallel3d"]["data"]["paths"]}
    changes = {"source": "mixture", "paths": [], "mixture": [texts, rows], "validation": {}}
    config = with_data(raw, held_out_fraction=0.2, **changes)
    prepare(RunConfig.from_dict(config).data)
    return config


def last_line(config, pp, dp):
    """The last line of metrics.jsonl, and the run's folder."""
    settings = {"steps": 1, "evaluate_samples": 21, "evaluate_every": 0}
    config = on_mesh(config, pp, dp, 1, micro_batch=4 // dp, **settings)
    ranks = run_locally(run_on_rank, pp * dp, config)
    assert [ended for ended, _ in ranks] == [DONE] * (pp * dp)
    return ranks[0][1].lines[-1], ranks[0][1].directory


@pytest.fixture(scope="module")
def alone(mixed):
    return last_line(mixed, 1, 1)


def test_each_part_of_a_mixture_is_evaluated_by_itself(mixed, alone):
    """By plain transformers, on the text of the part and with the weights of the run."""
    line, directory = alone
    assert list(line["validation"]) == ["held_out", "mixture.0", "mixture.1"]
    assert line["held_out_loss"] == line["validation"]["held_out"]["loss"]
    corpus = prepare(RunConfig.from_dict(mixed).data)
    assert corpus.held_out.weights == corpus.train.weights == (0.25, 0.75)
    for number, part in enumerate(corpus.parts):
        logged = line["validation"][f"mixture.{number}"]
        mean, error = held_out_loss(directory, part, samples=21, length=LENGTH)
        assert logged["loss"] == pytest.approx(mean, rel=1e-5), number
        assert logged["standard_error"] == pytest.approx(error, rel=1e-4), number
        assert logged["tokens"] == 21 * LENGTH


@pytest.mark.slow  # a validation set over two ranks is above, evaluation on a pipeline in pipeline/
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 1)])
def test_losses_of_mixture_parts_are_the_same_on_two_ranks(mixed, alone, pp, dp):
    line, _ = last_line(mixed, pp, dp)
    expected = alone[0]["validation"]
    assert list(line["validation"]) == list(expected)
    losses = [logged["loss"] for logged in expected.values()]
    assert min(abs(a - b) for a, b in combinations(losses, 2)) > 1e-3, "they are told apart"
    for name, logged in line["validation"].items():
        assert logged == pytest.approx(expected[name], rel=1e-5), name
