"""Names of Megatron-DeepSpeed, GPT-NeoX and torchtitan: the model computes what theirs computes.

Their modules are written out here from their papers' and their codes' definitions, so that a wrong
order of rows shows in the logits.
"""

import pytest
import torch
from torch.distributed.checkpoint import save
from transformers import AutoModelForCausalLM

from parallel3d import models
from parallel3d.checkpoint.chunks import Box
from parallel3d.extras.foreign.checkpoints.names import Names
from parallel3d.extras.foreign.checkpoints.tensors import BoxPiece, ForeignTensor
from parallel3d.huggingface.source import CheckpointSource
from tests.foreign.continuing import convert_checkpoint
from tests.foreign.plain import SEEN, adamw
from tests.foreign.sources import SIZES, write_config

pytestmark = pytest.mark.gloo

HEADS = 4
SIZE = 8
WIDTH = HEADS * SIZE


def foreign(tensors):
    """Tensors as a source hands them out."""
    made = {}
    for name, value in tensors.items():
        shape = tuple(value.shape)
        piece = BoxPiece(Box((0,) * len(shape), shape), value.float)
        made[name] = ForeignTensor("here", shape, torch.float32, (piece,))
    return made


def config_of(family, **settings):
    return models.config_class(family).model_validate({"family": family, **settings})


def resolved(config, tensors):
    named = Names(config).resolve(foreign(tensors), "here")
    return {name: derived.read() for name, derived in named.items()}


def fused(query, key, value, groups):
    """Megatron's fused rows: for each key's head its queries' heads, itself, its value's."""
    per = HEADS // groups
    query = query.view(groups, per, SIZE, *query.shape[1:])
    key = key.view(groups, 1, SIZE, *key.shape[1:])
    value = value.view(groups, 1, SIZE, *value.shape[1:])
    return torch.cat([query, key, value], dim=1).flatten(0, 2)


def reference(config):
    torch.manual_seed(0)
    family = models.huggingface(config.family)
    return family.reference(config).state_dict()


GPT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
    "vocab_size": 264,
}


@pytest.mark.parametrize("prefix", ["language_model.", "module.language_model."])
def test_names_of_megatron_deepspeeds_gpt(prefix):
    config = config_of("gpt", **GPT)
    expected = reference(config)
    tensors = {
        f"{prefix}embedding.word_embeddings.weight": expected["transformer.wte.weight"],
        f"{prefix}embedding.position_embeddings.weight": expected["transformer.wpe.weight"],
        f"{prefix}encoder.final_layernorm.weight": expected["transformer.ln_f.weight"],
        f"{prefix}encoder.final_layernorm.bias": expected["transformer.ln_f.bias"],
    }
    for number in range(2):
        theirs = f"{prefix}encoder.layers.{number}."
        ours = f"transformer.h.{number}."
        for end in ("weight", "bias"):
            tensors |= {
                f"{theirs}input_layernorm.{end}": expected[f"{ours}ln_1.{end}"],
                f"{theirs}post_attention_layernorm.{end}": expected[f"{ours}ln_2.{end}"],
            }
            rows = expected[f"{ours}attn.c_attn.{end}"].t().chunk(3)
            tensors[f"{theirs}self_attention.query_key_value.{end}"] = fused(*rows, HEADS)
            for name, own in (
                ("self_attention.dense", "attn.c_proj"),
                ("mlp.dense_h_to_4h", "mlp.c_fc"),
                ("mlp.dense_4h_to_h", "mlp.c_proj"),
            ):
                tensors[f"{theirs}{name}.{end}"] = expected[f"{ours}{own}.{end}"].t()
    check(resolved(config, tensors), expected, {"lm_head.weight"})


