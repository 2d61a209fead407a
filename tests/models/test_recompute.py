"""Recomputed and offloaded activations of every family: the same bits, and the bytes they say."""

from contextlib import nullcontext
from itertools import pairwise
from pkgutil import resolve_name
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel3d import models
from parallel3d.model import recompute
from parallel3d.model.spec import Shape
from parallel3d.pipeline.stages import Stages
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.host_activations import HostActivations, _OnHost
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.weight_gradients import defer_weight_gradients
from parallel3d.verify.local_ranks import run_locally
from tests.models.families import WRITTEN, small

pytestmark = pytest.mark.gloo

SHAPE = Shape(2, 16)
BLOCKS = 2
WAYS = ("none", "full", "full:1", "mlp", "mlp_act", "layernorm+mlp", "core_attn+layernorm+mlp_act")


def blocks_of(family, text, on_host=None):
    """Blocks as one stage, some of them recomputed, and the cost of one block."""
    dropout = {"resid_pdrop": 0.1} if family == "gpt" else {}
    spec = models.layers(small(family, **dropout))[1]
    context = LayerContext(dist.group.WORLD, RandomKey(0), recompute=recompute.parse(text))
    torch.manual_seed(0)
    blocks = [resolve_name(spec.build)(spec.config, f"blocks.{i}", context) for i in range(BLOCKS)]
    for block in blocks:
        for parameter in block.parameters():
            parameter.data.normal_(0, 0.3)
    full = {*blocks[: recompute.parse(text).num_full(BLOCKS)]}
    return Stages({0: blocks}, full, on_host=on_host), spec


def train(stages, deferred=False):
    """The output, and the gradients of the input and the weights."""
    hidden = next(stages.parameters()).shape[-1]
    x = torch.randn(SHAPE.batch, SHAPE.seq, hidden, requires_grad=True)
    y = stages(0, x)
    with defer_weight_gradients() if deferred else nullcontext() as products:
        y.square().sum().backward()
    if products is not None:
        assert any(p.grad is None for p in stages.parameters())
        products.make()
    return [y.detach(), x.grad, *(p.grad for p in stages.parameters())]


def compare(rank):
    """For each family and way: bits, and the bytes that left the device with those predicted."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    start = _OnHost.__init__
    rows = []
    for family in sorted({*WRITTEN} - {"moe"}):  # experts stay (config/model_checks)
        plain = train(blocks_of(family, "none")[0])
        for text in WAYS:
            left = []

            def note(self, storage, *others, left=left):
                left.append(storage.nbytes())
                start(self, storage, *others)

            with patch.object(_OnHost, "__init__", note):
                stages, spec = blocks_of(family, text, HostActivations(torch.device("cpu")))
                runs = [train(stages)]
            runs += [train(blocks_of(family, text)[0], deferred) for deferred in (False, True)]
            alike = [all(map(torch.equal, plain, run)) for run in runs]
            way = recompute.parse(text)
            full = way.num_full(BLOCKS)
            rest = recompute.Recompute(way.parts)
            each = [
                spec.cost(SHAPE, recompute=recompute.FULL if i < full else rest)
                for i in range(BLOCKS)
            ]
            predicted = sum(cost.saved.bytes(4, fused_norms=False) for cost in each)
            # The stage's input stays: its gradient is still to come.
            predicted -= 4 * SHAPE.tokens * spec.config.hidden_size
            rows.append((family, text, alike, sum(left), predicted))
    return rows


def test_offloaded_activations_give_the_same_bits_and_predicted_bytes():
    (rows,) = run_locally(compare, 1)
    for family, text, alike, left, predicted in rows:
        assert all(alike), (family, text, alike)
        assert left == pytest.approx(predicted, rel=0.01), (family, text)
    by_way = {text: left for family, text, _, left, _ in rows if family == "llama"}
    order = ("none", "mlp_act", "core_attn+layernorm+mlp_act", "full:1", "mlp", "full")
    assert all(by_way[less] < by_way[more] for more, less in pairwise(order))
