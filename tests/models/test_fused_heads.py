"""Fused projections to queries, keys and values: cut by heads, and in files as ever."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel3d import models
from parallel3d.checkpoint.chunks import Box
from parallel3d.huggingface.source import PublishedWeights
from parallel3d.mesh.fake_groups import make_fake_groups
from parallel3d.models.transformers import huggingface
from parallel3d.models.transformers.anatomy import settings_of
from parallel3d.models.transformers.regions import Heads
from parallel3d.tensor.attention import CausalAttention
from parallel3d.verify.local_ranks import run_locally
from tests.models.architectures import small_config
from tests.models.test_llama_through_transformers import built, collectives

pytestmark = pytest.mark.gloo
NAME = "blocks.1.layer.self_attn.qkv_proj.weight"


def config():
    """A small model of Phi-3: 4 heads, 2 key/value heads, of 8 features each."""
    section = {"family": "transformers", "config": small_config("phi3"), "vocab_size": 96}
    return models.config_class("transformers").model_validate(section)


def test_heads_are_ordered_by_key_value_head():
    assert Heads(2, 2, 8).order == (0, 1, 4, 6, 2, 3, 5, 7)


def test_files_have_the_rows_of_transformers(tmp_path):
    """What is read is written again, and any box of it is the same part."""
    model = AutoModelForCausalLM.from_config(settings_of(config().json_of_model))
    model.save_pretrained(tmp_path)
    published = PublishedWeights(tmp_path, config())
    qkv = model.model.layers[1].self_attn.qkv_proj.weight.detach()
    own = published.read_whole(NAME)
    (exported,) = huggingface.to_files(config(), {NAME: own}).values()
    assert torch.equal(exported, qkv)
    heads = own.unflatten(0, (8, 8))
    assert torch.equal(heads[2], qkv[32:40])  # the first key
    assert torch.equal(heads[7], qkv[56:64])  # the last value
    part = torch.empty(21, 5)
    published.read(NAME, Box((13, 3), (21, 5)), part)
    assert torch.equal(part, own[13:34, 3:8])


def counted(rank):
    """The collectives and the heads of a block on 1, 2 and 4 ranks."""
    by_group = []
    for group in make_fake_groups((1, 2, 4)).values():
        block = built(config(), group)["blocks.1"]
        (core,) = (m for m in block.modules() if isinstance(m, CausalAttention))
        rows = block.layer.self_attn.qkv_proj.weight.shape[0]
        by_group.append((core.heads_here, rows, collectives(block, 32)))
    return by_group


def test_attention_is_computed_in_parts():
    """As many collectives as a Llama has; where keys are fewer than ranks, their rows are whole."""
    [by_group] = run_locally(counted, 1)
    heads, rows, sent = zip(*by_group, strict=True)
    assert heads == ((4, 2), (2, 1), (1, 1))
    assert rows == (64, 32, 64)
    assert sent == (([], []), *[(["allreduce_"] * 2, ["allreduce_"] * 2)] * 2)
