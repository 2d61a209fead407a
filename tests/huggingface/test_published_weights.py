"""Weights of published models by our names: every box, bit by bit, and what is refused."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint.chunks import Box
from parallel3d.config.pretrained import derive_model_block, read_config
from parallel3d.huggingface import source
from parallel3d.huggingface.conversion import import_folder
from parallel3d.huggingface.source import PublishedWeights
from tests.huggingface.published import save

pytestmark = pytest.mark.gloo

NAMES = ("gpt2", "llama2", "llama3", "qwen2", "pythia", "mixtral")


def config_of(folder):
    block = derive_model_block(folder, read_config(folder))
    return models.config_class(block["family"]).model_validate(block)


def opened(folder):
    return PublishedWeights(folder, config_of(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {name: save(name, root / name) for name in NAMES}


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "pythia"])
@settings(max_examples=15)
@given(st.data())
def test_box_equals_the_slice_of_the_whole_tensor(name, folders, data):
    weights = opened(folders[name])
    ours = data.draw(st.sampled_from(list(weights.shapes)))
    value = weights.read_whole(ours)
    first = [data.draw(st.integers(0, size - 1)) for size in value.shape]
    size = [data.draw(st.integers(1, n - a)) for n, a in zip(value.shape, first, strict=True)]
    out = torch.empty(size)
    weights.read(ours, Box(tuple(first), tuple(size)), out)
    ends = [slice(a, a + n) for a, n in zip(first, size, strict=True)]
    assert torch.equal(out, value[tuple(ends)])


def test_shards_half_precision_and_bare_names_give_the_same_model(folders, tmp_path):
    tensors = load_file(folders["gpt2"] / "model.safetensors")
    half = save("gpt2", tmp_path / "half", torch.bfloat16, max_shard_size="20KB")
    assert len(list(half.glob("model-*.safetensors"))) > 2
    exact = opened(folders["gpt2"])
    weights = opened(half)
    assert weights.dtype == torch.bfloat16 and exact.dtype == torch.float32
    for name in weights.shapes:
        assert torch.equal(weights.read_whole(name), exact.read_whole(name).bfloat16().float())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folders["gpt2"] / "config.json").read_bytes())
    names = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    # As the first GPT-2 has them: masks, and the tied head.
    names |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": names["wte.weight"] + 0}
    save_file(names, bare / "model.safetensors")
    weights = opened(bare)
    weights.check_tied()
    assert all(torch.equal(weights.read_whole(n), exact.read_whole(n)) for n in exact.shapes)
    save_file(names | {"lm_head.weight": names["wte.weight"] * 2}, bare / "model.safetensors")
    with pytest.raises(ConfigError, match="tie_word_embeddings = true"):
        opened(bare).check_tied()


def test_old_buffers_of_neox_are_ignored(folders, tmp_path):
    tensors = load_file(folders["pythia"] / "model.safetensors")
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        tensors[f"gpt_neox.layers.2.attention.{name}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["pythia"] / "config.json").read_bytes())
    weights = opened(tmp_path)
    assert len(weights.stored) == len(weights.shapes) == len(tensors) - 3


def test_rank_reads_only_its_own_bytes(folders, monkeypatch):
    reads = []
    preadv = os.preadv
    monkeypatch.setattr("parallel3d.checkpoint.chunks.GAP_BYTES", 0)
    gpt = opened(folders["gpt2"])
    llama = opened(folders["llama3"])
    monkeypatch.setattr(
        os,
        "preadv",
        lambda d, buffers, at: reads.append(len(buffers[0])) or preadv(d, buffers, at),
    )
    for weights, name, box in [
        (llama, "embedding.token.weight", Box((20, 0), (20, 32))),
        (llama, "blocks.0.attention.output.weight", Box((0, 8), (32, 8))),
        (llama, "blocks.1.mlp.gate_up.weight", Box((1, 14, 0), (1, 14, 32))),
        # Transposed there, so a rank's rows are columns.
        (gpt, "blocks.0.mlp.up.weight", Box((32, 0), (32, 32))),
        (gpt, "blocks.2.attention.qkv.weight", Box((0, 8, 0), (3, 8, 32))),
    ]:
        reads.clear()
        weights.read(name, box, torch.empty(box.shape))
        assert sum(reads) == 4 * box.numel, name


def missing(tensors):
    del tensors["model.norm.weight"]
    return "model.norm.weight is missing"


def another_shape(tensors):
    tensors["model.norm.weight"] = torch.ones(33)
    return r"model.norm.weight has the shape \[33\], but config.json says \[32\]"


def extra(tensors):
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(4)
    return "has the tensor model.layers.0.self_attn.sinks, which the model"


def quantised(tensors):
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    return "model.norm.weight has the type I8"


@pytest.mark.parametrize("damage", [missing, another_shape, extra, quantised])
def test_weights_that_contradict_config_json_are_refused(damage, folders, tmp_path):
    tensors = load_file(folders["llama2"] / "model.safetensors")
    problem = damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["llama2"] / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=problem):
        opened(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 300, -1])
def test_truncated_file_is_refused(cut, folders, tmp_path):
    data = (folders["llama2"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match="header is not that of a safetensors file"):
        PublishedWeights(tmp_path, config_of(folders["llama2"]))


def test_name_in_two_shards_is_refused(folders, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(
            (folders["llama2"] / "model.safetensors").read_bytes()
        )
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"is also in a\.safetensors"):
        PublishedWeights(tmp_path, config_of(folders["llama2"]))


@pytest.mark.parametrize(
    ("name", "value"), [("gpt2", float("nan")), ("qwen2", float("-inf")), ("mixtral", float("inf"))]
)
def test_value_that_is_not_finite_is_refused_with_its_tensor(name, value, folders, tmp_path):
    """In what is read alone: a rank that has another part of the tensor goes on to `agree`."""
    folder = tmp_path / "damaged"
    shutil.copytree(folders[name], folder)
    tensors = load_file(folder / "model.safetensors")
    stored = next(key for key, tensor in tensors.items() if tensor.dim() == 2)
    tensors[stored][3, 5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"the tensor {stored} has .* {value} at \[3, 5\], 1"
    ):
        import_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    weights = opened(folder)
    ours = next(key for key, shape in weights.shapes.items() if len(shape) == 2)
    rest = Box((8, 0), (2, weights.shapes[ours][1]))
    weights.read(ours, rest, torch.empty(rest.shape))


def test_error_of_the_disk_is_not_one_of_the_format(folders, monkeypatch):
    def broken(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(source, "read_header", broken)
    with pytest.raises(CheckpointError, match=r"cannot be read: Input/output error$"):
        opened(folders["gpt2"])
