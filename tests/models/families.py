"""Small models of every family, and what a mesh computes with them."""

import os
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn

from parallel3d import models
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Shape, named_params
from parallel3d.pipeline.stages import build_stages
from parallel3d.schedule.schedules import make_schedule
from parallel3d.tensor.segments import Segments
from parallel3d.verify.local_ranks import run_locally
from tests.engine.settings import settings_of

WRITTEN = sorted({*models.families()} - {"transformers"})
"""The families whose sizes are settings of their own; test_any_decoder.py has the other one."""
WORLD = 4
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}


def small(family, **settings):
    """A small config of any family, with the sizes that every family has."""
    sizes = SIZES | {"max_position_embeddings": 64} | settings
    return models.config_class(family)(family=family, **sizes)


def switched(family):
    """Small configs with each of the family's switches turned, then all: name -> config."""
    fields = models.config_class(family).model_fields
    switches = {name: not f.default for name, f in fields.items() if f.annotation is bool}
    cases = {family: {}} | {f"{family} {n}={v}": {n: v} for n, v in switches.items()}
    if len(switches) > 1:
        cases[f"{family} {ALL}"] = switches
    return {name: small(family, **settings) for name, settings in cases.items()}


ALL = "all switched"
EVERY_FAMILY = {n: c for family in WRITTEN for n, c in switched(family).items()}


def weights_of(config):
    """Whole weights by global name, far from their start: scores spread, biases and norms act."""
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, p in named_params(models.layers(config)).items():
        weights[name] = torch.randn(p.shape, generator=generator) * 0.2 + p.init.value
    return weights


def batch_of(config, seq=16):
    """Tokens and labels, [2, seq] each."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(config.vocab_size, (2, seq + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def part(whole, cut):
    """What a rank with this cut holds of a whole tensor."""
    for p in cut.parts:
        whole = whole.narrow(p.dim, p.start, p.stop - p.start)
    return whole


@lru_cache
def mesh_of(tp):
    """As many replicas as ranks allow, on tp each: one mesh a process, whatever is built on it."""
    return Mesh(dp=int(os.environ["WORLD_SIZE"]) // tp, tp=tp)


def build(config, tp, seq=16, sequence_parallel=False, **settings):
    """The whole model on replicas of tp ranks, with the weights of `weights_of`, and the mesh."""
    mesh = mesh_of(tp)
    schedule = make_schedule("gpipe", 1, 1)
    built = build_stages(
        models.layers(config),
        schedule,
        settings_of(2, zero_stage=1),
        mesh=mesh,
        shape=Shape(2, seq),
        seed=None,  # `weights_of` has them
        sequence_parallel=sequence_parallel,
        **settings,
    )
    weights = weights_of(config)
    with torch.no_grad():
        for h in built.held:
            h.parameter.copy_(part(weights[h.name], h.cut))
    return built, mesh


class Logits:
    """What the head's output projection gives, noted on its way to the loss."""

    def __init__(self, module):
        head = list(module.stages["0"].children())[-1]
        self.value = None
        assert isinstance(head.output, nn.Module)
        head.output.register_forward_hook(self.note)

    def note(self, module, args, output):
        with torch.no_grad():
            self.value = module.logits(args[0])


def computed(config, tp, sequence_parallel=False, documents=None, seq=16):
    """Loss, this rank's logits, and its gradients as (name, cut, value), summed where partial."""
    built, mesh = build(config, tp, seq, sequence_parallel)
    logits = Logits(built.module)
    tokens, labels = batch_of(config, seq)
    segments = None if documents is None else Segments.of(documents)
    loss = built.module(0, tokens, labels, segments)
    loss = loss if isinstance(loss, torch.Tensor) else loss[0]  # without side losses
    loss.backward()
    gradients = []
    for h in built.held:
        if h.parameter.grad is None:  # a bias that balances loads moves by counts
            continue
        if h.partial:
            dist.all_reduce(h.parameter.grad, group=mesh.tensor.group)
        gradients.append((h.name, h.cut, h.parameter.grad))
    return loss.item(), logits.value, gradients


def _each_on_rank(rank, function, jobs):
    return [function(*job) for job in jobs]


def on_ranks(function, jobs, count=WORLD):
    """For each job, in one start of the ranks: what `function(*job)` gives on each rank."""
    return list(zip(*run_locally(_each_on_rank, count, function, jobs), strict=True))
