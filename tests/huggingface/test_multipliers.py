"""Models with multipliers exported: folded into the weights, proved by the logits, or refused."""

import math
from unittest.mock import patch

import pytest

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.huggingface import weight_files
from parallel3d.huggingface.weight_files import WeightFiles
from parallel3d.models.common import scales_of
from tests.huggingface.checkpoints import small
from tests.huggingface.test_export import exported

pytestmark = pytest.mark.gloo

MUP = {
    "type": "mup",
    "base_width": 24,
    "base_head_size": 3,
    "base_depth": 1,
    "input_multiplier": 1.5,
    "output_multiplier": 0.7,
}
EXACT = {"type": "mup", "base_width": 8, "base_head_size": 2, "base_depth": 1}  # powers of two
GROUPED = {"tie_word_embeddings": True, "num_key_value_heads": 2}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
# Every family that is found, and what else some of them can be.
MODELS = {
    family: (family, GROUPED if family == "llama" else {})
    for family in models.families()
    if "parametrization" in models.config_class(family).model_fields
} | {
    "gpt, untied": ("gpt", {"tie_word_embeddings": False}),
    "qwen2": ("llama", {"attention_bias": True}),
    "llama, biases": ("llama", BIASES),
    "qwen3": ("llama", {"qk_norm": True, "head_dim": 16}),
}


def wide(family, mup, **settings):
    return small(family, parametrization=mup, max_position_embeddings=64, **settings)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n not in models.families() else n for n in MODELS],
)
def test_every_multiplier_is_folded(name, tmp_path):
    family, settings = MODELS[name]
    config = wide(family, MUP, **settings)
    scales = scales_of(config)
    assert not any(math.isclose(x, 1) for x in (scales.input, scales.branch, scales.query))
    proof = exported(config, tmp_path)
    assert proof.ok and proof.checked[-1].startswith("logits"), proof


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_logits_detect_a_missing_multiplier(family, tmp_path):
    with patch.object(weight_files, "fold", lambda value, factors: value):
        proof = exported(wide(family, MUP), tmp_path)
    assert not proof.ok and "logits: differ by up to" in proof.differs[0], proof


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_powers_of_two_are_exact_in_half_precision(dtype, tmp_path):
    proof = exported(wide("gpt", EXACT), tmp_path, dtype)
    assert proof.ok and len(proof.checked) == 4, proof


def test_rounding_in_half_precision_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        exported(wide("gpt", MUP), tmp_path, "bf16")
    for text in (
        "embedding.token.weight",
        "has the multiplier 1.5",
        "not a power of two",
        "--dtype fp32",
    ):
        assert text in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_own_names_keep_own_weights():
    """Where transformers has no class, what is saved is ours, multipliers and all."""
    config = wide("llama", MUP, attention_bias=True, qk_norm=True)
    layout = WeightFiles(config)
    assert layout.refusal
    from torch import ones

    (value,) = layout.converted("embedding.token.weight", ones(300, 32)).values()
    assert (value == 1).all()
