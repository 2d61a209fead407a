"""Which models a config may give to evaluate a checkpoint: those of equal numbers."""

import json

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.checkpoint.manifest import STATE
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.train.evaluate_checkpoint import evaluation_config
from tests.config.configs import raw
from tests.config.test_pretrained import LLAMA, published

pytestmark = pytest.mark.gloo

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 5000}
OTHER = [
    ("gpt", {}, {"max_position_embeddings": 512}, "max_position_embeddings = 512"),
    ("gpt", {}, {"intermediate_size": 64}, "intermediate_size = 64: {} was trained with null"),
    ("llama", {"rope_theta": 5e5}, {}, "rope_theta = 10000.0: {} was trained with 500000.0"),
    ("llama", {}, {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
]


def asked(tmp_path, trained, given):
    """Evaluate a checkpoint of one model by the config of another: blocks of theirs."""
    configs = [raw(**{"parallel3d.model": block}) for block in (trained, given)]
    state = {"config": RunConfig.from_dict(configs[0]).to_dict()}
    (tmp_path / STATE).write_text(json.dumps(state))
    (tmp_path / "ds.json").write_text(json.dumps(configs[1]))
    return evaluation_config(tmp_path, Launch(0, 1, 0), file=str(tmp_path / "ds.json")).model


def block_of(family, settings):
    return {"family": family, **SIZES, "max_position_embeddings": 128, **settings}


def test_initial_weights_are_not_compared_with_model(tmp_path):
    given = block_of("gpt", {"initializer_range": 0.1, "resid_pdrop": 0.5, "vocab_size": "auto"})
    assert asked(tmp_path, block_of("gpt", {}), given).initializer_range == 0.1


def test_moved_published_folder_is_accepted(tmp_path):
    folder = published(tmp_path / "old", LLAMA)
    trained = RunConfig.from_dict(raw(**{"parallel3d.model": {"from_pretrained": str(folder)}}))
    folder.rename(tmp_path / "new")
    block = trained.model.model_dump(mode="json")
    for given in ({"from_pretrained": str(tmp_path / "new")}, block | {"from_pretrained": None}):
        assert asked(tmp_path, block, given).hidden_size == 96


@pytest.mark.parametrize(("family", "trained", "given", "message"), OTHER)
def test_another_model_is_refused(family, trained, given, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        asked(tmp_path, block_of(family, trained), block_of(family, given))
    assert str(caught.value).startswith(f"parallel3d.model.{message.format(tmp_path)}")
