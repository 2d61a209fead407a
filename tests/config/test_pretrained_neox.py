"""model.from_pretrained of GPT-NeoX and Pythia: what config.json fixes, and what is refused."""

import pytest

from parallel3d import models
from tests.config.test_pretrained import config_of, published, refused

pytestmark = pytest.mark.pure

PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 64,
    "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 5000,
    "max_position_embeddings": 512, "layer_norm_eps": 1e-5, "rotary_emb_base": 10000,
    "rotary_pct": 0.25, "hidden_act": "gelu", "use_parallel_residual": True, "bos_token_id": 0,
    "eos_token_id": 0, "initializer_range": 0.02, "tie_word_embeddings": False,
    "classifier_dropout": 0.1, "torch_dtype": "float16", "use_cache": True,
}  # fmt: skip
# As transformers 5 writes it.
ROPE = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        ({}, {"rotary_size": 4, "rotary_emb_base": 1e4, "inner_size": 256, "activation": "gelu"}),
        ({"rotary_pct": None, "rotary_emb_base": None}, {"rotary_pct": 0.25}),
        ({"rope_parameters": ROPE}, {"rotary_pct": 0.5, "rotary_emb_base": 5e5}),
        ({"rope_scaling": {"type": "default"}}, {"rotary_pct": 0.25}),
        ({"use_parallel_residual": False}, {"use_parallel_residual": False}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"hidden_act": "gelu_fast"}, {"activation": "gelu_fast"}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_new"}),
    ],
)
def test_config_json_gives_the_model_block(changes, fixed, tmp_path):
    model = config_of(published(tmp_path / "model", PYTHIA | changes)).model
    assert {name: getattr(model, name) for name in fixed} == fixed
    assert model.family == "neox" and model.num_hidden_layers == 4
    assert models.num_params(model) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu"}, 'hidden_act = "relu": is neither GELU nor'),
        ({"attention_bias": False}, "attention_bias = false: leaves out the biases"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: is dropout"),
        ({"hidden_dropout": 0.1}, "hidden_dropout = 0.1: is dropout"),
        ({"architectures": ["GPTNeoXForQuestionAnswering"]}, "architectures = "),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'by the rule "linear"'),
        ({"rope_scaling": {"rope_type": "dynamic"}}, 'by the rule "dynamic"'),
        ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, 'by the rule "yarn"'),
        ({"rope_parameters": ROPE | {"more": 1}}, "has more, which is unknown"),
        ({"rope_parameters": [1]}, "rope_parameters = [1]: is no block"),
        ({"num_attention_heads": 5}, "num_attention_heads = 5: does not divide"),
        ({"rotary_pct": 0.2}, "rotary_pct = 0.2: makes 3 of a head's 16 features rotate"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap = 3.0: caps the logits"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(changes, said, tmp_path):
    found = refused(published(tmp_path / "model", PYTHIA | changes))
    assert said in found and found.startswith("1 problem"), found
