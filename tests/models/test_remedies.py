"""Each remedy about a model of transformers is applied as it is written, and there is one."""

import json
import re
from itertools import product

import pytest

from parallel3d import models
from parallel3d.config import RunConfig
from parallel3d.models.llama import huggingface as llama
from parallel3d.models.llama.spec import Config as Llama
from parallel3d.models.transformers.anatomy import settings_of
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.spec import Config
from tests.config.configs import raw
from tests.models.architectures import VOCABULARY, small_config
from tests.remedies import refused

pytestmark = pytest.mark.gloo

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BIASES = ("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm")
WINDOWS = [{}, {"sliding_window": 8}]


@pytest.mark.parametrize("window", WINDOWS, ids=["no window", "window"])
@pytest.mark.parametrize("switches", [*product([False, True], repeat=4)])
def test_model_without_the_switches_that_are_named_has_a_class(switches, window):
    """Each alternative by itself; the classes are those of an export."""
    settings = dict(zip(BIASES, switches, strict=True)) | window
    try:
        assert llama._possible_classes(Llama(family="llama", vocab_size=100, **SIZES, **settings))
    except ValueError as error:
        named = re.search(r"train without (.*)$", str(error))
        for alternative in named[1].split(", or without "):
            rest = {k: v for k, v in settings.items() if k not in alternative.split(" and ")}
            assert len(rest) < len(settings)
            assert llama._possible_classes(Llama(family="llama", vocab_size=100, **SIZES, **rest))


def test_heads_that_do_not_divide_the_width_have_another_class():
    sizes = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM \(qk_norm = true\) does not"):
        llama.architecture(Llama(family="llama", vocab_size=100, **sizes))
    named = llama.architecture(Llama(family="llama", vocab_size=100, **sizes, qk_norm=True))
    assert named.architectures == ["Qwen3ForCausalLM"]


FIELDS = [
    ({}, "add it", {"model_type": "llama"}),
    ({"model_type": "zzzz"}, "use another model", {"model_type": "llama"}),
    ({"model_type": "lama"}, 'the nearest one is "llama"', {"model_type": "llama"}),
    ({"architectures": ["Qwen2ForCausalLM"]}, 'of "qwen2", which is the', {"model_type": "qwen2"}),
    ({"model_type": "gemma3"}, '"model_type": "gemma3_text"', {"model_type": "gemma3_text"}),
    ({"model_type": "llama", "hiden_size": 64}, '"hidden_size"', small_config("llama")),
    (
        {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
        "remove it, to train them unquantized",
        {"model_type": "llama"},
    ),
]


@pytest.mark.parametrize(("wrong", "remedy", "right"), FIELDS, ids=range(len(FIELDS)))
def test_field_of_a_pasted_config_is_mended(wrong, remedy, right):
    with pytest.raises(Unsupported) as caught:
        settings_of(json.dumps(wrong))
    assert remedy in caught.value.remedy
    assert settings_of(json.dumps(right))


@pytest.mark.slow  # three models are read
@pytest.mark.parametrize(
    ("kind", "field", "remedy"),
    [
        ("starcoder2", "residual_dropout", "set residual_dropout to 0"),
        ("gemma2", "attention_dropout", "set attention_dropout to 0"),
    ],
)
def test_dropout_that_depends_on_the_mesh_is_turned_off(kind, field, remedy):
    def read(value):
        fields = small_config(kind) | {field: value}
        return Config(family="transformers", config=fields, vocab_size=VOCABULARY)

    with pytest.raises(Exception, match=remedy):
        read(0.1)
    assert read(0).facts


def test_parametrization_of_an_earlier_version_is_another_one():
    def read(**block):
        block = SIZES | block
        return RunConfig.from_dict(raw(**{"parallel3d.model": block, "parallel3d.mesh": {}}))

    mup = {"parametrization": {"type": "mup", "base_width": 32}}
    with refused('use "standard", the family "gpt" or "llama", or version 0.2.0'):
        read(family="neox", **mup)
    for family in ("gpt", "llama"):
        assert read(family=family, **mup).model.parametrization.type == "mup"
    assert models.common.class_named("A", "A", "B") == "A"
    with pytest.raises(ValueError, match="use A or B"):
        models.common.class_named("C", "A", "B")


@pytest.mark.slow  # the model is read
def test_earlier_family_has_the_standard_parametrization():
    block = SIZES | {"family": "neox", "parametrization": {"type": "standard"}}
    config = RunConfig.from_dict(raw(**{"parallel3d.model": block, "parallel3d.mesh": {}}))
    assert config.model.family == "transformers"
