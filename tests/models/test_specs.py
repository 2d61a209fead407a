"""Every family's sizes against published counts and closed forms, and what its settings refuse.

Names and cuts of parameters are compared with the built modules in test_model.py, costs with torch
in test_layer_cost_of_torch.py.
"""

from dataclasses import replace
from math import sqrt

import pytest
from pydantic import ValidationError

from parallel3d.extras.scaling.runs import count
from parallel3d.models import config_class, families, layers, num_params, train_flops_per_token
from parallel3d.models.llama import spec as llama
from parallel3d.models.llama.spec import SCALINGS, RopeScaling
from parallel3d.plan.report.plan_table import parameters

pytestmark = pytest.mark.pure
WRITTEN = sorted({*families()} - {"transformers"})


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}


def small(family, **settings):
    return config_class(family)(family=family, **SIZES | settings)


def model(family, hidden, blocks, heads, vocab, **settings):
    sizes = dict(zip(SIZES, (hidden, blocks, heads, vocab), strict=True))
    return small(family, **sizes | settings)


LLAMA3 = {"vocab": 128256, "num_key_value_heads": 8}
QWEN = {"vocab": 151936, "tie_word_embeddings": True}
PUBLISHED = [
    (model("gpt", 768, 12, 12, 50257), 124_439_808),
    (model("gpt", 1024, 24, 16, 50257), 354_823_168),
    (model("gpt", 1280, 36, 20, 50257), 774_030_080),
    (model("gpt", 1600, 48, 25, 50257), 1_557_611_200),
    (model("gpt", 768, 12, 12, 50257, tie_word_embeddings=False), 124_439_808 + 50257 * 768),
    (model("llama", 4096, 32, 32, 32000), 6_738_415_616),  # Llama 2, the inner width by the rule
    (model("llama", 5120, 40, 40, 32000), 13_015_864_320),
    (
        model("llama", 8192, 80, 64, 32000, num_key_value_heads=8, intermediate_size=28672),
        68_976_648_192,
    ),
    (model("llama", 4096, 32, 32, intermediate_size=14336, **LLAMA3), 8_030_261_248),  # Llama 3
    (model("llama", 8192, 80, 64, intermediate_size=28672, **LLAMA3), 70_553_706_496),
    (
        model("llama", 896, 24, 14, num_key_value_heads=2, intermediate_size=4864,
              attention_bias=True, **QWEN),
        494_032_768,  # Qwen2 0.5B
    ),
    (
        model("llama", 1024, 28, 16, num_key_value_heads=8, intermediate_size=3072, head_dim=128,
              qk_norm=True, **QWEN),
        596_049_920,  # Qwen3 0.6B
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "count"), PUBLISHED)
def test_parameters_of_published_models(config, count):
    assert num_params(config) == count


