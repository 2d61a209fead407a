"""The model around a layer: it does not walk past the others, where this changes nothing."""

import json

import pytest
import torch

from parallel3d.mesh.mesh import Mesh
from parallel3d.models.transformers.anatomy import FINDINGS, settings_of
from parallel3d.models.transformers.blocks import Embedding
from parallel3d.models.transformers.on_meta import EmptyOnMeta
from parallel3d.models.transformers.regions import LayerPlan
from parallel3d.models.transformers.skeleton import Skeleton
from parallel3d.models.transformers.spec import Config
from parallel3d.verify.local_ranks import run_locally
from tests.contexts import layer_context
from tests.models.architectures import small_config
from tests.models.test_llama_through_transformers import Collectives

pytestmark = pytest.mark.gloo
LESS_COMMON = ["jamba", "lfm3"]


def skeleton(kind):
    """The skeleton of a small model."""
    return Skeleton(settings_of(json.dumps(small_config(kind))))


@pytest.mark.parametrize(
    "kind", ["gemma3_text", "gpt2", *(pytest.param(k, marks=pytest.mark.slow) for k in LESS_COMMON)]
)
def test_model_around_a_layer_has_no_other(kind):
    own = skeleton(kind)
    base, _ = own.around(2, None, {})
    assert len(getattr(base, own.list)) == 1


def test_model_that_counts_its_layers_walks_past_all(monkeypatch):
    """Gemma 3 looks the kind of its layers up by their number."""
    monkeypatch.setattr(Skeleton, "_config_at", lambda self, number: self.base.config)
    own = skeleton("gemma3_text")
    base, _ = own.around(2, None, {})
    assert len(getattr(base, own.list)) == 4


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "gemma2"])
def test_skeleton_of_known_findings_is_that_of_a_run(kind):
    own = skeleton(kind)
    text = FINDINGS.dump_json(own.findings)
    again = Skeleton(settings_of(json.dumps(small_config(kind))), FINDINGS.validate_json(text))
    assert again.findings == own.findings
    for number in range(len(own.layers)):
        plans = [LayerPlan(each, number) for each in (own, again)]
        names = [name for name, _ in own.layers[number].named_parameters()]
        first, second = ([plan.place(name) for name in names] for plan in plans)
        assert first == second


@pytest.mark.parametrize("kind", ["gpt2", "phi"])
def test_other_vocabulary_changes_rows_alone(kind):
    """GPT-2's output is its table, Phi's has a bias."""
    own = skeleton(kind)
    more = own.with_vocabulary(1234)
    size = small_config(kind)["vocab_size"]
    changed = {name for name, shape in own.shapes.items() if shape != more.shapes[name]}
    wide = Skeleton(settings_of(json.dumps(small_config(kind) | {"vocab_size": 1234})))
    assert more.shapes == wide.shapes and changed
    assert all(own.shapes[name][0] == size for name in changed)
    assert more.is_tied == own.is_tied and own.settings.vocab_size == size
    table = more.model.get_input_embeddings().weight
    assert (more.model.get_output_embeddings().weight is table) == (kind == "gpt2")


def test_dropout_of_attention_is_that_of_the_module_and_scales_cost_nothing():
    """GPT-2 reads the probability from a dropout module, and may scale each layer differently."""
    own = {"attn_pdrop": 0.1, "scale_attn_by_inverse_layer_idx": True}
    facts = Config(family="transformers", config=small_config("gpt2") | own).facts
    assert facts.attention_dropout == 0.1
    assert set(facts.kinds) == {0}


def test_experts_made_as_zeros_take_no_memory():
    """Llama 4's are 40 GiB in each of its larger model's layers."""
    with EmptyOnMeta():
        assert torch.zeros(128, 5120, 16384).is_meta
        assert not torch.zeros(4, 4).is_meta


def sent(rank, kind):
    """The collectives of an embedding on two ranks, and the shape of its result."""
    config = Config(family="transformers", config=small_config(kind))
    Embedding.prepare(config)
    group = Mesh(tp=2).tensor.group
    layer = Embedding(config, "embedding", layer_context(group, sequence_parallel=True))
    with Collectives() as noted, torch.no_grad():
        y = layer(torch.zeros(2, 16, dtype=torch.int64))
    return noted.names, tuple(y.shape)


@pytest.mark.parametrize(
    ("kind", "collective"),
    [
        pytest.param("llama", "_reduce_scatter_base_", id="table alone"),
        pytest.param("gpt2", "allreduce_", id="with positions"),
    ],
)
def test_embedding_of_a_sequence_in_parts(kind, collective):
    for names, shape in run_locally(sent, 2, kind):
        assert set(names) == {collective}
        assert shape == (2, 8, 32)
