"""Two stages of one rank take turns in one engine: ZeRO-3 holds one layer at a time."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from parallel3d.engine import Engine, building, writing
from parallel3d.engine.quirks import core
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Init, ParamSpec
from parallel3d.tensor.cut import held_parameters
from parallel3d.tensor.initialise import fill
from parallel3d.tensor.linear import ColumnParallelLinear
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.shrink import NO_THRESHOLDS
from tests.contexts import layer_context
from tests.engine import storage_bytes
from tests.engine.settings import settings_of
from tests.engine.test_partial import BATCH, HIDDEN, inputs

pytestmark = pytest.mark.gloo


class TwoStages(nn.Module):
    """Three layers in each of two stages of one rank."""

    def __init__(self, mesh):
        super().__init__()
        context = layer_context(mesh.tensor.group)
        self.stages = nn.ModuleList(
            nn.ModuleList(ColumnParallelLinear(HIDDEN, HIDDEN, context=context) for _ in range(3))
            for _ in range(2)
        )

    def forward(self, stage, x):
        for layer in self.stages[stage]:
            x = torch.tanh(layer(x))
        return x


ORDERS = {
    "breadth first": [("F", s, m) for s in (0, 1) for m in range(3)]
    + [("B", s, m) for s in (1, 0) for m in range(3)],
    "depth first": [("F", s, m) for m in range(3) for s in (0, 1)]
    + [("B", s, m) for m in range(3) for s in (1, 0)],
    "mixed": [
        ("F", 0, 0),
        ("F", 0, 1),
        ("F", 1, 0),
        ("F", 1, 1),
        ("B", 1, 0),
        ("F", 0, 2),
        ("B", 1, 1),
        ("F", 1, 2),
        ("B", 0, 0),
        ("B", 1, 2),
        ("B", 0, 1),
        ("B", 0, 2),
    ],
}


def alternate_all(rank, reduction, orders):
    """For each order: peaks of a step of two stages, in elements, and the norms of two steps.

    Last come those of the first order without release counters.
    """
    mesh = Mesh(dp=2)
    rows = [alternate(mesh, reduction, order) for order in orders]
    with patch.object(core.ReleaseCounters, "restore", lambda counters: None):
        return rows, alternate(mesh, reduction, orders[0])


def alternate(mesh, reduction, order):
    options = NO_THRESHOLDS | {"reduce_bucket_size": 2**12}
    settings = settings_of(BATCH, gradient_reduction=reduction, params={"eps": 1.0}, zero=options)
    with building(settings, mesh):
        module = TwoStages(mesh)
    normal = Init(std=0.3)
    specs = [
        ParamSpec(name, tuple(p.ds_shape), ("tensor",), normal, p.ds_numel > HIDDEN)
        for name, p in module.named_parameters()
    ]
    held = list(held_parameters(module, specs, mesh))
    for h in held:
        with writing(h.parameter) as (shard, start), torch.no_grad():
            fill(shard, start, h.spec, h.name, h.cut, 0)
    engine = Engine(module, held, settings, mesh=mesh)
    x, grad = inputs()
    peaks = []
    norms = []
    for _ in range(2):
        taken = {}
        made = {}
        watched = storage_bytes.watching(engine.deepspeed, [h.parameter for h in held])
        with watched as step_peaks, engine.accumulation():
            for kind, stage, m in order:
                if kind == "F":
                    start = x[m, :BATCH].clone() if stage == 0 else made[0, m].detach()
                    taken[stage, m] = start.requires_grad_()
                    made[stage, m] = engine.forward(stage, start)
                else:
                    given = grad[m, :BATCH].clone() if stage else taken[1, m].grad
                    engine.backward(made[stage, m], given, stage=stage)
        peaks.append(step_peaks)
        norms.append(engine.step(0.1).grad_norm)
    mesh.barrier()
    engine.close()
    return peaks[-1].gathered_elements, peaks[-1].gathered_bytes // 4, norms


@pytest.mark.parametrize(
    "reduction", ["per_step", pytest.param("per_microbatch", marks=pytest.mark.slow)]
)
def test_stages_of_one_engine_take_turns(reduction):
    """Without release counters a whole stage stays gathered."""
    layer = HIDDEN * HIDDEN + HIDDEN
    all_norms = []
    names = ("breadth first", "mixed") if reduction == "per_step" else ORDERS
    for rows, without in run_locally(alternate_all, 2, reduction, [ORDERS[x] for x in names]):
        assert without[0] >= 3 * layer
        for gathered, alive, norms in rows:
            assert 0 < gathered <= layer
            assert 0 < alive <= layer
            all_norms.append(norms)
    assert all_norms[0][0] > 0.1
    for norms in all_norms:
        assert norms == pytest.approx(all_norms[0], rel=1e-5)