EXPERTS = [
    (
        model("moe", 4096, 32, 32, 32000, num_key_value_heads=8, intermediate_size=14336),
        (46_702_792_704, 12_879_925_248),  # Mixtral 8x7B
    ),
    (
        model("moe", 2048, 48, 32, 151936, num_key_value_heads=4, head_dim=128, qk_norm=True,
              moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
        (30_532_122_624, 3_353_032_704),  # Qwen3-30B-A3B
    ),
    (
        model("moe", 4096, 94, 64, 151936, num_key_value_heads=4, head_dim=128, qk_norm=True,
              moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8),
        (235_093_634_560, 22_190_763_520),  # Qwen3-235B-A22B
    ),
    (
        model("moe", 2048, 16, 16, 50304, intermediate_size=1024, qk_norm=True,
              qk_norm_over="width", num_experts=64, num_experts_per_tok=8),
        (6_919_161_856, 1_282_017_280),  # OLMoE-1B-7B
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "counts"), EXPERTS)
def test_parameters_of_published_experts(config, counts):
    """All of them, and those that a token uses; an N of scaling laws is of the latter."""
    assert (num_params(config), num_params(config, active=True)) == counts
    table = config.vocab_size * config.hidden_size
    assert count(config).with_head == counts[1] - table


def test_sparse_layers_follow_the_settings():
    config = small(
        "moe",
        num_hidden_layers=8,
        first_k_dense_replace=2,
        decoder_sparse_step=4,
        n_shared_experts=2,
        moe_intermediate_size=32,
    )
    _, *blocks, _ = layers(config)
    assert [block.num_experts for block in blocks] == [0, 0, 0, 8, 0, 0, 0, 8]
    sparse = {p.name: p.shape for p in blocks[3].params}
    assert sparse["mlp.shared.gate_up.weight"] == (2, 2 * 32, 64)
    assert sparse["mlp.experts.down"] == (8, 64, 32)
    assert {p.name: p.shape for p in blocks[0].params}["mlp.down.weight"] == (64, 256)
    assert config.inner_sizes == {"moe_intermediate_size": 32, "intermediate_size": 256}


def test_active_parameters_are_shown_beside_totals(monkeypatch):
    """Mixtral-8x7B without its routers: a dense model of whose MLPs a token uses two eighths."""
    mixtral = model(
        "llama", 4096, 32, 32, 32000, num_key_value_heads=8, intermediate_size=8 * 14336
    )
    dense = layers(mixtral)
    routers = 32 * 8 * 4096
    assert num_params(mixtral, active=True) == num_params(mixtral) == 46_702_792_704 - routers
    assert count(mixtral).with_head == num_params(mixtral) - 32000 * 4096
    shares = ("mlp.gate_up.weight", 2 / 8), ("mlp.down.weight", 2 / 8)
    specs = [dense[0], *(replace(block, active=shares) for block in dense[1:-1]), dense[-1]]
    monkeypatch.setattr(llama, "layers", lambda config: specs)
    assert num_params(mixtral) == 46_702_792_704 - routers
    assert num_params(mixtral, active=True) == 12_879_925_248 - routers
    assert count(mixtral).with_head == num_params(mixtral, active=True) - 32000 * 4096
    assert parameters(dense) == "46.7B parameters"
    assert parameters(specs) == "46.7B parameters (12.9B active)"


HIDDEN = 64
BLOCKS = 3
VOCAB = 1000
SEQ = 32
INNER = 96
ATTENTION = 4 * HIDDEN * HIDDEN  # elements of its matrices


@pytest.mark.parametrize(
    ("family", "heads", "settings", "matrices", "width"),
    [
        ("gpt", 4, {}, ATTENTION + 8 * HIDDEN * HIDDEN, HIDDEN),
        (  # a token enters the router, two experts and a shared one
            "moe",
            4,
            {"moe_intermediate_size": INNER, "n_shared_experts": 1},
            ATTENTION + 8 * HIDDEN + 3 * 3 * HIDDEN * INNER,
            HIDDEN,
        ),
        (
            "llama",
            8,
            {"num_key_value_heads": 2, "intermediate_size": INNER, "head_dim": 16},
            HIDDEN * (2 * 8 * 16 + 2 * 2 * 16 + 3 * INNER),
            8 * 16,
        ),
    ],
)
def test_flops_equal_the_closed_form(family, heads, settings, matrices, width):
    """6 per matrix parameter, 12 x blocks x seq x the heads' width (arXiv:2204.02311, B)."""
    config = model(family, HIDDEN, BLOCKS, heads, VOCAB, **settings)
    expected = 6 * (BLOCKS * matrices + VOCAB * HIDDEN) + 12 * BLOCKS * SEQ * width
    assert train_flops_per_token(config, SEQ) == expected


@pytest.mark.parametrize("family", WRITTEN)
def test_weight_decay_and_initial_range_of_parameters(family):
    switches = {"attention_bias": True, "qk_norm": True} if family == "llama" else {}
    for layer in layers(small(family, **switches)):
        for p in layer.params:
            matrix = len(p.shape) > 1 and not p.name.endswith("bias")
            assert p.weight_decay == matrix
            residual = p.name in ("attention.output.weight", "mlp.down.weight", "mlp.experts.down")
            assert p.init.std == pytest.approx(0.02 / sqrt(4) if residual else 0.02 * matrix)
            is_scale = "norm" in p.name and p.name.endswith("weight")
            assert p.init.value == (1.0 if is_scale else 0.0)


def test_tied_output_is_the_embedding():
    for family in WRITTEN:
        head = layers(small(family, tie_word_embeddings=True))[-1]
        assert head.tied == (("output.weight", "embedding.token.weight"),)
        assert layers(small(family, tie_word_embeddings=False))[-1].tied == ()


def test_key_value_heads_are_never_cut():
    params = {p.name: p for p in layers(small("llama", num_key_value_heads=2))[1].params}
    keys = params["attention.qkv.k_weight"]
    assert [keys.cuts({"tensor": tp}) for tp in (1, 2, 4)] == [{0: "tensor"}, {0: "tensor"}, {}]
    assert [keys.is_partial({"tensor": tp}, False) for tp in (1, 2, 4)] == [False, False, True]


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gpt", {"width": 3}, "width"),
        (
            "llama",
            {"num_attention_heads": 5},
            "num_attention_heads = 5: does not divide hidden_size=64; use 4 heads, or set head_dim",
        ),
        (
            "llama",
            {"num_attention_heads": 64},
            "head_dim = null: makes heads of 1 features; the "
            "number must be even; use an even number, such as 2",
        ),
        (
            "llama",
            {"head_dim": 7},
            "head_dim = 7: makes heads of 7 features; the number must "
            "be even; use an even number, such as 8",
        ),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_key_value_heads = 3: does not divide num_attention_heads=4; use 2",
        ),
        (
            "llama",
            {"num_key_value_heads": 8},
            "num_key_value_heads = 8: does not divide num_attention_heads=4; use 4",
        ),
        (
            "gpt",
            {"num_attention_heads": 5},
            "num_attention_heads = 5: does not divide "
            "hidden_size=64; use 4 heads, or a hidden_size that is a multiple of 5",
        ),
        (
            "moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok = 9: is more than num_experts=8; use 8 or less",
        ),
        ("moe", {"n_group": 3}, "n_group = 3: does not divide num_experts=8; use 2"),
        ("moe", {"n_group": 8, "topk_group": 2}, "n_group = 8: leaves one expert per group"),
        ("moe", {"n_group": 2, "topk_group": 3}, "topk_group = 3: is more than n_group=2; use 2"),
        (
            "moe",
            {"n_group": 4, "num_experts_per_tok": 3},
            "num_experts_per_tok = 3: is more than "
            "the 2 experts of topk_group=1 groups; use 2 or less, or a larger topk_group",
        ),
        ("moe", {"first_k_dense_replace": 2}, "leaves no layer with experts"),
        (
            "moe",
            {"capacity_factor": 4.5},
            "capacity_factor = 4.5: allows an expert more tokens "
            "than there are; use at most 4, or null for no limit",
        ),
    ],
)
def test_bad_sizes_are_refused(family, settings, message):
    with pytest.raises(ValidationError) as error:
        small(family, **settings)
    assert message in str(error.value)


