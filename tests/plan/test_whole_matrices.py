"""What the planner says of Muon: one state for hidden matrices, homes, and the exchange."""

from itertools import product

import pytest

from parallel3d.config import RunConfig
from parallel3d.model.matrices import deal, imbalance, matrices_of, newton_schulz_cost
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.report.plan_rows import checkpoint_bytes
from parallel3d.plan.request import request_of
from parallel3d.plan.search.best_first import search
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.operators import curves_for, machine_of
from parallel3d.plan.time.sharding import slowest_matrix_work
from parallel3d.plan.time.step import step_time
from tests.config.configs import raw
from tests.plan.settings import A100, changed

pytestmark = pytest.mark.pure


def setting(type="Muon", **changes):
    config = RunConfig.from_dict(
        raw(**{"optimizer.type": type, "parallel3d.model.vocab_size": 4096, "bf16.enabled": True})
    )
    return changed(Setting.from_config(config.resolve(8)), **changes)


def test_hidden_matrices_have_one_state_of_four_bytes():
    for stage, offload in product((1, 3), ("none", "cpu")):
        kept = {"zero_stage": stage, "offload_optimizer": offload}
        muon, adam = (setting(type, **kept) for type in ("Muon", "AdamW"))
        specs = [spec for layer in muon.workload.layers for spec in layer.own_params]
        matrices = sum(spec.numel for spec in specs if spec.role == "hidden")
        saved = 0
        for one, other in zip(per_rank(muon), per_rank(adam), strict=True):
            here, there = (
                m.host if offload == "cpu" else m.parts["optimizer"] for m in (one, other)
            )
            saved += there - here
        assert saved * muon.mesh.dp * muon.mesh.tp == pytest.approx(4 * matrices, rel=1e-3)
        assert checkpoint_bytes(adam) - checkpoint_bytes(muon) == pytest.approx(
            4 * matrices, rel=1e-2
        )


def test_search_plans_the_optimizer_of_the_config():
    config = RunConfig.from_dict(
        raw(**{"optimizer.type": "Muon", "parallel3d.model.vocab_size": 4096, "bf16.enabled": True})
    )
    fixed = {"pp": 1, "tp": 1, "recompute": "none", "zero_stage": 1}
    best = search(request_of(config, A100, 8, fixed), 1).plans[0].setting
    own = setting()
    assert best.workload.optimizer.type == "muon"
    assert best.workload.newton_schulz == own.workload.newton_schulz


def test_exchange_and_products_of_muon_are_timed():
    one = setting(pp=1, dp=8, tp=1, zero_stage=1)
    machine = machine_of(A100, one.workload.software, curves_for(A100))
    specs = [spec for layer in one.workload.layers for spec in layer.own_params]
    matrices = sum(spec.numel for spec in specs if spec.role == "hidden")
    work = slowest_matrix_work(one, machine)
    assert work.sent_bytes == 2 * 4 * matrices
    whole = slowest_matrix_work(changed(one, zero_stage=0), machine)
    assert whole.sent_bytes == (1 + 8) * 4 * matrices
    assert work.product_seconds > 0 and 1 <= work.imbalance < 1.5
    alone = slowest_matrix_work(setting(pp=4, dp=1, tp=1), machine)
    assert alone.sent_bytes == alone.exchange_seconds == 0 and alone.imbalance == 1
    adam = step_time(setting("AdamW", pp=1, dp=8, tp=1, zero_stage=1), A100)
    muon = step_time(one, A100)
    assert muon.seconds - adam.seconds == pytest.approx(work.seconds, rel=0.5)
    optimizer = one.workload.optimizer
    params = optimizer.params.model_copy(update={"ns_dtype": "bf16"})
    halved = changed(one, optimizer=optimizer.model_copy(update={"params": params}))
    assert slowest_matrix_work(halved, machine).product_seconds < work.product_seconds


def test_owners_are_assigned_by_longest_processing_time():
    """Within 4/3 - 1/(3n) of the best (Graham 1969); equal matrices are dealt evenly."""
    costs = (7, 7, 6, 6, 5, 4, 4, 3)
    homes = deal(costs, 3)
    loads = [sum(c for c, h in zip(costs, homes, strict=True) if h == home) for home in range(3)]
    assert sum(loads) == sum(costs) and max(loads) <= 14 * (4 / 3 - 1 / 9)
    assert imbalance((5,) * 12, 4) == 1 and imbalance((5,) * 3, 4) == pytest.approx(4 / 3)
    assert newton_schulz_cost(8, 2) == newton_schulz_cost(2, 8) == 32


def test_fused_matrices_and_heads_are_separate():
    block = next(layer for layer in setting().workload.layers if layer.name == "blocks.0")
    hidden = 64
    heads = 4
    sizes = {s.name: s.shape for s in block.params}
    hidden = sizes["attention.output.weight"][0]
    shapes = matrices_of(block.params, False)
    assert shapes.count((hidden, hidden)) == 4  # query, key, value and output
    apart = matrices_of(block.params, True)
    heads = next(s.units for s in block.params if s.name == "attention.qkv.weight")
    assert apart.count((hidden // heads, hidden)) == 3 * heads
    assert sum(a * b for a, b in shapes) == sum(a * b for a, b in apart)
