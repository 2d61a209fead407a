"""The GPT-NeoX family's sizes against published counts, and its settings."""

from math import sqrt

import pytest
from pydantic import ValidationError

from parallel3d.config import RunConfig
from parallel3d.models import num_params, train_flops_per_token
from parallel3d.models.neox.spec import Config, layers

pytestmark = pytest.mark.pure


def neox(hidden, blocks, heads, vocab=50304, **settings):
    return Config(
        family="neox",
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        vocab_size=vocab,
        **settings,
    )


def without_embeddings(config):
    first, *_, last = layers(config)
    output = sum(p.numel for p in last.params if p.name == "output.weight")
    return num_params(config) - first.num_params - output


@pytest.mark.parametrize(
    ("config", "count", "own"),
    [
        # The model cards of Pythia, and table 1 of arXiv:2304.01373.
        (neox(512, 6, 8), 70_426_624, 18_915_328),
        (neox(768, 12, 12), 162_322_944, 85_056_000),
        (neox(1024, 24, 16), 405_334_016, 302_311_424),
        (neox(2048, 16, 8), 1_011_781_632, 805_736_448),
        (neox(2048, 24, 16), 1_414_647_808, 1_208_602_624),
        (neox(2560, 32, 32), 2_775_208_960, 2_517_652_480),
        (neox(4096, 32, 32, 50432), 6_857_302_016, 6_444_163_072),
        (neox(5120, 36, 40, 50688), 11_846_072_320, 11_327_027_200),
        # GPT-NeoX-20B (its model card).
        (neox(6144, 44, 64, 50432), 20_554_567_680, 19_934_859_264),
    ],
)
def test_parameters_of_published_models(config, count, own):
    assert (num_params(config), without_embeddings(config)) == (count, own)


@pytest.mark.parametrize(
    ("name", "count"), [("pythia-70m", 70_426_624), ("pythia-1.4b", 1_414_647_808)]
)
def test_shipped_configs_are_the_published_models(name, count):
    """And train in as many steps as those did, of 1024 x 2048 tokens."""
    config = RunConfig.from_json(name)
    sizes = config.mesh
    config = config.resolve(sizes.pp * sizes.dp * sizes.tp)
    assert num_params(config.model) == count
    assert (config.global_batch_size, config.data.sequence_length) == (1024, 2048)
    assert (config.num_steps, config.train.lr_schedule.warmup_steps) == (143_000, 1430)


def test_flops_closed_form():
    """6 per matrix parameter, 12 x blocks x seq x hidden (arXiv:2204.02311, B)."""
    hidden, blocks, vocab, seq, inner = 64, 3, 1000, 32, 96
    config = neox(hidden, blocks, 4, vocab, intermediate_size=inner)
    matrices = blocks * (4 * hidden**2 + 2 * hidden * inner) + vocab * hidden
    expected = 6 * matrices + 12 * blocks * seq * hidden
    assert train_flops_per_token(config, seq) == expected


def test_layers_names_and_cuts():
    embedding, block, _, head = layers(neox(64, 2, 4))
    assert [p.name for p in embedding.params] == ["token.weight"]
    assert {p.name: (p.shape, p.tp_dim) for p in block.params} == {
        "norm1.weight": ((64,), None),
        "norm1.bias": ((64,), None),
        "attention.qkv.weight": ((3, 64, 64), 1),
        "attention.qkv.bias": ((3, 64), 1),
        "attention.output.weight": ((64, 64), 1),
        "attention.output.bias": ((64,), None),
        "norm2.weight": ((64,), None),
        "norm2.bias": ((64,), None),
        "mlp.up.weight": ((256, 64), 0),
        "mlp.up.bias": ((256,), 0),
        "mlp.down.weight": ((64, 256), 1),
        "mlp.down.bias": ((64,), None),
    }
    assert head.tied == ()
    tied = layers(neox(64, 2, 4, tie_word_embeddings=True))[-1]
    assert tied.tied == (("output.weight", "embedding.token.weight"),)


def test_decay_and_start():
    for layer in layers(neox(64, 2, 4)):
        for p in layer.params:
            matrix = p.name.endswith("weight") and "norm" not in p.name
            assert p.weight_decay == matrix
            residual = p.name in ("attention.output.weight", "mlp.down.weight")
            assert p.init.std == pytest.approx(0.02 / sqrt(4) if residual else 0.02 * matrix)
            assert p.init.value == (1.0 if "norm" in p.name and "weight" in p.name else 0.0)


@pytest.mark.parametrize(("share", "turning"), [(0.25, 4), (1.0, 16), (0.5, 8), (0.3, 4)])
def test_features_that_turn(share, turning):
    """Of heads of 16; rounded down, as in transformers."""
    assert neox(64, 1, 4, rotary_pct=share).rotary_size == turning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5: does not divide hidden_size=64; "
         "use 4 heads, or a hidden_size that is a multiple of 5"),
        ({"num_attention_heads": 64}, "num_attention_heads = 64: makes heads of 1 feature, of "
         "which none can rotate: they do so in pairs; use 32 heads"),
        ({"rotary_pct": 0.2}, "rotary_pct = 0.2: makes 3 of a head's 16 features rotate, which "
         "they do in pairs; use 0.25"),
        ({"rotary_pct": 0.05}, "rotary_pct = 0.05: makes 0 of a head's 16 features rotate, which "
         "they do in pairs; use 0.125"),
        ({"hidden_size": 60, "rotary_pct": 1.0}, "rotary_pct = 1.0: makes 15 of a head's 15 "
         "features rotate, which they do in pairs; use 0.9334"),
        ({"rotary_pct": 0.0}, "greater than 0"),
        ({"rotary_pct": 1.5}, "less than or equal to 1"),
        ({"activation": "relu"}, "'gelu', 'gelu_fast' or 'gelu_new'"),
    ],
)  # fmt: skip
def test_refused_sizes(settings, message):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ValidationError) as error:
        Config(family="neox", **(sizes | settings))
    assert message in str(error.value)


def test_the_remedy_is_accepted():
    """Also where the share is no round number."""
    for hidden in range(8, 400, 4):
        for percent in range(1, 101):
            try:
                neox(hidden, 1, 4, rotary_pct=percent / 100)
            except ValidationError as error:
                remedy = str(error).rpartition("use ")[2].split()[0].rstrip(",;[")
                assert neox(hidden, 1, 4, rotary_pct=float(remedy)).rotary_size % 2 == 0


def test_unresolved_vocabulary():
    with pytest.raises(ValueError, match="with_vocab_size"):
        layers(neox(64, 2, 4, "auto"))
