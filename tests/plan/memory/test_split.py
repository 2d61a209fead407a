"""Memory where backwards are split: what W needs is held from I on."""

import pytest

from parallel3d.model.spec import Shape
from parallel3d.models.gpt.spec import Config
from parallel3d.plan.memory.peak import saved_bytes
from parallel3d.plan.search import candidates
from parallel3d.plan.search.plans import request_of
from parallel3d.plan.setting import Setting, layers_of
from parallel3d.schedule.schedules import splits_backward
from tests.plan.toy_cluster import config, machine

pytestmark = pytest.mark.pure


def test_full_recomputation_saves_nothing_where_weight_gradients_wait():
    """What W needs of a linear layer is its input, and the gradient of what it gave."""
    model = Config(
        family="gpt", hidden_size=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=256,
        max_position_embeddings=64,
    )  # fmt: skip
    base = Setting(
        layers_of(model), 64, Shape(32, 64), 4, pp=2, schedule="zero_bubble", zero_stage=1
    )
    split, ordinary = base.but(recompute="full"), base.but(schedule="gpipe", recompute="full")
    assert saved_bytes(split) == saved_bytes(base)
    for held, kept in zip(saved_bytes(split), saved_bytes(ordinary), strict=True):
        assert held > 5 * kept


def test_the_planner_does_not_propose_both():
    request = request_of(config(), machine(), 4)
    seen = {
        (flow.recompute, splits_backward(order.schedule))
        for mesh in candidates.meshes(request)
        for flow in candidates.flows(request, mesh)
        for order in candidates.orders(request, flow)
    }
    assert ("full", True) not in seen and {("none", True), ("full", False)} <= seen
