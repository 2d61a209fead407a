"""GPT-NeoX and Pythia in the family of any decoder, and their configs of earlier versions."""

import json

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.models import config_class, layers, num_params
from tests.config.configs import raw

pytestmark = pytest.mark.gloo
OLD = {
    "family": "neox",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 5000,
}


@pytest.mark.slow  # 44 layers; by default the counts of Pythia
def test_parameters_with_and_without_embeddings():
    """Those of GPT-NeoX-20B (its model card)."""
    fields = {
        "model_type": "gpt_neox",
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 4 * 6144,
        "vocab_size": 50432,
    }
    config = config_class("transformers").model_validate(
        {"family": "transformers", "config": fields}
    )
    first, *_, last = layers(config)
    output = sum(p.numel for p in last.params if p.name == "output.weight")
    own = num_params(config) - first.num_params - output
    assert (num_params(config), own) == (20_554_567_680, 19_934_859_264)


@pytest.mark.parametrize(
    ("name", "count"), [("pythia-70m", 70_426_624), ("pythia-1.4b", 1_414_647_808)]
)
def test_shipped_configs_have_the_published_number_of_parameters(name, count):
    """And train in as many steps as those did, of 1024 x 2048 tokens."""
    config = RunConfig.from_json(name)
    sizes = config.mesh
    config = config.resolve(sizes.pp * sizes.dp * sizes.tp).completed()
    assert num_params(config.model) == count
    assert (config.global_batch_size, config.data.sequence_length) == (1024, 2048)
    assert (config.num_steps, config.train.lr_schedule.warmup_steps) == (143_000, 1430)


def read(**changes):
    """The config of an earlier version; `changes` are those of its "model" block."""
    return RunConfig.from_dict(raw(**{"parallel3d.model": OLD | changes}))


def fields_of(config):
    return json.loads(config.model.config)


def test_config_of_an_earlier_version_is_translated():
    parametrization = {"type": "standard", "base_width": None}
    config = read(activation="gelu_fast", rotary_pct=0.5, parametrization=parametrization)
    assert config.model.family == "transformers" and config.model.vocab_size == 5000
    assert fields_of(config) == {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_act": "gelu_fast",
        "rotary_pct": 0.5,
    }
    assert any('"neox" is now "transformers"' in note for note in config.notes)
    again = RunConfig.from_dict(config.to_dict())
    assert again.model == config.model and not any("neox" in note for note in again.notes)


def test_settings_of_an_earlier_version_change_a_config_of_this_one():
    """As those of a command line that was written for the family neox do."""
    config = RunConfig.from_json("pythia-70m", ["--model.num_hidden_layers", "2"])
    assert config.model.num_hidden_layers == 2 and config.model.hidden_size == 512
    config = read(config={"hidden_size": 32, "intermediate_size": 48})
    assert (config.model.hidden_size, config.model.inner_size) == (32, 48)


def test_record_of_published_weights_is_kept():
    record = {"folder": "somewhere", "weights": "0123", "revision": None}
    assert read(from_pretrained=record).model.from_pretrained.folder == "somewhere"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parametrization": {"type": "mup"}}, 'parametrization.type = "mup": is not there for'),
        ({"qk_norm": True}, "parallel3d.model.qk_norm = true: is not a setting"),
        ({"hidden_size": "wide"}, 'config.hidden_size = "wide": is refused by GPTNeoXConfig: Type'),
        ({"num_attention_heads": 5}, "hidden size is not divisible by the number of attention"),
        ({"config": 3}, "parallel3d.model.config = 3: must be a block"),
        ({"from_pretrained": "a/b"}, "is beside from_pretrained, whose config.json has it"),
    ],
)
def test_config_of_an_earlier_version_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert message in str(caught.value)


def test_missing_sizes_are_named():
    block = {"family": "neox", "hidden_size": 64}
    with pytest.raises(ConfigError, match=r"num_hidden_layers: is required(.|\n)*num_attention_h"):
        RunConfig.from_dict(raw(**{"parallel3d.model": block}))