def test_bad_rope_scaling_is_refused():
    with pytest.raises(ValidationError, match=r"high_freq_factor = 1.0: is not above low_freq"):
        RopeScaling(factor=8.0, high_freq_factor=1.0)
    with pytest.raises(ValidationError):
        RopeScaling(factor=8.0, rope_type="longrope")
    with pytest.raises(
        ValidationError, match=r"attention_factor = 0.5: is not a setting of rope_type"
    ):
        RopeScaling(factor=8.0, attention_factor=0.5)


@pytest.mark.parametrize("kind", SCALINGS)
def test_shrunk_model_keeps_its_switches(kind):
    """A scaling that depends on a length begins inside the small model's sequence."""
    scaling = RopeScaling(rope_type=kind, factor=8.0)
    config = small("llama", rope_scaling=scaling)
    shrunk = llama.small(config, [2], {})
    kept = scaling.model_dump()
    if "original_max_position_embeddings" in kept:
        kept["original_max_position_embeddings"] = config.max_position_embeddings // 2
    assert shrunk == {"rope_scaling": kept}


def test_all_problems_of_a_model_are_reported_at_once():
    with pytest.raises(ValidationError, match=r"num_attention_heads = 5(.|\n)*num_key_value_he"):
        model("llama", 64, 1, 5, VOCAB, num_key_value_heads=4)


@pytest.mark.parametrize("family", WRITTEN)
def test_unresolved_vocabulary_is_refused(family):
    with pytest.raises(ValueError, match="with_vocab_size"):
        layers(small(family, vocab_size="auto"))
