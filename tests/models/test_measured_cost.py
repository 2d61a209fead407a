"""Costs measured on the meta device, against those that the families declare.

The declared ones are compared with a CPU's operators in test_layer_cost_of_torch.py.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch.distributed as dist

from parallel3d import models
from parallel3d.mesh.fake_groups import make_fake_groups
from parallel3d.model.measured_cost import MeasuredCost
from parallel3d.model.recompute import FULL, NONE, SELECTIVE, parse
from parallel3d.model.spec import Shape, flops_of
from parallel3d.models.transformers import meter
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.setting import layers_of
from parallel3d.plan.time.step import step_time
from parallel3d.verify.local_ranks import run_locally
from tests.models.families import small
from tests.plan.settings import A100, new_setting

pytestmark = pytest.mark.gloo

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000, "num_hidden_layers": 4}
# In one place each: fewer keys than queries, a window, norms of heads, dropout, experts.
CONFIGS = {
    "llama": small("llama", num_key_value_heads=2, **SIZES),
    "window": small("llama", sliding_window=32, qk_norm=True, attention_bias=True, **SIZES),
    "gpt": small("gpt", resid_pdrop=0.1, attn_pdrop=0.1, **SIZES),
    "moe": small("moe", **SIZES),
}
TPS = {"llama": [2], "window": [], "gpt": [], "moe": []}
KINDS = {"llama": [], "window": [FULL], "gpt": [SELECTIVE], "moe": []}
ALL_TPS = [2, 4]
ALL_KINDS = [SELECTIVE, FULL, parse("mlp"), parse("layernorm+mlp_act")]
TRAFFIC = 0.1  # the bound of test_layer_cost_of_torch.py


def measure(rank, full):
    """The measured cost of each model's block; by default also what else is measured here."""
    costs = {}
    for name, config in CONFIGS.items():
        block = models.layers(config)[1]
        tps = ALL_TPS if full else TPS[name]
        kinds = ALL_KINDS if full else KINDS[name]
        costs[name] = meter.measured_layers([block], tps, kinds, longest=512)["blocks.0"]
        dist.destroy_process_group()  # the next one has other groups
    if full:
        return costs, None, None
    return costs, meter.answer(REQUEST), measure_any_decoder()


@cache
def in_one_process(full):
    """What `measure` comes to in a process of its own."""
    (results,) = run_locally(measure, 1, full, timeout=900)
    return results


@pytest.fixture(
    scope="module",
    params=[
        *((name, False) for name in CONFIGS),
        *(pytest.param((name, True), marks=pytest.mark.slow) for name in CONFIGS),
    ],
    ids=lambda param: f"{param[0]}-full" if param[1] else param[0],
)
def costs(request):
    """A model's name, and the measured cost of its blocks."""
    name, full = request.param
    by_name, *_ = in_one_process(full)
    return name, by_name[name]


def pairs(costs):
    """The declared and the measured cost of each variant and shape."""
    name, block = costs
    declared = models.layers(CONFIGS[name])[1].cost
    for variant in block.variants:
        setting = (variant.tp, variant.sequence_parallel, parse(variant.recompute))
        for shape in (Shape(2, 64), Shape(1, 1024), Shape(3, 4096), Shape(2, 2**15)):
            yield declared(shape, *setting), block(shape, *setting)


def operations(work):
    """A pass without its memory traffic, in any order."""
    return sorted(work.matmuls), work.attention, sorted(work.collectives)


def test_measured_operations_equal_the_declared_ones(costs):
    for declared, measured in pairs(costs):
        assert measured.forward_flops == declared.forward_flops
        assert operations(measured.forward) == operations(declared.forward)
        assert operations(measured.recomputed) == operations(declared.recomputed)
        assert sorted(measured.backward_collectives) == sorted(declared.backward_collectives)


