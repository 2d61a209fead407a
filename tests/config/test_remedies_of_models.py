"""Remedies about a published model's config.json, each applied to the file as it is written."""

import pytest

from tests.config.configs import error_of
from tests.config.test_pretrained import (
    FULL,
    GPT2,
    LLAMA,
    LLAMA3,
    MISTRAL,
    QWEN3,
    SLIDING,
    config_of,
    family_of,
    published,
)
from tests.config.test_pretrained_experts import DOTS1, GLM, MIXTRAL
from tests.remedies import refused

pytestmark = pytest.mark.pure

YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 16}
MISSING = ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size")


def scaled(**settings):
    return LLAMA | {"rope_scaling": settings}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


# The file, words of the message, and the files that do what they say.
ROWS = [
    (
        GPT2 | {"architectures": ["GPT2DoubleHeadsModel"]},
        "use GPT2LMHeadModel",
        [GPT2 | {"architectures": ["GPT2LMHeadModel"]}],
    ),
    (LLAMA | {"architectures": ["LlamaForTokens"]}, "use LlamaForCausalLM", [LLAMA]),
    (
        LLAMA | {"mlp_bias": "yes"},
        "write true or false without quotes",
        [LLAMA | {"mlp_bias": True}, LLAMA | {"mlp_bias": False}],
    ),
    (
        scaled(type="mrope", factor=2.0),
        "with llama3, linear, dynamic, yarn or default",
        [
            LLAMA | {"rope_scaling": LLAMA3},
            scaled(type="linear", factor=2.0),
            scaled(type="dynamic", factor=2.0),
            LLAMA | {"rope_scaling": YARN},
            scaled(rope_type="default"),
        ],
    ),
    (scaled(type="linear"), "has no factor; add it", [scaled(type="linear", factor=2.0)]),
    (scaled(type="linear", factor=0.5), "write 1 or more", [scaled(type="linear", factor=1.0)]),
    (
        LLAMA | {"rope_scaling": YARN | {"beta_fast": 0.5}},
        "use 1.0 or more",
        [LLAMA | {"rope_scaling": YARN | {"beta_fast": 1.0}}],
    ),
    (
        LLAMA | {"rope_scaling": YARN, "rope_theta": 1.0},
        "raise it",
        [LLAMA | {"rope_scaling": YARN, "rope_theta": 1e4}],
    ),
    (
        scaled(rope_type="llama3", factor=2.0),
        "has no low_freq_factor; add it",
        [LLAMA | {"rope_scaling": LLAMA3}],
    ),
    (
        MISTRAL | {"layer_types": [SLIDING] + [FULL] * 3},
        "remove it, or use another model_type",
        [without(MISTRAL, "layer_types")],
    ),
    (LLAMA | {"num_local_experts": 8}, "remove it in a copy of the folder", [LLAMA]),
    (LLAMA | {"embedding_multiplier": 12.0}, "remove it in a copy of the folder", [LLAMA]),
    (without(LLAMA, *MISSING), "is missing; add it", [LLAMA]),
    (without(LLAMA, "model_type"), "model_type: is missing; add it", [LLAMA]),
    (LLAMA | {"hidden_size": "96"}, "write a whole number without quotes", [LLAMA]),
    (LLAMA | {"num_key_value_heads": 5}, "use 4", [LLAMA | {"num_key_value_heads": 4}]),
    (QWEN3 | {"hidden_act": "gelu"}, "is not SiLU; use another model", [QWEN3]),
    # With experts
    (GLM | {"partial_rotary_factor": 0.4}, "use 0.25", [GLM | {"partial_rotary_factor": 0.25}]),
    (MIXTRAL | {"num_experts_per_tok": 9}, "use 8 or less", [MIXTRAL | {"num_experts_per_tok": 8}]),
    (
        MIXTRAL | {"num_local_experts": None},
        "num_experts: is missing; add it",
        [without(MIXTRAL, "num_local_experts") | {"num_experts": 8}, MIXTRAL],
    ),
    (
        MIXTRAL | {"router_jitter_noise": 0.1},
        "set it to 0 in a copy of the folder",
        [MIXTRAL | {"router_jitter_noise": 0}],
    ),
    (DOTS1 | {"n_group": 3}, "use 2", [DOTS1 | {"n_group": 2}]),
]


@pytest.mark.parametrize(("wrong", "remedy", "mends"), ROWS, ids=range(len(ROWS)))
def test_config_json_is_mended_as_the_message_says(tmp_path, wrong, remedy, mends):
    family = "moe" if wrong.get("num_experts_per_tok") else family_of(wrong)
    folder = published(tmp_path / "model", wrong)
    message = error_of(**{"parallel3d.model": {"from_pretrained": str(folder), "family": family}})
    assert remedy in message, message
    for mend in mends:
        assert config_of(published(folder, mend)).model.num_hidden_layers == 4


def test_field_that_contradicts_the_folder_is_removed(tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    block = {"from_pretrained": str(folder), "hidden_size": 64}
    message = error_of(**{"parallel3d.model": block})
    assert "which says 96; remove it" in message
    assert config_of(folder).model.hidden_size == 96


def test_tokenizer_of_the_model_is_set_or_its_vocabulary_left_open(tmp_path):
    """Of a model from scratch the number can be raised; of a published one the tokenizer is."""
    config = config_of(published(tmp_path / "model", LLAMA)).resolve(4)
    with refused("set data.tokenizer to the tokenizer that the model was trained with"):
        config.with_corpus(5001, 10**6)
    assert config.with_corpus(5000, 10**6)


def test_adapter_is_merged_into_its_model(tmp_path):
    """The merged model has a config.json and weights of its own."""
    folder = published(tmp_path / "model", LLAMA)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with refused("merge it into the model with peft's merge_and_unload, save that, and name its"):
        config_of(folder)
    assert config_of(published(tmp_path / "merged", LLAMA))


def test_special_id_is_written_as_a_number_in_a_copy(tmp_path):
    folder = published(tmp_path / "model", LLAMA | {"eos_token_id": "2"})
    with refused("write the id as a whole number without quotes in a copy of the folder"):
        config_of(folder)
    assert config_of(published(tmp_path / "copy", LLAMA | {"eos_token_id": 2}))
