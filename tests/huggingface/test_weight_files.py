"""Where weights lie: what the safetensors library reads, in shards as transformers cuts them."""

import json

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.huggingface.weight_files import (
    DTYPES,
    INDEX,
    WeightFiles,
    bytes_of,
    create,
    write_tensor,
)
from tests.models.families import EVERY_FAMILY, small, weights_of

pytestmark = pytest.mark.gloo


def write(folder, layout):
    """Write a folder, the last of our parameters first."""
    create(folder, layout)
    for name, value in reversed(weights_of(layout.config).items()):
        for stored_name, tensor in layout.converted(name, value).items():
            write_tensor(folder, layout, stored_name, tensor)


def read(folder):
    """Name -> file and tensor, in the files' order of bytes."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {name: (path.name, file.get_tensor(name)) for name in file.offset_keys()}
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [small("gpt"), small("llama", num_key_value_heads=2)], ids=repr)
def test_shards_are_those_of_transformers(tmp_path, config, dtype):
    layout = WeightFiles(config, DTYPES[dtype], shard_bytes=9_000)
    write(tmp_path / "out", layout)
    expected = models.huggingface(config.family).to_huggingface(config, weights_of(config))
    expected = {name: value.to(DTYPES[dtype]) for name, value in expected.items()}
    stored = read(tmp_path / "out")
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(stored[name][1], value) and stored[name][1].dtype == value.dtype, name

    split = split_torch_state_dict_into_shards(
        {name: value.clone() for name, value in expected.items()}, max_shard_size=9_000
    )
    assert len(split.filename_to_tensors) > 2
    assert {name: file for name, (file, _) in stored.items()} == split.tensor_to_filename
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == split.tensor_to_filename
    assert index["metadata"]["total_size"] == split.metadata["total_size"]
    for file in layout.files:
        assert (tmp_path / "out" / file).stat().st_size == layout.file_size(file)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_class_named_by_the_config_has_these_tensors(name):
    """Of each switch of each family, under the names in files; the meta device holds no values."""
    layout = WeightFiles(EVERY_FAMILY[name])
    if layout.refusal:
        assert layout.names.keys() == {n for own in layout.names.values() for n in own}
        return
    settings = models.huggingface(layout.config.family).architecture(layout.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    assert type(model).__name__ == settings.architectures[0]
    written = revert_weight_conversion(model, dict(model.named_parameters()))
    shapes = {name: tuple(value.shape) for name, value in written.items()}
    assert shapes == {name: place.shape for name, place in layout.places.items()}


def test_sizes():
    sizes = {
        "5GB": 5 * 10**9,
        "500 MB": 5 * 10**8,
        "7": 7,
        "1kb": 1000,
        "5GiB": 5 * 2**30,
        "1e9": 10**9,
    }
    assert {text: bytes_of(text) for text in sizes} == sizes
    for text in ("", "0GB", "-1GB", "1.5", "GB", "1e30"):
        with pytest.raises(ConfigError, match="must be a size such as 5GB"):
            bytes_of(text)
