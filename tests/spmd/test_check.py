"""Types of values: planted mistakes are named, and nothing is said of what is right."""

import pytest

from parallel3d import models, reader
from parallel3d.config import RunConfig
from parallel3d.errors import TrainingError
from parallel3d.model import head_cost
from parallel3d.spmd import running
from parallel3d.spmd.check import findings, refuse_mismatches, type_errors
from parallel3d.train import startup
from tests.spmd.configs import tp_config
from tests.spmd.plants import PLANTS
from tests.verify.configs import MODELS

pytestmark = pytest.mark.gloo

# Those that are tried by default: of each rule one.
QUICK = (
    "bias added before the reduction",
    "all-reduce twice",
    "no f: the backward of a column-parallel layer is not summed",
    "norms of sequence parallelism are not summed",
    "shared key and value heads are not summed",
    "norms of query and key are not summed",
    "a gradient's part is taken without the sum",
    "parts gathered in the order of ranks",
    "a softmax over the vocabulary without its maximum",
    "embedding without its mask",
    "positions of the first part on every rank",
    "unequal dropout of equal values",
    "equal dropout on all replicas",
)
MODES = [(mode, split) for mode in ("none", "selective", "full") for split in (False, True)]
SHIPPED = sorted(path.stem for path in reader.CONFIGS.glob("*.json"))


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PLANTS]
)
def test_a_planted_mistake_is_named(name):
    plant = PLANTS[name]
    config = tp_config(**plant.config)
    with plant.patch():
        lines = type_errors(config)
    assert any(all(part in line for part in plant.says) for line in lines), lines


@pytest.mark.parametrize("family", models.families())
def test_nothing_is_said_of_a_family(family):
    assert findings(tp_config(family, 2, sequence_parallel=True, dp=2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_said_of_what_is_right(model, tp):
    """Whatever is dropped, recomputed or cut; and no operator is left without a rule."""
    fields = models.config_class(MODELS[model]["family"]).model_fields
    dropout = {name: 0.1 for name in fields if name.endswith("_pdrop")}
    for mode, split in MODES:
        for isolate in (False, True):
            config = tp_config(model, tp, split and tp > 1, mode, isolate, dp=2, **dropout)
            assert findings(config) == []


@pytest.mark.parametrize("heads", (1, 2))
def test_key_and_value_heads_that_ranks_share(heads):
    config = tp_config("qwen3", 4, num_key_value_heads=heads)
    assert findings(config) == []


def test_one_key_and_value_head_a_rank_where_documents_are_isolated():
    """Its gradient is summed over the heads that share it, not over ranks."""
    assert findings(tp_config("qwen3", 2, isolate=True, num_key_value_heads=2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_said_of_a_shipped_config(name):
    own = RunConfig.from_json(name)
    sizes = {2, 4, 5} if own.is_planned else {own.mesh.tp, 2, 4, 5}
    for tp in (n for n in sizes - {1} if own.model.num_attention_heads % n == 0):
        for mode, split in MODES:
            if own.data.sequence_length % tp and split:
                continue
            setting = {"mesh.tp": tp, "mesh.sequence_parallel": split,
                       "pipeline.activation_checkpointing": mode}  # fmt: skip
            words = [word for name, v in setting.items() for word in (f"--{name}", str(v).lower())]
            assert findings(RunConfig.from_json(name, words)) == []


def test_one_head_on_each_rank():
    assert findings(tp_config("gpt", 16)) == []


def test_a_start_is_refused_on_all_ranks(monkeypatch):
    """Rank 0 refuses it, before it looks for a folder; `on_first` raises that on the others."""
    plant = PLANTS["all-reduce twice"]
    config = tp_config(**plant.config)
    monkeypatch.setattr(startup, "on_first", lambda mesh, work: work())
    with pytest.raises(AssertionError, match="claims the folder"):
        startup.find_folder(config, None, None)
    with plant.patch(), pytest.raises(TrainingError, match=r"tp = 2 ranks:\n  blocks.0.att"):
        startup.find_folder(config, None, None)
    train = config.train.model_copy(update={"check_layers": False})
    block = config.parallel3d.model_copy(update={"train": train})
    unchecked = config.model_copy(update={"parallel3d": block})
    with plant.patch(), pytest.raises(AssertionError, match="claims the folder"):
        startup.find_folder(unchecked, None, None)


def test_ranks_with_a_row_more_of_the_vocabulary_take_as_many_tokens_at_a_time(monkeypatch):
    config = tp_config("gpt", 4, vocab_size=4098)
    rows = 4098 // 4
    tokens = running._BATCH * config.data.sequence_length
    monkeypatch.setattr(head_cost, "LOGITS_AT_ONCE", tokens * rows)
    assert head_cost.num_chunks(tokens, rows) < head_cost.num_chunks(tokens, rows + 1)
    assert findings(config) == []


@pytest.mark.slow
@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_said_where_tp_does_not_divide_the_vocabulary(model, tp):
    """The first ranks' parts of the embedding and the head have a row more than the others'."""
    for split in (False, True):
        assert findings(tp_config(model, tp, split, dp=2, vocab_size=4099)) == []


@pytest.mark.parametrize(
    "name",
    [
        "embedding without its mask",
        *(
            pytest.param(f"a softmax over the vocabulary without its {of}", marks=pytest.mark.slow)
            for of in ("sum", "maximum")
        ),
    ],
)
def test_a_mistake_is_named_where_tp_does_not_divide_the_vocabulary(name):
    plant = PLANTS[name]
    with plant.patch():
        lines = type_errors(tp_config(**plant.config, tp=4, vocab_size=4099))
    assert any(all(part in line for part in plant.says) for line in lines), lines


def test_one_rank_has_nothing_to_match():
    config = tp_config(tp=1)
    refuse_mismatches(config)
    assert findings(config) == []
