"""model.from_pretrained: the block that a folder's config.json fixes, and what is refused."""

import json
import os
import time

import numpy
import pytest
from safetensors.numpy import save_file

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config import pretrained as module
from parallel3d.models.llama.spec import RopeScaling
from tests.config.configs import error_of, raw

pytestmark = pytest.mark.pure

# Transformers 5 writes them so; fields that do not describe the architecture are left out.
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 16,
    "n_layer": 4,
    "n_positions": 128,
    "vocab_size": 5000,
    "n_inner": None,
    "resid_pdrop": 0.1,
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"max_length": 50}},
    "bos_token_id": 50256,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 5000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 6,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "is_llama_config": True,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_type": "llama3",
}
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 16}  # without its original length
BIASED = {"attention_bias": True, "attention_output_bias": True}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 256,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 64,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "is_llama_config": None,
}
MINISTRAL = MISTRAL | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}
FULL = "full_attention"
SLIDING = "sliding_attention"
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def windows(window, *types):
    return {"sliding_window": window, "layer_types": types or None}


def without(config, name):
    return {key: value for key, value in config.items() if key != name}


def scaled(kind, **settings):
    return {"rope_scaling": RopeScaling(rope_type=kind, **settings)}


def published(folder, config, weights=("model.safetensors",)):
    """A folder with this config.json, and files of weights without a tensor."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in weights:
        (folder / name).write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def config_of(folder, **changes):
    return RunConfig.from_dict(
        raw(**{"parallel3d.model": {"from_pretrained": str(folder)}}, **changes)
    )


def refused(folder, **model):
    return error_of(**{"parallel3d.model": {"from_pretrained": str(folder)} | model})


def family_of(config):
    """The hand-written family of a config.json; the family of any decoder is not asked."""
    return {"gpt2": "gpt"}.get(config.get("model_type"), "llama")


MODEL_BLOCKS = [
    (GPT2, {"family": "gpt", "inner_size": 256, "tie_word_embeddings": True}),
    (GPT2 | {"n_inner": 96, "tie_word_embeddings": False}, {"inner_size": 96}),
    (LLAMA, {"family": "llama", "rope_theta": 5e5, "kv_heads": 8, "qk_norm": False}),
    (LLAMA | {"num_key_value_heads": None}, {"kv_heads": 16}),
    (LLAMA | {"rope_scaling": LLAMA3}, {"max_position_embeddings": 512}),
    (LLAMA | {"attention_bias": True, "attention_dropout": 0.1}, {**BIASED, "attn_pdrop": 0.0}),
    (LLAMA | {"mlp_bias": True}, {"mlp_bias": True, "attention_bias": False}),
    (QWEN2 | {"attention_bias": True}, {"attention_bias": True, "attention_output_bias": False}),
    (QWEN3 | {"attention_bias": True}, {**BIASED, "qk_norm": True, "mlp_bias": False}),
    (LLAMA | {"rope_scaling": {"type": "default"}}, {"rope_scaling": None}),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}, scaled("linear", factor=2.0)),
    (QWEN3 | {"rope_scaling": {"type": "dynamic", "factor": 2}}, scaled("dynamic", factor=2.0)),
    (QWEN2 | {"rope_scaling": YARN | {"mscale": None}},
     scaled("yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=16.0)),
    (LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 7e5}, "rope_theta": None},
     {"rope_theta": 7e5}),
    (MISTRAL, {"max_position_embeddings": 512, "attention_bias": False, **windows(256)}),
    (MISTRAL | {"sliding_window": None}, windows(None)),
    (without(MISTRAL, "sliding_window"), windows(4096)),
    (MISTRAL | {"layer_types": ["sliding_attention"] * 4}, windows(256)),
    (MINISTRAL, windows(256, FULL, SLIDING, SLIDING, SLIDING)),
    (MINISTRAL | {"layer_types": None}, windows(256)),
    (MINISTRAL | {"layer_types": [FULL] * 4}, windows(None)),
    (QWEN2 | {"use_sliding_window": True}, windows(64, FULL, FULL, SLIDING, SLIDING)),
    (QWEN3 | {"use_sliding_window": True, "max_window_layers": 0}, windows(64)),
    (QWEN2, {"attention_bias": True, "max_position_embeddings": 512}),
    (QWEN2 | {"layer_types": ["full_attention"] * 4}, {"qk_norm": False}),
    (QWEN3 | {"head_dim": 128}, {"qk_norm": True, "head_size": 128, "attention_bias": False}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "fixed"), MODEL_BLOCKS)
def test_config_json_determines_the_model_block(config, fixed, tmp_path):
    model = config_of(published(tmp_path / "model", config)).model
    assert {name: getattr(model, name) for name in fixed} == fixed
    assert model.vocab_size == 5000 and model.num_hidden_layers == 4
    if model.family == "llama" and model.rope_scaling and "rope_scaling" not in fixed:
        assert model.rope_scaling.model_dump() == LLAMA3
    assert models.num_params(model) > 0


REFUSED = [
    (GPT2 | {"activation_function": "relu"}, '= "relu": is not the tanh approximation'),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights = false"),
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention = true"),
    (GPT2 | {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures = "),
    (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
    (LLAMA | {"hidden_act": "gelu"}, 'hidden_act = "gelu": is not SiLU'),
    (MISTRAL | {"attention_bias": True}, "attention_bias = true: adds biases, which are"),
    (QWEN3 | {"mlp_bias": True}, "mlp_bias = true: adds biases, which are not"),
    (LLAMA | {"mlp_bias": "yes"}, 'mlp_bias = "yes": must be true or false'),
    (LLAMA | {"rope_interleaved": True}, "rope_interleaved = true"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: rotates only part"),
    (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, '{"rope_type": "longrope"'),
    (LLAMA | {"rope_scaling": {"type": "mrope", "factor": 2.0}}, '{"type": "mrope"'),
    (LLAMA | {"rope_scaling": {"type": "linear"}}, "has no factor; add it"),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5: must be at least"),
    (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "beta_slow": 1}}, "has beta_sl"),
    (LLAMA | {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast = 0.5: is below beta_slow"),
    (LLAMA | {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0: must be greater than 1"),
    (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
    (LLAMA | {"rope_scaling": LLAMA3 | {"more": 1}}, "has more, which is unknown"),
    (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters = "),
    (MISTRAL | {"layer_types": [SLIDING] + [FULL] * 3}, "is ignored by the class, which has"),
    (QWEN3 | {"layer_types": [SLIDING] * 4}, "has layers with a window, but the class has none"),
    (LLAMA | {"layer_types": [SLIDING] * 4}, "has layers with a window, but the class has none"),
    (QWEN3 | {"layer_types": ["linear_attention"] * 4}, "layer_types = "),
    (LLAMA | {"num_local_experts": 8}, "num_local_experts = 8: is unknown and may change what"),
    (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: caps the attention"),
    (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: caps the logits"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config = "),
    (LLAMA | {"auto_map": {"AutoModel": "x.Y"}}, "auto_map = "),
    (LLAMA | {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0: is unknown"),
    (
        LLAMA | {"kv_lora_rank": 512},
        "kv_lora_rank = 512: compresses keys and values (multi-head latent attention), which",
    ),
    ({"model_type": "llama"}, "hidden_size: is missing; add it"),
    ({}, "model_type: is missing; add it"),
    (LLAMA | {"hidden_size": "96"}, 'hidden_size = "96": must be an integer'),
    (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads = 5: does not divide"),
    # fields of other kinds
    (LLAMA | {"layer_types": [["x"]] * 4}, "]: has layers that do not attend to all tokens or to"),
    (MISTRAL | {"layer_types": [{}]}, "layer_types = [{}]: has layers that do not attend"),
    (LLAMA | {"layer_types": "full_attention"}, 'layer_types = "full_attention": has layers'),
    (MISTRAL | {"sliding_window": "a"}, 'sliding_window = "a": must be'),
]  # fmt: skip


def test_field_of_a_wrong_type_gives_a_message(tmp_path):
    folder = published(tmp_path / "model", LLAMA | {"rope_parameters": [1]})
    assert f"{folder / 'config.json'}: has a field that cannot be read" in refused(folder)


@pytest.mark.parametrize(("config", "expected"), REFUSED)
def test_unsupported_feature_is_refused_by_its_field(config, expected, tmp_path):
    folder = published(tmp_path / "model", config)
    message = refused(folder, family=family_of(config))
    assert expected in message, message
    assert f"{folder / 'config.json'}: " in message or "parallel3d.model." in message
    assert "; " in message.splitlines()[1], "a remedy"


def test_all_unsupported_features_are_reported_at_once(tmp_path):
    folder = published(tmp_path / "model", LLAMA | {"hidden_act": "relu", "rope_interleaved": True})
    assert refused(folder, family="llama").startswith("2 problems in ")


GEMMA3 = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vocab_size": 96}
REFUSED_BY_ALL = [
    (GEMMA3, ['model_type = "gemma3": reads more than text', "gemma3_text"]),
    (LLAMA | {"model_type": "phi3", "quantization_config": {"bits": 4}}, ["quantizes the weights"]),
    (LLAMA | {"model_type": "phi3", "vocab_size": None}, ["vocab_size = null: must be an integer"]),
    (
        LLAMA | {"hidden_act": "gelu", "vocab_size": 0},
        ['hidden_act = "gelu": is not SiLU', "vocab_size = 0: must be"],
    ),
]


@pytest.mark.parametrize(("config", "expected"), REFUSED_BY_ALL)
def test_refusal_of_any_decoder_names_each_reason(config, expected, tmp_path):
    message = refused(published(tmp_path / "model", config))
    assert all(reason in message for reason in expected), message


def test_contradiction_names_both_values(tmp_path):
    folder = published(tmp_path / "model", LLAMA | {"rope_scaling": LLAMA3})
    message = refused(folder, family="gpt", hidden_size=64)
    path = f"contradicts {folder / 'config.json'}, which says"
    assert message.startswith("2 problems")
    assert f"parallel3d.model.hidden_size = 64: {path} 96; remove it" in message
    assert f'parallel3d.model.family = "gpt": {path} "llama"' in message
    same = {"family": "llama", "hidden_size": 96, "vocab_size": "auto", "head_dim": None}
    same |= {"rope_scaling": None, "initializer_range": 0.01}
    config = config_of(folder, **{f"parallel3d.model.{name}": x for name, x in same.items()})
    assert config.model.vocab_size == 5000 and config.model.initializer_range == 0.01


def test_dropout_comes_from_the_user(tmp_path):
    folder = published(tmp_path / "model", GPT2)
    assert config_of(folder).model.resid_pdrop == 0.0
    assert config_of(folder, **{"parallel3d.model.resid_pdrop": 0.2}).model.resid_pdrop == 0.2


def test_resolved_config_does_not_read_the_folder(tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    config = config_of(folder)
    origin = config.model.from_pretrained
    assert origin.folder == str(folder) and len(origin.weights) == 32 and not origin.revision
    os.rename(folder, tmp_path / "gone")
    assert RunConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert "is not a folder; name a folder with config.json" in refused(folder)


def test_digest_depends_on_the_weights(tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    digests = set()
    for last in (0, 1):
        save_file({"x": numpy.array([1, last])}, folder / "model.safetensors")
        digests.add(module.digest_of(folder))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), "has no model.safetensors and no index of shards"),
        (("pytorch_model.bin",), "pytorch_model.bin is a pickle, which can run code and is never"),
    ],
)
def test_unreadable_weights_are_refused_at_once(files, expected, tmp_path):
    message = refused(published(tmp_path / "model", LLAMA, files))
    assert expected in message and ("save_pretrained" in message) == bool(files)


def test_index_with_wrong_shards_is_refused(tmp_path):
    folder = published(tmp_path / "model", LLAMA, ("a.safetensors",))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert "b.safetensors: is missing, but the index lists it" in refused(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    assert "'../a.safetensors', which is not a shard" in refused(folder)
    index.write_text("[]")
    assert "is not a valid index" in refused(folder)


@pytest.mark.parametrize(
    ("text", "expected"), [("{", "the text ends there"), ("[]", "one object")], ids=["cut", "list"]
)
def test_invalid_config_json_is_refused(text, expected, tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    (folder / "config.json").write_text(text)
    assert expected in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json: is missing" in refused(folder)
    assert "is not a folder; name a folder" in refused(folder / "model.safetensors")


def test_unknown_model_is_refused_without_waiting_for_a_network(monkeypatch):
    monkeypatch.setattr(module, "why_unreachable", lambda: "no answer of mine")
    begin = time.monotonic()
    message = refused("nobody/nothing-9@main")
    assert time.monotonic() - begin < 10
    assert "is not a local folder" in message
    assert "(no answer of mine)" in message


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_hub_model_is_recorded_with_its_commit(tmp_path, monkeypatch):
    """From the hub's own cache, which is read without a network, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "why_unreachable", lambda: "no answer of mine")
    cached = tmp_path / "models--somebody--small"
    for folder in ("refs", "snapshots"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs/main").write_text(COMMIT)
    published(cached / "snapshots" / COMMIT, LLAMA, ())
    for name in ("somebody/small", "somebody/small@main", f"somebody/small@{COMMIT}"):
        origin = config_of(name).model.from_pretrained
        assert (origin.folder, origin.revision) == ("somebody/small", COMMIT)
        assert origin.weights is None, "the commit identifies the weights"
    message = refused("somebody/small@other")
    assert "cannot be fetched from the hub or its cache (no answer of mine)" in message


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    config = config_of(published(tmp_path / "model", LLAMA)).resolve(4)
    with pytest.raises(
        ConfigError, match="vocab_size = 5000: is smaller than the tokenizer's 5001"
    ):
        config.with_corpus(5001, 10**6)
    assert config.with_corpus(4000, 10**6).model.vocab_size == 5000


def test_from_pretrained_on_the_command_line_replaces_the_model(tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    file_config = raw(
        **{"parallel3d.model.initializer_range": 0.01, "parallel3d.model.resid_pdrop": 0.1}
    )
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(file_config))
    named = ["--parallel3d.model.from_pretrained", str(folder)]
    config = RunConfig.from_json(str(file), named)
    model = config.model
    assert (model.family, model.hidden_size, model.initializer_range) == ("llama", 96, 0.01)
    short = ["--model.from_pretrained", str(folder), "--model.initializer_range", "0.02"]
    assert RunConfig.from_json(str(file), short).model.initializer_range == 0.02
    # Resolved, it is like any other: the same run is found again, and goes on.
    assert RunConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(ConfigError, match=r"hidden_size = 64: contradicts"):
        RunConfig.from_json(str(file), [*named, "--parallel3d.model.hidden_size", "64"])
    file_config["parallel3d"]["model"]["from_pretrained"] = str(folder)
    file.write_text(json.dumps(file_config))
    with pytest.raises(ConfigError, match=r"hidden_size = 64: contradicts"):
        RunConfig.from_json(str(file))
    assert RunConfig.from_json(str(file), named).model.hidden_size == 96


def test_from_pretrained_on_the_command_line_keeps_the_dropout(tmp_path):
    folder = published(tmp_path / "model", GPT2)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(raw(**{"parallel3d.model.resid_pdrop": 0.2})))
    config = RunConfig.from_json(str(file), ["--model.from_pretrained", str(folder)])
    assert config.model.resid_pdrop == 0.2 and not any("pdrop" in note for note in config.notes)
