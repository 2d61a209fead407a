"""The Llama family's sizes against published counts, and its settings."""

from math import sqrt

import pytest
from pydantic import ValidationError

from parallel3d.model.spec import Shape
from parallel3d.models import num_params, train_flops_per_token
from parallel3d.models.llama.spec import Config, RopeScaling, layers

pytestmark = pytest.mark.pure


def llama(hidden, blocks, heads, vocab=32000, **settings):
    return Config(
        family="llama",
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        vocab_size=vocab,
        **settings,
    )


LLAMA3 = {"vocab": 128256, "num_key_value_heads": 8}
QWEN = {"vocab": 151936, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (llama(4096, 32, 32), 6_738_415_616),  # Llama 2 7B, the inner width by the rule
        (llama(5120, 40, 40), 13_015_864_320),  # Llama 2 13B
        (llama(8192, 80, 64, num_key_value_heads=8, intermediate_size=28672), 68_976_648_192),
        (llama(4096, 32, 32, intermediate_size=14336, **LLAMA3), 8_030_261_248),  # Llama 3 8B
        (llama(8192, 80, 64, intermediate_size=28672, **LLAMA3), 70_553_706_496),  # Llama 3 70B
        (
            llama(896, 24, 14, num_key_value_heads=2, intermediate_size=4864, attention_bias=True,
                  **QWEN),
            494_032_768,  # Qwen2 0.5B
        ),
        (
            llama(1024, 28, 16, num_key_value_heads=8, intermediate_size=3072, head_dim=128,
                  qk_norm=True, **QWEN),
            596_049_920,  # Qwen3 0.6B
        ),
    ],
)  # fmt: skip
def test_parameters_of_published_models(config, count):
    assert num_params(config) == count


def test_flops_closed_form():
    """6 per matrix parameter, 12 x blocks x seq x the heads' width (arXiv:2204.02311, B)."""
    hidden, blocks, vocab, seq, inner, heads, size = 64, 3, 1000, 32, 96, 8, 16
    config = llama(
        hidden, blocks, heads, vocab, num_key_value_heads=2, intermediate_size=inner, head_dim=size
    )
    matrices = blocks * hidden * (2 * heads * size + 2 * 2 * size + 3 * inner) + vocab * hidden
    expected = 6 * matrices + 12 * blocks * seq * heads * size
    assert train_flops_per_token(config, seq) == expected


def test_cost_is_linear_in_the_batch():
    for layer in layers(llama(64, 1, 4)):
        one, four = layer.cost(Shape(1, 16)), layer.cost(Shape(4, 16))
        assert four.forward_flops == 4 * one.forward_flops


def test_layers_names_and_cuts():
    config = llama(64, 2, 4, num_key_value_heads=2, intermediate_size=96, attention_bias=True,
                   qk_norm=True, tie_word_embeddings=True)  # fmt: skip
    embedding, block, _, head = layers(config)
    assert [p.name for p in embedding.params] == ["token.weight"]
    assert {p.name: (p.shape, p.tp_dim, p.units, p.partial) for p in block.params} == {
        "norm1.weight": ((64,), None, None, False),
        "attention.qkv.q_weight": ((64, 64), 0, 4, False),
        "attention.qkv.k_weight": ((32, 64), 0, 2, False),
        "attention.qkv.v_weight": ((32, 64), 0, 2, False),
        "attention.qkv.q_bias": ((64,), 0, 4, False),
        "attention.qkv.k_bias": ((32,), 0, 2, False),
        "attention.qkv.v_bias": ((32,), 0, 2, False),
        "attention.q_norm.weight": ((16,), None, None, True),
        "attention.k_norm.weight": ((16,), None, None, True),
        "attention.output.weight": ((64, 64), 1, None, False),
        "norm2.weight": ((64,), None, None, False),
        "mlp.gate_up.weight": ((2, 96, 64), 1, None, False),
        "mlp.down.weight": ((64, 96), 1, None, False),
    }
    assert head.tied == (("output.weight", "embedding.token.weight"),)
    assert layers(llama(64, 2, 4))[-1].tied == ()
    keys = next(p for p in block.params if p.name == "attention.qkv.k_weight")
    assert [keys.cut_dim(tp) for tp in (1, 2, 4)] == [0, 0, None]
    assert [keys.is_partial(tp, False) for tp in (1, 2, 4)] == [False, False, True]


def test_decay_and_start():
    for layer in layers(llama(64, 2, 4, attention_bias=True, qk_norm=True)):
        for p in layer.params:
            assert p.weight_decay == (len(p.shape) > 1)
            residual = p.name in ("attention.output.weight", "mlp.down.weight")
            std = 0.02 / sqrt(4) if residual else 0.02 * p.weight_decay
            assert p.init.std == pytest.approx(std)
            assert p.init.value == (1.0 if "norm" in p.name else 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5: does not divide hidden_size=64; "
         "use 4 heads, or give head_dim"),
        ({"num_attention_heads": 64}, "num_attention_heads = 64: makes heads of 1 features, which "
         "rotate in pairs; give an even head_dim, such as 2"),
        ({"head_dim": 7}, "head_dim = 7: makes heads of 7 features, which rotate in pairs; use 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: does not divide "
         "num_attention_heads=4; use 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8: does not divide "
         "num_attention_heads=4; use 4"),
    ],
)  # fmt: skip
def test_refused_sizes(settings, message):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ValidationError) as error:
        Config(family="llama", **(sizes | settings))
    assert message in str(error.value)


def test_refused_scaling():
    with pytest.raises(ValidationError, match=r"high_freq_factor = 1.0: is not above low_freq"):
        RopeScaling(factor=8.0, high_freq_factor=1.0)
    with pytest.raises(ValidationError):
        RopeScaling(factor=8.0, rope_type="yarn")


def test_all_problems_at_once():
    with pytest.raises(ValidationError, match=r"num_attention_heads = 5(.|\n)*num_key_value_he"):
        llama(64, 1, 5, num_key_value_heads=4)


def test_unresolved_vocabulary():
    with pytest.raises(ValueError, match="with_vocab_size"):
        layers(llama(64, 2, 4, "auto"))
