"""A published model that is named on the command line, above a model that a file has."""

import json

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from tests.config.configs import raw
from tests.config.test_pretrained import GPT2, LLAMA, published

pytestmark = pytest.mark.pure


def test_on_the_command_line_it_takes_the_place_of_the_files_model(tmp_path):
    folder = published(tmp_path / "model", LLAMA)
    own = raw(**{"parallel3d.model.initializer_range": 0.01, "parallel3d.model.resid_pdrop": 0.1})
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(own))
    named = ["--parallel3d.model.from_pretrained", str(folder)]
    config = RunConfig.from_json(str(file), named)
    model = config.model
    assert (model.family, model.hidden_size, model.initializer_range) == ("llama", 96, 0.01)
    gone = "family, hidden_size, num_hidden_layers, num_attention_heads, resid_pdrop"
    assert f"model: {gone} of the config give way to {folder}" in config.notes
    short = ["--model.from_pretrained", str(folder), "--model.initializer_range", "0.02"]
    assert RunConfig.from_json(str(file), short).model.initializer_range == 0.02
    # Resolved, it is like any other: the same run is found again, and goes on.
    assert RunConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(ConfigError, match=r"hidden_size = 64: contradicts"):
        RunConfig.from_json(str(file), [*named, "--parallel3d.model.hidden_size", "64"])
    own["parallel3d"]["model"]["from_pretrained"] = str(folder)
    file.write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"hidden_size = 64: contradicts"):
        RunConfig.from_json(str(file))
    assert RunConfig.from_json(str(file), named).model.hidden_size == 96


def test_on_the_command_line_dropout_of_the_file_stays(tmp_path):
    folder = published(tmp_path / "model", GPT2)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(raw(**{"parallel3d.model.resid_pdrop": 0.2})))
    config = RunConfig.from_json(str(file), ["--model.from_pretrained", str(folder)])
    assert config.model.resid_pdrop == 0.2 and not any("pdrop" in note for note in config.notes)
