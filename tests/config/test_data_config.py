"""The "data" section: each source's own keys and no others, told with the remedy."""

import json

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.digest import digest_of
from parallel3d.plan.vocabulary import with_vocabulary

pytestmark = pytest.mark.pure

PART = {"source": "text", "paths": ["a.txt"], "weight": 0.5}
IDS = {"source": "megatron", "paths": ["a"]}
CHAT = {"source": "chat", "paths": ["a"]}
NO_TOKENIZER = {"tokenizer": "none", "vocab_size": 50257, "end_of_text_id": 50256}


def config_of(**data):
    model = {"family": "gpt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    block = {"model": model, "data": {"sequence_length": 8, **data}, "train": {"steps": 1}}
    return RunConfig.from_dict(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
            "parallel3d": block,
        }
    )


GOOD = [
    {"source": "jsonl", "paths": ["a/*.jsonl.gz"], "text_field": "body"},
    {"source": "parquet", "paths": ["a.parquet"]},
    {"source": "hub", "name": "owner/set", "subset": "en", "split": "train.v2"},
    {"source": "mixture", "mixture": [PART, {"source": "python-stdlib"}]},
    {"source": "mixture", "mixture": [{"source": "hub", "name": "x", "weight": 3.0}]},
    {"source": "hub", "name": "owner/set", "split": "train[:50%]+test[10:20]"},
    {"source": "text", "paths": ["a.txt"], "documents": "blank_line", "on_error": "skip"},
    {"workers": 4},
    {"source": "megatron", "paths": ["a_text_document"], "tokenizer": "gpt2"},
    {"source": "datatrove", "paths": ["a/*.ds"], **NO_TOKENIZER, "check_ids": "sample"},
    {"source": "tokens", "paths": ["a.npy"], **NO_TOKENIZER, "token_dtype": "uint32"},
    {"source": "parquet", "paths": ["a"], "token_field": "input_ids", **NO_TOKENIZER},
    {"source": "mixture", "mixture": [PART, IDS], "tokenizer": "gpt2", "end_of_text_id": 9},
    {"held_out_fraction": 0, "validation": {"web.1": {"source": "text", "paths": ["a"]}}},
    {"source": "hub", "name": "owner/set", "validation_split": None},
]


@pytest.mark.parametrize("data", GOOD)
def test_config_survives_json(data):
    config = config_of(**data)
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.data == config.data
    for key, value in data.items():
        if key not in ("mixture", "validation"):
            read_value = getattr(again.data, key)
            if isinstance(read_value, tuple):
                read_value = list(read_value)
            assert read_value == value


def test_single_path_becomes_a_list():
    assert config_of(source="text", paths="a/*.txt").data.paths == ("a/*.txt",)
    [part, _] = config_of(**mixture(paths="b.txt")).data.mixture[::-1]
    assert part.paths == ("b.txt",)


def test_removed_setting_is_dropped_with_a_note():
    config = config_of(remote_cache_bytes=10 * 2**30)
    assert "remote_cache_bytes" not in config.to_dict()["parallel3d"]["data"]
    assert "parallel3d.data.remote_cache_bytes: removed" in " ".join(config.notes)


def test_vocabulary_is_known_without_a_tokenizer():
    config = config_of(**IDS, **NO_TOKENIZER)
    assert config.model.vocab_size == "auto"
    assert with_vocabulary(config).model.vocab_size == 50257
    with pytest.raises(ConfigError, match="is not on this machine"):
        with_vocabulary(config_of(**IDS, tokenizer="gpt2"))


def mixture(**changes):
    return {"source": "mixture", "mixture": [PART, {**PART, **changes}]}


