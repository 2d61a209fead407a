"""Dropout masks: where they agree, where they differ, and that they come back on recomputation."""

from contextlib import nullcontext
from itertools import combinations
from unittest.mock import patch

import pytest
import torch

from parallel3d.mesh.mesh import Mesh
from parallel3d.models.gpt.blocks import Block
from parallel3d.models.gpt.spec import Config
from parallel3d.pipeline.stages import Stages
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.random_key import RandomKey
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo

CONFIG = Config(
    family="gpt",
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    vocab_size=61,
    max_position_embeddings=16,
    attn_pdrop=0.1,
    resid_pdrop=0.1,
)


def mask(dropout, numel=256):
    """Which elements survive, as a string that differs if one of them does."""
    kept = dropout(torch.ones(numel)) != 0
    return "".join(map(str, kept.int().tolist()))


def masks_on_rank(rank):
    mesh = Mesh(dp=2, tp=2)
    key = RandomKey(3, mesh.samples.coord)
    replicated = Dropout(0.5, "here", key=key)
    split = Dropout(0.5, "here", key=key, split_over=mesh.tensor.group)
    elsewhere = Dropout(0.5, "there", key=key)
    masks = {
        "replicated": mask(replicated),
        "again": mask(replicated),
        "split": mask(split),
        "elsewhere": mask(elsewhere),
    }
    key.step = 1
    key.microbatch = 0
    masks["step"] = mask(replicated)
    key.step = 0
    key.microbatch = 1
    masks["microbatch"] = mask(replicated)
    key.microbatch = 0
    key.seed = 4
    masks["seed"] = mask(replicated)
    mesh.barrier()
    return (mesh.samples.coord, mesh.tensor.coord), masks


def test_masks_agree_and_differ():
    masks = dict(run_locally(masks_on_rank, 4, timeout=60))
    for dp in (0, 1):
        one = masks[dp, 0]
        two = masks[dp, 1]
        for name in ("replicated", "elsewhere", "step", "microbatch", "seed"):
            assert one[name] == two[name], name
        assert one["split"] != two["split"]
        assert one["again"] == one["replicated"]
    # Nothing else is alike: not over steps, microbatches, places, seeds and dp coordinates.
    alone = [m for dp in (0, 1) for n, m in masks[dp, 0].items() if n not in ("again", "split")]
    alone += [masks[0, 1]["split"], masks[1, 1]["split"]]
    for a, b in combinations(alone, 2):
        same = sum(x == y for x, y in zip(a, b, strict=True))
        assert 88 < same < 168  # half of 256, give or take five standard deviations


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_keep_rate(p):
    numel = 2**20
    key = RandomKey(0)
    dropout = Dropout(p, "here", key=key)
    first = dropout(torch.ones(numel))
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p)))}
    five_sigma = 5 * (p * (1 - p) / numel) ** 0.5
    assert abs((first == 0).double().mean() - p) < five_sigma
    # Of two steps' masks both drop p^2: they are independent.
    key.step = 1
    both = ((first == 0) & (dropout(torch.ones(numel)) == 0)).double().mean()
    assert abs(both - p * p) < 5 * (p * p / numel) ** 0.5


def test_no_dropout_in_evaluation():
    dropout = Dropout(0.5, "here", key=RandomKey(0)).eval()
    x = torch.ones(64)
    assert dropout(x) is x
    torch.manual_seed(1)
    before = torch.get_rng_state()
    dropout.seed(x.device)
    dropout(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert dropout.train().active_p == 0.5


def test_only_one_generator_is_seeded(monkeypatch):
    """The device's own, as torch.manual_seed seeds it; those of its peers are other ranks'."""
    dropout = Dropout(0.5, "here", key=RandomKey(0))
    seeds = []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)
    dropout.seed(torch.device("cuda"))
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(torch, "manual_seed", None)
    dropout.seed(torch.device("cpu"))
    expected = torch.Generator().manual_seed(*seeds).get_state()
    assert torch.equal(torch.get_rng_state(), expected)


def block_on_rank(mesh):
    key = RandomKey(0, mesh.samples.coord)
    block = Block(CONFIG, "blocks.0", LayerContext(mesh.tensor.group, key))
    generator = torch.Generator().manual_seed(5 + mesh.tensor.coord)
    for parameter in block.parameters():
        seeded = torch.Generator().manual_seed(1) if not parameter.cut.parts else generator
        parameter.data.normal_(generator=seeded).mul_(0.5)
    return block, key


def gradients(block, key, recompute):
    """F0 F1 B0 B1, as a pipeline interleaves them; the key tells each recomputation its place."""
    stages = Stages({0: [block]}, {block} if recompute else set())
    generator = torch.Generator().manual_seed(9)
    outputs = []
    inputs = []
    for microbatch in (0, 1):
        key.microbatch = microbatch
        inputs.append(torch.randn(2, 5, 8, generator=generator).requires_grad_())
        outputs.append(stages(0, inputs[-1]))
    for microbatch in (0, 1):
        key.microbatch = microbatch
        outputs[microbatch].square().sum().backward()
    gradients = [x.grad for x in inputs] + [p.grad for p in block.parameters()]
    block.zero_grad()
    return gradients, outputs


def recomputed(rank, seeded):
    unseeded = patch.object(Dropout, "seed", lambda self, device: None)
    with nullcontext() if seeded else unseeded:
        block, key = block_on_rank(Mesh(tp=2))
        kept, outputs = gradients(block, key, recompute=False)
        again, same_outputs = gradients(block, key, recompute=True)
        alike = all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
        block.eval()
        plain, _ = gradients(block, key, recompute=False)
    assert not torch.allclose(kept[0], plain[0]), "dropout changed nothing"
    return alike, [o.detach() for o in outputs], [o.detach() for o in same_outputs]


def test_checkpointing_draws_the_same_masks():
    (alike, one, recomputed_one), (also, two, _) = run_locally(recomputed, 2, True, timeout=60)
    assert alike
    assert also
    for a, b, c in zip(one, two, recomputed_one, strict=True):
        assert torch.equal(a, b)  # the residual stream stays replicated over tp
        assert torch.equal(a, c)


def test_masks_differ_without_seeding():
    (alike, *_), _ = run_locally(recomputed, 2, False, timeout=60)
    assert not alike


def heads_on_rank(rank, training):
    """What attention hands to its output projection, when both ranks have the same weights."""
    mesh = Mesh(tp=2)
    block, _ = block_on_rank(mesh)
    for parameter in block.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    block.train(training)
    seen = []
    block.attention.output.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    block(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)))
    mesh.barrier()
    return seen[0].detach()


def test_attention_drops_different_weights_on_each_tp_rank():
    one, two = run_locally(heads_on_rank, 2, False, timeout=60)
    assert torch.equal(one, two)
    one, two = run_locally(heads_on_rank, 2, True, timeout=60)
    assert not torch.allclose(one, two)
