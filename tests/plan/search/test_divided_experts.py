"""Experts that ep ranks divide among them: what the planner counts, and when it proposes ep."""

from dataclasses import asdict, replace

import pytest

from parallel3d import models
from parallel3d.config import RunConfig, hardware
from parallel3d.model.spec import Shape
from parallel3d.plan.layers.placement import model_of
from parallel3d.plan.layers.weight_counts import weights_of_kind
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.request import request_of
from parallel3d.plan.search import candidates
from parallel3d.plan.search.best_first import search
from parallel3d.plan.setting import RankShare
from parallel3d.plan.time.network import RankGroup, all_to_all_seconds, group_of
from parallel3d.plan.time.operators import curves_for, machine_of
from parallel3d.plan.time.passes import _exchange_seconds, _of_owner
from parallel3d.plan.time.step import step_time
from tests.plan.settings import changed

pytestmark = pytest.mark.pure

H100 = hardware.load("H100-SXM5-80GB")
QWEN = "qwen3-30b-a3b.json"


@pytest.fixture(scope="module")
def config():
    return RunConfig.from_json(QWEN, [])


def test_only_experts_are_divided(config):
    layers = tuple(models.layers(config.model))
    model = model_of(layers)
    whole, part = (weights_of_kind(model, model.kind_of[1], 1, 0, ep) for ep in (1, 8))
    m = config.model
    experts = m.num_experts * 3 * m.hidden_size * m.expert_size
    assert (whole.experts, part.experts) == (0, experts // 8)
    assert whole.params - part.params == experts - experts // 8
    # ZeRO over 16 ranks: 8 owners with 2 replicas each hold as much as 16 that share all experts.
    assert (
        part.shard(part.params, 16, 8) == whole.shard(whole.params, 16, 1) == -(-whole.params // 16)
    )


def test_seconds_of_an_all_to_all():
    """Within a node over its link; each device sends through its own interface to other nodes."""
    curves = curves_for(H100)
    inside = all_to_all_seconds(8e9, RankGroup(8, 8), H100, curves)
    moved = inside - curves.overhead_per_collective
    assert moved == pytest.approx(7e9 / (H100.link.bandwidth.value * curves.link), rel=1e-3)
    across = all_to_all_seconds(8e9, RankGroup(16, 8), H100, curves)
    assert across > 4e9 / (H100.network.bandwidth.value * curves.network)


def test_owner_computes_its_own_experts(config):
    """As many rows in all as without ep, in groups for its own experts alone."""
    layer = models.layers(config.model)[1]
    work = layer.cost(Shape(1, 4096)).forward
    whole = [m for m in work.matmuls if m.batch > 1]
    own = [m for m in _of_owner(work, 8, 1.0).matmuls if m.batch > 1]
    assert [m.batch for m in own] == [16, 16] and [m.batch for m in whole] == [128, 128]
    assert [m.flops for m in own] == [m.flops for m in whole]
    busiest = [m for m in _of_owner(work, 8, 1.5).matmuls if m.batch > 1]
    assert [m.flops for m in busiest] == [1.5 * m.flops for m in whole]


def test_exchange_sorts_rows_at_their_owners_and_waits_for_their_counts(config):
    """By hand: rows cross twice and are read and written twice; the host adds its own seconds."""
    setting = changed(row(config, zero_stage=1, ep=8).plans[0].setting, ep_imbalance=1.0)
    curves = curves_for(H100)
    machine = machine_of(H100, setting.workload.software, curves)
    model = model_of(setting.workload.layers)
    kind = model.kind_of[1]
    own = RankShare.of(setting)
    sent = own.shape.tokens * 8 * config.model.hidden_size * 2
    ways = 2 * all_to_all_seconds(sent, group_of(8, 1, 64, H100), H100, curves)
    sorting = 4 * sent / (H100.memory_bandwidth.value * curves.traffic)
    assert _exchange_seconds(model, kind, own, 64, machine) == pytest.approx(ways + sorting)
    programs = [replace(setting.workload.software, waits_for_counts=w) for w in (True, False)]
    waiting, free = (step_time(changed(setting, software=p), H100).seconds for p in programs)
    layers = config.model.num_hidden_layers // setting.mesh.pp
    waits = 3 * layers * setting.num_microbatches * curves.overhead_per_experts
    assert waiting - free == pytest.approx(waits, rel=0.2)


def row(config, device=H100, **fixed):
    fixed = {"pp": 4, "tp": 1, "micro_batch": 1, "recompute": "none"} | fixed
    fixed |= {"schedule": "one_f_one_b", "stages_per_rank": 1}
    request = request_of(config, device, 64, fixed)
    return search(request, 1)


def test_ep_is_proposed_if_it_pays(config):
    """ZeRO-3 gathers all experts for each token's eight, unless their owners compute them.

    With the host's wait for counts ep takes longer than the gathers.
    """
    curves = asdict(curves_for(H100)) | {"overhead_per_experts": 1e-6}
    quick = H100.model_copy(update={"curves": curves})
    proposed = row(config, quick, zero_stage=3).plans[0]
    alone = row(config, quick, zero_stage=3, ep=1).plans
    assert proposed.setting.flow.ep > 1
    assert not alone or alone[0].time.seconds > proposed.time.seconds
    assert row(config, zero_stage=3).plans[0].setting.flow.ep == 1
    dense = RunConfig.from_json("llama-8b.json", [])
    request = request_of(dense, H100, 64)
    for mesh in candidates.meshes_in_turn(request)[0]:
        assert all(flow.ep == 1 for flow in candidates.flows(request, mesh))


def test_rows_computed_for_a_token(config):
    embedding, block, *_ = models.layers(config.model)
    assert (embedding.rows_per_token, block.rows_per_token) == (0, 8)


def test_busiest_owner_takes_longer(config):
    """Its experts' products and exchanges grow with the load; what is not theirs does not."""
    even = changed(row(config, zero_stage=1, ep=8).plans[0].setting, ep_imbalance=1.0)
    busy = changed(even, ep_imbalance=2.0)
    assert 1.2 < step_time(busy, H100).seconds / step_time(even, H100).seconds < 2
    assert 1 < fullest(busy).total / fullest(even).total < 2