# the section, the path below data, the rule and the remedy
BAD = [
    ({"source": "csv"}, "source", '"jsonl"', "mixture"),
    ({"source": "jsonl"}, "paths = []", 'required by source "jsonl"', "corpus/*.jsonl"),
    ({"source": "hub"}, 'name = ""', 'required by source "hub"', "owner/dataset"),
    ({"source": "mixture"}, "mixture = []", 'required by source "mixture"', '"weight": 1'),
    ({"source": "hub", "name": "x", "paths": ["a"]}, "paths", 'not read by source "hub"', '"text"'),
    ({"text_field": "body"}, "text_field", "not read", 'use source "jsonl" or "parquet" or "hub"'),
    ({"subset": "x"}, "subset", "not read", 'use source "hub"'),
    ({"on_error": "ignore"}, "on_error", '"skip"', '"stop"'),
    ({"mixture": [PART]}, "mixture", "not read", 'use source "mixture"'),
    ({**mixture(), "paths": ["a"]}, "paths", 'not read by source "mixture"', "remove it"),
    (mixture(weight=0.0), "mixture.1.weight", "greater than 0", "raise it"),
    (mixture(weight=[[5, 1.0]]), "mixture.1.weight", "must begin with [0, WEIGHT]", "--help"),
    (mixture(weight=[[0, 1.0], ["1 lot", 2.0]]), "mixture.1.weight", "must be an integer",
     "whole number"),
    (mixture(name="x"), "mixture.1.name", 'not read by source "text"', 'use source "hub"'),
    (mixture(source="mixture"), "mixture.1.source", "must be", '"text"'),
    (mixture(vocab_size=300), "mixture.1.vocab_size", "not a setting", "did you mean"),
    ({"source": "mixture", "mixture": [{}]}, "mixture.0.source", "is required", "add it"),
    (mixture(wieght=1.0), "mixture.1.wieght", "not a setting", 'the nearest one is "weight"'),
    (IDS, 'tokenizer = "train"', "cannot be trained on token ids", '"none" with vocab_size'),
    (CHAT, 'tokenizer = "train"', "has no chat template", "name a folder or a tokenizer"),
    ({**CHAT, "paths": [], "tokenizer": "own"}, "paths", 'required by source "chat"', "*.jsonl"),
    ({**CHAT, "tokenizer": "own", "fim": {}}, "fim", "cannot be combined with", "remove one"),
    ({**CHAT, "tokenizer": "own", "text_field": "x"}, "text_field", 'not read by source "chat"',
     "remove it"),
    ({"validation": {"talk": CHAT}}, 'tokenizer = "train"', "has no chat template", "name a fold"),
    ({**IDS, "tokenizer": "none"}, "end_of_text_id", 'required by tokenizer "none"', "vocab_size"),
    ({**IDS, "tokenizer": "none", "end_of_text_id": 0}, "vocab_size", "is required by", "write"),
    ({**IDS, **NO_TOKENIZER, "end_of_text_id": 50257}, "end_of_text_id", "less than voc",
     "smaller"),
    ({"source": "tokens", "paths": ["s3://b/a.npy"], **NO_TOKENIZER}, "paths",
     "which only streams read", "copy the files"),
    (NO_TOKENIZER, 'tokenizer = "none"', "cannot be used with sources of text", 'use "train"'),
    ({"end_of_text_id": 0}, "end_of_text_id", "for sources of token ids", "remove it"),
    ({"token_dtype": "uint16"}, "token_dtype", "not read", 'use source "datatrove" or "tokens"'),
    ({"validation": {"web": {"source": "text"}}}, "validation.web.paths", "required", "add"),
    ({"validation": {"w b": {"source": "python-stdlib"}}}, "validation", "plain name", "letters"),
    ({"validation": {"held_out": {"source": "python-stdlib"}}}, "validation", "is reserved",
     "another"),
    ({"validation": {"a": {**PART}}}, "validation.a.weight", "must be 1", "write 1"),
    ({"validation": {"a": {"path": "x"}}}, "validation.a.path", "not a setting", '"paths"'),
    ({"validation": []}, "validation", "must be a block of settings", "{...}"),
    ({"validation_split": "dev"}, "validation_split", "not read", 'source "hub" or "mixture"'),
]  # fmt: skip


@pytest.mark.parametrize(("data", "path", "rule", "remedy"), BAD)
def test_bad_value_is_named_with_rule_and_remedy(data, path, rule, remedy):
    with pytest.raises(ConfigError) as caught:
        config_of(**data)
    [line] = [x for x in str(caught.value).splitlines() if f"  parallel3d.data.{path}" in x]
    assert rule in line and remedy in line


def test_password_in_a_url_is_never_written_and_leaves_the_digest():
    def read(password):
        url = f"https://user:{password}@host/a.bin"
        ids = {"source": "tokens", "paths": [url], "stream": True, "manifest": "m"}
        mixture = {"source": "mixture", "mixture": [{**ids, "weight": 1}, {**ids, "weight": 2}]}
        return config_of(**mixture, **NO_TOKENIZER)

    config = read("secret")
    assert json.dumps(config.to_dict()).count("user:secret@") == 2
    public = json.dumps(config.to_public_dict())
    assert "secret" not in public and public.count("user:***@") == 2
    assert RunConfig.from_dict(config.to_dict()) == config
    masked = RunConfig.from_dict(config.to_public_dict())
    assert digest_of(config) == digest_of(read("another")) == digest_of(masked)
    assert config_of().to_public_dict() == config_of().to_dict()


def test_password_is_masked_in_a_refusal():
    url = "https://user:secret@host/a.bin"
    with pytest.raises(ConfigError, match=r"user:\*\*\*@host") as caught:
        config_of(source="hub", name="a", paths=[url])
    assert "secret" not in str(caught.value)