def test_measured_memory_is_close_to_the_declared(costs):
    name, _ = costs
    for declared, measured in pairs(costs):
        # An experts' sum that is computed again is not declared.
        again = 0.1 if name == "moe" and declared.recomputed.matmuls else 0.03
        for size in (2, 4):
            for classic in (False, True):
                for fused in (False, True):
                    kind = (size, classic, fused)
                    saved = declared.saved.bytes(*kind)
                    assert measured.saved.bytes(*kind) == pytest.approx(saved, rel=5e-3)
                    peak = (declared.saved + declared.working).bytes(*kind)
                    close = pytest.approx(peak, rel=again)
                    assert (measured.saved + measured.working).bytes(*kind) == close
        assert measured.resident == declared.resident


def test_measured_traffic_is_close_to_the_declared(costs):
    for declared, measured in pairs(costs):
        forward = declared.forward.traffic
        assert measured.forward.traffic == pytest.approx(forward, rel=TRAFFIC)
        # Torch stops once all that was kept is there again.
        again = pytest.approx(declared.recomputed.traffic, abs=0.22 * forward)
        assert measured.recomputed.traffic == again


MESHES = (
    {"pp": 2, "dp": 4, "tp": 2},
    {"pp": 1, "dp": 8, "tp": 2, "sequence_parallel": True},
)


@pytest.mark.parametrize("costs", [("llama", False)], indirect=True, ids=["llama"])
def test_plan_with_measured_costs_is_that_with_declared_ones(costs):
    name, block = costs
    declared = layers_of(CONFIGS[name])
    first, *blocks, last = declared
    by_measurement = (first, *[replace(layer, cost=block) for layer in blocks], last)
    for mesh in MESHES:
        planned = []
        for model in (declared, by_measurement):
            setting = new_setting(model, 512, Shape(2, 4096), 8, **mesh)
            peak = max(memory.total for memory in per_rank(setting, A100))
            planned.append((step_time(setting, A100).seconds, peak))
        assert planned[1] == pytest.approx(planned[0], rel=0.03)


SECTION = CONFIGS["llama"].model_dump(mode="json", exclude_none=True) | {"num_hidden_layers": 2}
REQUEST = json.dumps({"model": SECTION, "ranks": [], "recompute": ["full"]})


def test_answer_to_a_request_is_read_back():
    """By a planner, in another process."""
    _, text, _ = in_one_process(False)
    costs = meter.COSTS.validate_json(text)
    assert list(costs) == ["blocks.0"]
    block = models.layers(CONFIGS["llama"])[1]
    cost = costs["blocks.0"]
    assert isinstance(cost, MeasuredCost)
    shape = Shape(4, 128)
    assert cost(shape, recompute=FULL).saved == block.cost(shape, recompute=FULL).saved
    # A part that was not measured costs as if it stayed.
    assert cost(shape, recompute=SELECTIVE) == cost(shape, recompute=NONE)
    with pytest.raises(KeyError, match="tp = 8"):
        cost(shape, 8)


def measure_any_decoder():
    fields = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": CONFIGS["llama"].inner_size,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    Config = models.config_class("transformers")
    config = Config(family="transformers", config=fields, vocab_size=32000)
    _, block, *_ = models.layers(config)
    return meter.measured(block, make_fake_groups([1, 2]), longest=64)


def test_block_of_transformers_costs_what_that_of_llama_does():
    """Its modules are not the library's, so each projection is a product, and norms keep more."""
    _, _, cost = in_one_process(False)
    declared = models.layers(CONFIGS["llama"])[1].cost
    for setting in ((1, False), (2, False), (2, True)):
        own = cost(Shape(4, 32), *setting)
        other = declared(Shape(4, 32), *setting)
        assert own.forward_flops == other.forward_flops
        assert own.forward.attention == other.forward.attention
        assert own.forward.collectives == other.forward.collectives
        assert flops_of(own.forward.matmuls) == flops_of(other.forward.matmuls)
        assert own.saved.bytes(2) == pytest.approx(other.saved.bytes(2), rel=0.5)
