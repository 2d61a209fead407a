"""Checkpoints of earlier versions, written by hand as those wrote them, on today's meshes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from parallel3d.huggingface.source import CheckpointSource
from parallel3d.models.earlier import Stored
from tests.checkpoint.folders import FIRST, KINDS, SECOND, seal, state_of, write_tensors
from tests.checkpoint.resharding import MODELS, STEPS, Side, load_all
from tests.config.configs import raw

pytestmark = pytest.mark.gloo
HEADS = 4
SIZE = 8
HIDDEN = 32
INNER = 64
VOCAB = 260
LAYERS = 4
# By the name of a parameter: that of an earlier version, and the shape there.
LAYER = {
    "layer.input_layernorm.weight": ("norm1.weight", (HIDDEN,)),
    "layer.input_layernorm.bias": ("norm1.bias", (HIDDEN,)),
    "layer.attention.query_key_value.weight": ("attention.qkv.weight", (3, HIDDEN, HIDDEN)),
    "layer.attention.query_key_value.bias": ("attention.qkv.bias", (3, HIDDEN)),
    "layer.attention.dense.weight": ("attention.output.weight", (HIDDEN, HIDDEN)),
    "layer.attention.dense.bias": ("attention.output.bias", (HIDDEN,)),
    "layer.post_attention_layernorm.weight": ("norm2.weight", (HIDDEN,)),
    "layer.post_attention_layernorm.bias": ("norm2.bias", (HIDDEN,)),
    "layer.mlp.dense_h_to_4h.weight": ("mlp.up.weight", (INNER, HIDDEN)),
    "layer.mlp.dense_h_to_4h.bias": ("mlp.up.bias", (INNER,)),
    "layer.mlp.dense_4h_to_h.weight": ("mlp.down.weight", (HIDDEN, INNER)),
    "layer.mlp.dense_4h_to_h.bias": ("mlp.down.bias", (HIDDEN,)),
}
ALL = {
    "embedding.embed_in.table.weight": ("embedding.token.weight", (VOCAB, HIDDEN)),
    "head.tail.final_layer_norm.weight": ("head.norm.weight", (HIDDEN,)),
    "head.tail.final_layer_norm.bias": ("head.norm.bias", (HIDDEN,)),
    "head.output.weight": ("head.output.weight", (VOCAB, HIDDEN)),
} | {
    f"blocks.{n}.{new}": (f"blocks.{n}.{old}", shape)
    for n in range(LAYERS)
    for new, (old, shape) in LAYER.items()
}


def heads_in_turn(value):
    """Query, key and value [3, heads x size, ...] as GPT-NeoX has them: those of each head."""
    rows = [
        value[part, head * SIZE + row]
        for head in range(HEADS)
        for part in range(3)
        for row in range(SIZE)
    ]
    return np.stack(rows)


def write(root, source):
    """A checkpoint of family neox in two files, and what it holds by today's names."""
    folder = root / str(source) / f"step-{STEPS}"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = ({}, {})
    reference = {}
    for name, (old, shape) in ALL.items():
        for kind in KINDS:
            value = rng.normal(size=shape).astype("<f4")
            is_fused = "query_key_value" in name
            reference[f"{name}|{kind}"] = heads_in_turn(value) if is_fused else value
            dim = 1 if is_fused else 0
            first, second = np.split(value, 2, dim)
            at = [0] * value.ndim
            files[0][f"{old}|{kind}|{','.join(map(str, at))}"] = np.ascontiguousarray(first)
            at[dim] = first.shape[dim]
            files[1][f"{old}|{kind}|{','.join(map(str, at))}"] = np.ascontiguousarray(second)
    for file, tensors in zip((FIRST, SECOND), files, strict=True):
        write_tensors(folder / file, tensors)
    model = {
        "family": "neox",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    }
    data = {"source": "tokens", "paths": ["ids.npy"], "tokenizer": "none"}
    data |= {"vocab_size": VOCAB, "end_of_text_id": 1, "sequence_length": 16}
    config = raw(**{"parallel3d.model": model, "parallel3d.data": data})
    state = state_of(STEPS, dict(ALL.values())) | {"config": config}
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder, STEPS)
    save_file(reference, root / str(source) / "reference.safetensors")
    return folder, reference


@pytest.mark.parametrize(
    "target",
    [
        Side((1, 1, 2), model="gpt_neox"),
        pytest.param(Side((2, 1, 1), zero=1, model="gpt_neox"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checkpoint_of_family_neox_is_loaded_on_other_meshes(target, tmp_path):
    """Weights and moments, bit by bit, and what export reads."""
    assert MODELS["gpt_neox"]["config"]["num_attention_heads"] == HEADS
    source = Side((1, 1, 1), model="gpt_neox")
    folder, reference = write(tmp_path, source)
    faults = load_all([(target, [source])], tmp_path)
    assert set(map(tuple, faults.values())) == {()}, faults
    exported = CheckpointSource(folder)
    for name in ALL:
        assert (exported.read(name).numpy() == reference[f"{name}|master"]).all(), name
    exported.check()


@given(st.data())
def test_box_of_fused_projections_equals_the_slice(data):
    whole = np.arange(3 * HIDDEN * 5).reshape(3, HIDDEN, 5)
    stored = Stored("blocks.0.attention.qkv.weight", whole.shape, HEADS)
    ours = heads_in_turn(whole)
    first = [data.draw(st.integers(0, size - 1)) for size in ours.shape]
    size = [data.draw(st.integers(1, n - a)) for n, a in zip(ours.shape, first, strict=True)]
    box = np.full(size, -1)
    for rows, offsets, shape in stored.boxes(first, size):
        place = tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))
        box[rows] = whole[place].reshape(box[rows].shape)
    assert (box == ours[tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))]).all()
