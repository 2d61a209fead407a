"""Stacked matrices [experts, out, in], of which two groups of ranks cut two dims."""

import pytest
import torch
from torch import nn

from parallel3d.checkpoint.find import find_named
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.save import Saver
from parallel3d.engine import Engine, building, writing
from parallel3d.huggingface.from_ranks import whole_parameter
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Init, LayerSpec, ParamSpec
from parallel3d.tensor.cut import Cut, cut_parameter, held_parameters
from parallel3d.tensor.initialise import fill
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.shrink import NO_THRESHOLDS
from tests.checkpoint.folders import KINDS
from tests.checkpoint.resharding import state
from tests.engine.settings import settings_of

pytestmark = pytest.mark.gloo

EXPERTS = 6
HIDDEN = 8
INNER = 9
BATCH = 4
LR = 0.1
SHAPES = {
    "up": ((EXPERTS, INNER, HIDDEN), ("pipeline", "tensor")),
    "up_bias": ((EXPERTS, INNER), ("pipeline", "tensor")),
    "down": ((EXPERTS, HIDDEN, INNER), ("pipeline", None, "tensor")),
    "down_bias": ((EXPERTS, HIDDEN), ("pipeline",)),
}
SPECS = [ParamSpec(n, *s, Init(std=0.3), weight_decay=True) for n, s in SHAPES.items()]
LAYERS = [LayerSpec("experts", tuple(SPECS), lambda *_: None, "", None)]


class Experts(nn.Module):
    """The sum of all experts' outputs. The pipeline's ranks share out the experts here, and the
    tensor-parallel ranks their inner features, so the sum over a mesh is the layer's output."""

    def __init__(self, mesh):
        super().__init__()
        for name, (shape, cut_over) in SHAPES.items():
            cuts = {r: (dim, mesh.peers(r).group) for dim, r in enumerate(cut_over) if r}
            setattr(self, name, cut_parameter(shape, **cuts))

    def forward(self, stage, x):
        return forward({name: getattr(self, name) for name in SHAPES}, x)


def forward(w, x):
    inner = torch.tanh(torch.einsum("bh,eih->ebi", x, w["up"]) + w["up_bias"].unsqueeze(1))
    return torch.einsum("ebi,ehi->bh", inner, w["down"]) + w["down_bias"].sum(0)


def batch(step):
    return torch.randn(2, BATCH, HIDDEN, generator=torch.Generator().manual_seed(step))


class Run:
    """An engine on this rank with stacked parameters, drawn from the seed."""

    def __init__(self, pp, tp, zero_stage, seed):
        self.mesh = Mesh(pp=pp, tp=tp)
        settings = settings_of(
            BATCH, zero_stage=zero_stage, params={"eps": 1.0}, zero=NO_THRESHOLDS
        )
        with building(settings, self.mesh):
            module = Experts(self.mesh)
        self.held = list(held_parameters(module, SPECS, self.mesh, prefix="experts."))
        for h in self.held:
            with writing(h.parameter) as (shard, start), torch.no_grad():
                fill(shard, start, h.spec, h.name, h.cut, seed)
        self.engine = Engine(module, self.held, settings, mesh=self.mesh)

    def step(self, number):
        """The gradient norm of a step."""
        x, grad = batch(number)
        with self.engine.accumulation():
            self.engine.backward(self.engine.forward(0, x.clone().requires_grad_()), grad)
        return self.engine.step(LR).grad_norm

    def wholes(self):
        return {h.spec.name: whole_parameter(self.engine, self.mesh, h) for h in self.held}

    def states(self):
        """The masters and moments that this rank saves: (name, bounds, kind, value)."""
        for number, block in enumerate(self.engine.states.blocks):
            with self.engine.states.opened(number) as tensors:
                for piece, kinds in zip(block, tensors, strict=True):
                    cut = piece.held.cut
                    for kind in KINDS if piece.held.counts else ():
                        value = kinds[kind].clone().view(cut.local_shape)
                        yield piece.held.spec.name, cut.bounds, kind, value


def save_on_rank(rank, root):
    """Weights before and after two steps, the steps' norms, and the states that are saved."""
    run = Run(2, 2, 3, seed=0)
    first = run.wholes()
    norms = [run.step(0), run.step(1)]
    disk = DiskPlace(run.mesh, root)
    saver = Saver(run.engine, run.mesh, LAYERS, [disk], asynchronous=False)
    saver.save(state(2))
    saver.require_saved()
    return first, norms, run.wholes(), list(run.states())


def load_on_rank(rank, mesh, root):
    """The states after loading, the norm of the next step, and the elements held, by name."""
    run = Run(*mesh, 1, seed=1)
    checkpoint = find_named(root, str(root / "step-2"), run.mesh)
    load(checkpoint, engine=run.engine, mesh=run.mesh, layers=LAYERS)
    return list(run.states()), run.step(2), {h.spec.name: h.elements for h in run.held}


def plain_training():
    """On one process: the first weights, the norms of three steps, and the weights after two."""
    first = {}
    for spec in SPECS:
        flat = torch.empty(spec.numel)
        fill(flat, 0, spec, f"experts.{spec.name}", Cut(spec.shape), 0)
        first[spec.name] = flat.view(spec.shape)
    weights = {name: value.clone().requires_grad_() for name, value in first.items()}
    adam = torch.optim.AdamW(weights.values(), lr=LR, eps=1.0, weight_decay=0.0)
    norms = []
    for step in range(3):
        if step == 2:
            trained = {name: value.detach().clone() for name, value in weights.items()}
        x, grad = batch(step)
        forward(weights, x).backward(grad)
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), 1e9)))
        adam.step()
        adam.zero_grad()
    return first, norms, trained


def place(whole, bounds):
    for dim, (start, stop) in enumerate(bounds):
        whole = whole.narrow(dim, start, stop - start)
    return whole


def test_tensors_cut_on_two_dims_load_on_any_mesh(tmp_path):
    first, norms, trained = plain_training()
    states = {(s.name, kind): torch.full(s.shape, torch.nan) for s in SPECS for kind in KINDS}
    for whole_first, own_norms, whole, own_states in run_locally(save_on_rank, 4, tmp_path):
        assert own_norms == pytest.approx(norms[:2], rel=1e-5)
        for name in SHAPES:
            assert torch.equal(whole_first[name], first[name]), f"{name} starts with other bits"
            assert torch.allclose(whole[name], trained[name], atol=1e-6), name
        for name, bounds, kind, value in own_states:
            empty = place(states[name, kind], bounds)
            assert empty.isnan().all(), f"two ranks save {name}"
            empty.copy_(value)
            assert torch.equal(place(whole[name], bounds), value) or kind != "master", name
    assert not any(whole.isnan().any() for whole in states.values())
    for mesh in [(2, 1), (1, 1)]:
        ranks = run_locally(load_on_rank, mesh[0] * mesh[1], mesh, tmp_path)
        for own_states, norm, _ in ranks:
            assert len(own_states) == len(SPECS) * len(KINDS)
            for name, bounds, kind, value in own_states:
                assert torch.equal(place(states[name, kind], bounds), value), (mesh, name, kind)
            assert norm == pytest.approx(norms[2], rel=1e-5)
        for spec in SPECS:
            most = max(elements[spec.name] for *_, elements in ranks)
            sizes = dict(zip(("pipeline", "tensor"), mesh, strict=True))
            assert spec.elements(sizes) == most, spec.name
