"""The GPT family's sizes against published and closed-form counts."""

from math import sqrt

import pytest
from pydantic import ValidationError

from parallel3d.model.spec import Shape
from parallel3d.models import num_params, train_flops_per_token
from parallel3d.models.gpt.spec import Config, layers

pytestmark = pytest.mark.pure


def gpt(hidden, blocks, heads, vocab=50257, **settings):
    return Config(
        family="gpt",
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        vocab_size=vocab,
        **settings,
    )


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((768, 12, 12), 124_439_808),
        ((1024, 24, 16), 354_823_168),
        ((1280, 36, 20), 774_030_080),
        ((1600, 48, 25), 1_557_611_200),
    ],
)
def test_parameters_of_gpt2(sizes, count):
    assert num_params(gpt(*sizes)) == count
    untied = gpt(*sizes, tie_word_embeddings=False)
    assert num_params(untied) == count + 50257 * sizes[0]


def test_flops_closed_form():
    """6 per matrix parameter, 12 x blocks x seq x hidden for attention (arXiv:2204.02311, B)."""
    hidden, blocks, vocab, seq = 64, 3, 1000, 32
    matrices = blocks * 12 * hidden * hidden + vocab * hidden
    expected = 6 * matrices + 12 * blocks * seq * hidden
    assert train_flops_per_token(gpt(hidden, blocks, 4, vocab), seq) == expected


def test_cost_is_linear_in_the_batch():
    for layer in layers(gpt(64, 1, 4)):
        one, four = layer.cost(Shape(1, 16)), layer.cost(Shape(4, 16))
        assert four.forward_flops == 4 * one.forward_flops
    assert layers(gpt(64, 1, 4))[0].cost(Shape(1, 16)).forward_flops == 0


def test_layers_names_and_cuts():
    embedding, first, second, head = layers(gpt(64, 2, 4, intermediate_size=100))
    names = [layer.name for layer in (embedding, first, second, head)]
    assert names == ["embedding", "blocks.0", "blocks.1", "head"]
    assert [layer.build.rpartition(":")[2] for layer in (embedding, first, head)] == [
        "Embedding",
        "Block",
        "Head",
    ]
    assert {p.name: (p.shape, p.tp_dim) for p in first.params} == {
        "norm1.weight": ((64,), None),
        "norm1.bias": ((64,), None),
        "attention.qkv.weight": ((3, 64, 64), 1),
        "attention.qkv.bias": ((3, 64), 1),
        "attention.output.weight": ((64, 64), 1),
        "attention.output.bias": ((64,), None),
        "norm2.weight": ((64,), None),
        "norm2.bias": ((64,), None),
        "mlp.up.weight": ((100, 64), 0),
        "mlp.up.bias": ((100,), 0),
        "mlp.down.weight": ((64, 100), 1),
        "mlp.down.bias": ((64,), None),
    }
    assert head.tied == (("output.weight", "embedding.token.weight"),)


def test_decay_and_start():
    for layer in layers(gpt(64, 2, 4)):
        for p in layer.params:
            assert p.weight_decay == (len(p.shape) > 1 and not p.name.endswith("bias"))
            residual = p.name in ("attention.output.weight", "mlp.down.weight")
            std = 0.02 / sqrt(4) if residual else 0.02 * p.weight_decay
            assert p.init.std == pytest.approx(std)
            is_norm_scale = "norm" in p.name and p.name.endswith("weight")
            assert p.init.value == (1.0 if is_norm_scale else 0.0)


def test_unresolved_vocabulary():
    with pytest.raises(ValueError, match="with_vocab_size"):
        layers(gpt(64, 2, 4, "auto"))


def test_config_is_strict():
    with pytest.raises(ValidationError):
        gpt(64, 2, 4, width=3)
