"""Models of transformers that cannot be trained in stages are refused by name and reason."""

import pytest
import torch
from pydantic import ValidationError
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from parallel3d.base.section import Problems
from parallel3d.config import RunConfig
from parallel3d.model.recompute import SUBLAYERS
from parallel3d.models.transformers.attention import Sight, _sight_of
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.spec import Config
from parallel3d.plan.setting import Workload
from tests.cases import Case
from tests.models.architectures import VOCABULARY, small_config
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo


def model_of(kind):
    """The model block of a small model."""
    return {"family": "transformers", "config": small_config(kind), "vocab_size": VOCABULARY}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bart", "has an encoder"),
        ("gemma3", 'its text model is a "gemma3_text"'),
        ("dory", "no plain linear output projection"),
        ("deepseek_v32", "argument that is not known (indices)"),
        ("doge", "by a mask of its own"),
        ("trocr", "k_proj.weight, which gets no gradient"),
        ("phimoe", "draws random numbers (exponential_.default)"),
        ("moshi", "a table with 1 rows more than vocab_size"),
        ("deepseek_v4", "more than one stream"),
    ],
)
def test_reason(kind, reason):
    with pytest.raises(ValidationError) as error:
        Config.model_validate(model_of(kind))
    assert f'config.model_type = "{kind}": ' in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hiden_size": 3},
            'config.hiden_size = 3: is no field of a llama; the nearest one is "h',
        ),
        (
            {"residual_dropout": 0.1, "model_type": "starcoder2"},
            "which would depend on the mesh; set residual_dropout to 0, or use another model",
        ),
        (
            {"router_jitter_noise": 0.1, "model_type": "mixtral", "num_local_experts": 4},
            "config.router_jitter_noise = 0.1: draws random numbers",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantizes the weights, which parallel3d does not support; remove it",
        ),
        (
            {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
            '"architectures" names the class of "deepseek_v3", which is the model_type to use',
        ),
        (
            {"model_type": "lama"},
            'config.model_type = "lama": is not known to transformers; t',
        ),
    ],
)
def test_unknown_field_is_named_with_its_remedy(changes, message):
    model = model_of("llama")
    with pytest.raises(ValidationError) as error:
        Config.model_validate(model | {"config": model["config"] | changes})
    assert message in str(error.value)


def test_fields_that_published_files_have_beside_those_of_the_class_are_noted():
    """As in StarCoder2's and Phi-4-mini's: transformers keeps them, too."""
    others = {"mlp_type": "default", "auto_map": {"AutoConfig": "x.Y"}, "pretraining_tp": 1}
    model = model_of("starcoder2")
    raw = config_of()
    raw["parallel3d"] |= {
        "model": model | {"config": model["config"] | others, "vocab_size": "auto"},
        "data": {"sequence_length": 32},
    }
    (note,) = [line for line in RunConfig.from_dict(raw).notes if "model.config" in line]
    assert note.endswith("for starcoder2, and handed to it as they are: mlp_type")


def test_field_with_a_known_name_and_more_words_is_noted():
    """MiMo-V2's published file has the heads of its windows, which transformers does not read."""
    fields = small_config("mimo_v2_flash") | {"swa_num_attention_heads": 4}
    config = Config(family="transformers", config=fields)
    assert config.facts.unknown == ("swa_num_attention_heads",)


@pytest.mark.parametrize("kind", [pytest.param("olmo2", marks=pytest.mark.slow), "phi3"])
def test_null_of_a_field_that_the_class_lacks_is_as_if_it_were_missing(kind):
    """Files that were written from another class have "head_dim": null."""
    fields = small_config(kind)
    with_null = Config(family="transformers", config=fields | {"head_dim": None})
    assert with_null.facts == Config(family="transformers", config=fields).facts


def test_vocabulary_of_a_pasted_config_counts_unless_the_block_says_one():
    fields = small_config("llama")
    assert Config(family="transformers", config=fields).vocab_size == VOCABULARY
    assert Config(family="transformers", config=fields, vocab_size=7).vocab_size == 7
    del fields["vocab_size"]
    assert Config(family="transformers", config=fields).vocab_size == "auto"


def test_window_or_chunk_is_that_of_the_mask():
    chunked = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64))
    assert _sight_of(causal_mask_function) == Sight()
    assert _sight_of(sliding_window_causal_mask_function(4096)) == Sight(window=4096)
    assert _sight_of(chunked) == Sight(chunk=8192)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (bidirectional_mask_function, "later ones"),
        (sliding_window_bidirectional_mask_function(8), "later ones"),
        (chunked_causal_mask_function(8, torch.tensor([3])), "neither a window nor chunks"),
    ],
)
def test_other_masks_are_refused(mask, reason):
    with pytest.raises(Unsupported, match=reason):
        _sight_of(mask)


def test_plan_that_cuts_little_is_for_one_tensor_parallel_rank():
    model = model_of("mamba2")
    assert 0 < Case(model=model, mesh=(2, 1, 1)).config.model.share_cut < 0.5
    with pytest.raises(Problems, match="tp = 2: would cut 28% of the parameters"):
        _ = Case(model=model, mesh=(1, 1, 2)).config


@pytest.mark.parametrize("mode", ["mlp", "layernorm", "core_attn+mlp_act"])
def test_parts_that_nothing_recomputes_are_refused(mode):
    with pytest.raises(Problems, match="cannot recompute alone; use"):
        _ = Case(model=model_of("llama"), mesh=(1, 1, 1), checkpointing=mode).config


def test_planner_searches_only_recomputation_that_is_done():
    config = Case(model=model_of("llama"), mesh=(1, 1, 1)).config
    assert Workload.of(config).can_recompute == ("core_attn",)
    assert Workload.of(Case(mesh=(1, 1, 1)).config).can_recompute == SUBLAYERS
