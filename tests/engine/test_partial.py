"""Gradients of which each tp rank has a part are summed, once a step."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from parallel3d.engine import Engine, building, writing
from parallel3d.engine import reduction as reduction_file
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Init, ParamSpec
from parallel3d.tensor.cut import Cut, cut_parameter, held_parameters
from parallel3d.tensor.initialise import fill
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.shrink import NO_THRESHOLDS
from tests.cases import unpatched
from tests.engine.settings import settings_of
from tests.verify.measuring import number_anew

pytestmark = pytest.mark.gloo

HIDDEN = 16
BATCH = 2
MICROBATCHES = 3


class Weighted(nn.Module):
    """Each tp rank adds its share of the result, with a weight that all of them hold whole."""

    def __init__(self, mesh):
        super().__init__()
        ranks = mesh.tensor.size
        self.share = (mesh.tensor.coord + 1) / (ranks * (ranks + 1) / 2)  # they add up to 1
        self.weight = cut_parameter((HIDDEN, HIDDEN))
        self.bias = cut_parameter((HIDDEN,))

    def forward(self, stage, x):
        return self.share * torch.tanh(x @ self.weight + self.bias)


SPECS = [
    ParamSpec("weight", (HIDDEN, HIDDEN), (), Init(std=0.3), weight_decay=True),
    ParamSpec("bias", (HIDDEN,), (), Init(std=0.3), weight_decay=False),
]


def sum_each(rank, dp, kinds, partial):
    """Return for each kind of settings what `sum_partial` does."""
    mesh = Mesh(dp=dp, tp=2)
    results = []
    for settings in kinds:
        number_anew()
        results.append(sum_partial(mesh, settings, partial))
    return results


def sum_partial(mesh, settings, partial):
    """The gradient norms of two steps, the weights, and the all-reduces over tp in a step."""
    calls = []
    with building(settings, mesh):
        module = Weighted(mesh)
    held = [replace(h, partial=partial) for h in held_parameters(module, SPECS, mesh)]
    for h in held:
        with writing(h.parameter) as (shard, start), torch.no_grad():
            fill(shard, start, h.spec, h.name, h.cut, 0)
    engine = Engine(module, held, settings, mesh=mesh)
    reduce = reduction_file.all_reduce_coalesced

    def counted(tensors, group, *dtype):
        calls.append(group is mesh.tensor.group)
        reduce(tensors, group, *dtype)

    x, grad = inputs()
    norms = []
    for _ in range(2):
        calls.clear()
        with patch.object(reduction_file, "all_reduce_coalesced", counted):
            with engine.accumulation():
                for m in range(MICROBATCHES):
                    here = slice(mesh.samples.coord * BATCH, (mesh.samples.coord + 1) * BATCH)
                    output = engine.forward(0, x[m, here].clone().requires_grad_())
                    engine.backward(output, grad[m, here].clone())
            norms.append(engine.step(0.1).grad_norm)
    weights = {h.name: engine.full_parameter(h) for h in held}
    mesh.barrier()
    engine.close()
    return norms, weights, sum(calls)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, MICROBATCHES, 2 * BATCH, HIDDEN, generator=generator)


def plain_training(dp):
    """The same on one process: the ranks' shares add up to the whole."""
    weights = {}
    for spec in SPECS:
        flat = torch.empty(spec.numel)
        fill(flat, 0, spec, spec.name, Cut(spec.shape), 0)
        weights[spec.name] = flat.view(spec.shape).requires_grad_()
    adam = torch.optim.AdamW(weights.values(), lr=0.1, eps=1.0, weight_decay=0.0)
    x, grad = inputs()[:, :, : dp * BATCH]
    norms = []
    for _ in range(2):
        torch.tanh(x @ weights["weight"] + weights["bias"]).backward(grad / dp)
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), 1e9)))
        adam.step()
        adam.zero_grad()
    return norms, {name: w.detach() for name, w in weights.items()}


def settings_for(stage, reduction):
    return settings_of(
        BATCH,
        zero_stage=stage,
        gradient_reduction=reduction,
        params={"eps": 1.0},
        zero=NO_THRESHOLDS | {"reduce_bucket_size": 2**12},
    )


FEW = [(0, "per_step"), (3, "per_microbatch")]
MORE = [(1, "per_microbatch"), (3, "per_step"), (0, "per_microbatch"), (1, "per_step")]


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_partial_gradients_are_summed_over_tp_once_a_step(kinds):
    settings = [settings_for(*kind) for kind in kinds]
    wanted_norms, wanted = plain_training(dp=2)
    for rows in run_locally(sum_each, 4, 2, settings, True):
        for kind, (norms, weights, calls) in zip(kinds, rows, strict=True):
            assert norms == pytest.approx(wanted_norms, rel=1e-5), kind
            for name, value in weights.items():
                assert torch.allclose(value, wanted[name], atol=1e-6), (kind, name)
            assert calls == 1, kind


@unpatched
def test_partial_gradients_stay_partial_without_their_sum():
    settings = settings_for(3, "per_microbatch")
    wanted_norms, _ = plain_training(dp=2)
    for ((norms, _, calls),) in run_locally(sum_each, 4, 2, [settings], False):
        assert norms[0] < 0.9 * wanted_norms[0]
        assert calls == 0