def check(read, expected, without=()):
    buffers = {name for name in expected if name.endswith((".attn.bias", "inv_freq"))}
    assert read.keys() == expected.keys() - buffers - set(without)
    for name, value in read.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_names_of_megatron_deepspeeds_llama(groups):
    config = config_of("llama", **SIZES | {"num_key_value_heads": groups})
    expected = reference(config)
    tensors = {
        "language_model.embedding.word_embeddings.weight": expected["model.embed_tokens.weight"],
        "language_model.encoder.final_layernorm.weight": expected["model.norm.weight"],
        "language_model.output_layer.weight": expected["lm_head.weight"],
    }
    for number in range(2):
        theirs = f"language_model.encoder.layers.{number}."
        tensors |= dict(_of_llama(theirs, number, expected, groups, "self_attention", "weight"))
        gate = expected[f"model.layers.{number}.mlp.gate_proj.weight"]
        up = expected[f"model.layers.{number}.mlp.up_proj.weight"]
        down = expected[f"model.layers.{number}.mlp.down_proj.weight"]
        tensors[f"{theirs}mlp.dense_h_to_4h.weight"] = torch.cat([gate, up])
        tensors[f"{theirs}mlp.dense_4h_to_h.weight"] = down
    check(resolved(config, tensors), expected)


def _of_llama(theirs, number, expected, groups, attention, norm):
    ours = f"model.layers.{number}."
    rows = [expected[f"{ours}self_attn.{x}_proj.weight"] for x in "qkv"]
    yield f"{theirs}{attention}.query_key_value.weight", fused(*rows, groups)
    yield f"{theirs}{attention}.dense.weight", expected[f"{ours}self_attn.o_proj.weight"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{theirs}{name}.{norm}", expected[f"{ours}{name}.weight"]


def test_names_of_gpt_neoxs_llama_in_a_pipeline():
    config = config_of("llama", **SIZES | {"num_key_value_heads": HEADS})
    expected = reference(config)
    tensors = {
        "sequential.0.word_embeddings.weight": expected["model.embed_tokens.weight"],
        "sequential.5.norm.scale": expected["model.norm.weight"],
        "sequential.6.final_linear.weight": expected["lm_head.weight"],
    }
    for number in range(2):
        theirs = f"sequential.{number + 2}."
        tensors |= dict(_of_llama(theirs, number, expected, HEADS, "attention", "scale"))
        for own, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            weight = expected[f"model.layers.{number}.mlp.{name}.weight"]
            tensors[f"{theirs}mlp.{own}.weight"] = weight
    check(resolved(config, tensors), expected)


@pytest.mark.parametrize("qk_norm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stacked_experts_of_transformers_modules(tmp_path, qk_norm):
    """Files divide the experts' matrices; a state_dict, and so an optimizer, stacks them."""
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "qk_norm": qk_norm}
    path = write_config(tmp_path, family="moe", sizes=sizes, warmup=0)
    config = config_of("moe", **sizes)
    model = AutoModelForCausalLM.from_config(models.huggingface("moe").architecture(config))
    optimizer = adamw(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    entries = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(entries, checkpoint_id=tmp_path / "theirs", no_dist=True)
    run = tmp_path / "runs" / "new"
    assert convert_checkpoint(tmp_path / "theirs", run, path, *SEEN) == 0
    source = CheckpointSource(run)
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        stacked = model.get_parameter(f"model.layers.1.mlp.experts.{theirs}")
        value = source.read(f"blocks.1.mlp.experts.{ours}")
        assert torch.equal(value.flatten(), stacked.detach().flatten())


def test_names_of_torchtitans_llama():
    """Its rotary pairs are neighbours; transformers' are half a head apart."""
    config = config_of("llama", **SIZES)
    expected = reference(config)
    tensors = {
        "tok_embeddings.weight": expected["model.embed_tokens.weight"],
        "norm.weight": expected["model.norm.weight"],
        "output.weight": expected["lm_head.weight"],
    }
    for number in range(2):
        ours = f"model.layers.{number}."
        theirs = f"layers.{number}."
        for own, name in (("wq", "q"), ("wk", "k")):
            weight = expected[f"{ours}self_attn.{name}_proj.weight"]
            pairs = weight.view(-1, 2, SIZE // 2, WIDTH).transpose(1, 2)
            tensors[f"{theirs}attention.{own}.weight"] = pairs.reshape(weight.shape)
        for own, name in (
            ("attention.wv", "self_attn.v_proj"),
            ("attention.wo", "self_attn.o_proj"),
            ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w3", "mlp.up_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            tensors[f"{theirs}{own}.weight"] = expected[f"{ours}{name}.weight"]
    check(resolved(config, tensors), expected)
