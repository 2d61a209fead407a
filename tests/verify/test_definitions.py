"""The definitions that verify's reference is made of agree with the library, written apart."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel3d import models
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.batches import documents_of
from parallel3d.data.order import Mixing, sample_index
from parallel3d.verify import definitions
from parallel3d.verify.reference import first_weights
from parallel3d.verify.schedule import schedule_of
from parallel3d.verify.shrink import shrink
from tests.test_floors import num_nodes
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

SCHEDULES = [
    {"type": "constant"},
    {"type": "cosine", "warmup_steps": 7},
    {"type": "linear", "min_ratio": 0.0},
    {"type": "wsd", "warmup_steps": 3},
    {"type": "wsd", "warmup_steps": 3, "decay_steps": 11, "min_ratio": 0.2},
]


def test_definitions_import_nothing_of_the_library():
    """Whatever they imported from it would be a mistake that both sides share."""
    tree = ast.parse(Path(definitions.__file__).read_text())
    for_types = [node for node in tree.body if ast.unparse(node).startswith("if TYPE_CHECKING")]
    tree.body = [node for node in tree.body if node not in for_types]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports and not any("parallel3d" in ast.unparse(node) for node in imports)
    assert num_nodes(Path(definitions.__file__)) <= 2_130


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_learning_rates(schedule):
    raw = config_of()
    raw["parallel3d"]["train"] |= {"steps": 60, "lr_schedule": schedule}
    config = RunConfig.from_dict(raw)
    small = schedule_of(config, shrink(config, (MeshSizes(),))[MeshSizes()])
    assert small.num_steps == 60
    expected = [rate(small, step) for step in range(60)]
    assert [definitions.learning_rate(small, step) for step in range(60)] == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 300, 5000])
def test_order_of_samples(count):
    indices = np.arange(min(3 * count, 1500))
    for seed in (0, 2**63 - 1):
        expected = sample_index(seed, indices, count).tolist()
        assert [definitions.sample_at(seed, int(i), count) for i in indices] == expected


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (3, 1), (0.37, 0.63)])
def test_order_of_a_mixture(weights):
    mixing = Mixing(weights)
    shares = definitions.shares_of(weights)
    assert shares == mixing.shares.tolist()
    parts, places = mixing.assign(np.arange(250))
    assert definitions.parts_of(shares, 250) == list(
        zip(parts.tolist(), places.tolist(), strict=True)
    )


def test_document_owns_its_end():
    tokens = torch.tensor([[1, 9, 2, 9, 9, 3], [9, 1, 1, 1, 9, 9]])
    right = [[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 2]]
    assert definitions.documents_of(tokens, 9).tolist() == right
    assert documents_of(tokens.numpy(), 9).tolist() == right


@pytest.mark.parametrize("model", ["gpt", "llama", "qwen2"])
@pytest.mark.parametrize("mup", [False, True])
def test_first_weights_are_their_familys(model, mup):
    raw = config_of(model=model)
    if mup:
        raw["parallel3d"]["model"]["parametrization"] = {"type": "mup", "base_width": 16}
    config = shrink(RunConfig.from_dict(raw), (MeshSizes(), MeshSizes(tp=4)))[MeshSizes()]
    family = models.huggingface(config.model.family)
    first = first_weights(config)
    reference = family.reference(config.model)

    def error(change=lambda name, weight: weight):
        weights = {name: change(name, weight) for name, weight in first.items()}
        reference.load_state_dict(family.to_huggingface(config.model, weights), strict=False)
        return definitions.start_error(reference, config.model)

    assert error() < 4
    assert error(lambda name, weight: weight * (1.1 if "mlp.down.weight" in name else 1)) > 4
    assert error(lambda name, weight: weight + (0.003 if "embedding" in name else 0)) > 4
    assert error(lambda name, weight: weight + (0.1 if "norm" in name else 0)) > 4
    same = first["blocks.0.attention.output.weight"]
    copied = "blocks.1.attention.output.weight"
    assert error(lambda name, weight: same if name == copied else weight) > 4
