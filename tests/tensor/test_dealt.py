"""A cp group's attention and dropout: those of whole samples, with a share of their memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from parallel3d.data.deal import deal
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.traffic import Traffic
from parallel3d.tensor.dealt import at_once, block_mask
from parallel3d.tensor.documents import attend_documents
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.segments import Segments
from parallel3d.verify.local_ranks import run_locally
from tests.counting import Counting

pytestmark = pytest.mark.gloo

BATCH = 2
SEQ = 96
HEADS = 4
KV_HEADS = 2
SIZE = 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 50 + [3] * 40, [0] * SEQ])


def whole_tensors(value_size, dtype=torch.float64):
    """Queries, keys, values and the gradient of the output, the same on each rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, SEQ, SIZE) for heads in (HEADS, KV_HEADS)]
    shapes.append((BATCH, KV_HEADS, SEQ, value_size))
    shapes.append((BATCH, SEQ, HEADS, value_size))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def own_part(x, places, dim):
    """The tokens here of a tensor of whole samples, whose tokens are along `dim`."""
    return torch.stack(
        [sample.index_select(dim - 1, own) for sample, own in zip(x, places, strict=True)]
    )


def with_window_and_sinks(q, k, v, documents, window, sinks, softcap=None):
    """By a dense mask, with a score more for each query."""
    here = torch.arange(q.shape[2])
    distance = here.unsqueeze(-1) - here
    seen = (documents.unsqueeze(-1) == documents.unsqueeze(-2)) & (distance >= 0)
    seen &= distance < (window or q.shape[2])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, extra], -1)
    return (scores.softmax(-1)[..., : q.shape[2]] @ v).transpose(1, 2)


def attention_on_rank(rank, window, with_sinks, value_size, softcap):
    """Errors of output and gradients; calls and bytes of the group; the same where recomputed."""
    mesh = Mesh(cp=4)
    cp = mesh.context
    places = torch.from_numpy(deal(DOCUMENTS.numpy(), cp.size, [window or SEQ]))
    segments = Segments.of(DOCUMENTS, places, cp.group)
    q, k, v, grad = whole_tensors(value_size)
    sinks = torch.arange(-1.0, 3.0, dtype=q.dtype).requires_grad_() if with_sinks else None
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = with_window_and_sinks(*inputs, DOCUMENTS, window, sinks, softcap)
    every = [*inputs, *([sinks] if with_sinks else [])]
    *wanted, of_sinks = *torch.autograd.grad(expected, every, grad), None
    of_sinks = wanted.pop() if with_sinks else None
    places = segments.dealt.places
    parts = [own_part(t.detach(), places, d) for t, d in ((q, 2), (k, 2), (v, 2), (grad, 1))]
    wanted = [
        own_part(t, places, d) for t, d in zip([expected, *wanted], (1, 2, 2, 2), strict=True)
    ]
    attend = partial(
        attend_documents,
        segments=segments,
        dropout=0.0,
        window=window,
        sinks=sinks,
        softcap=softcap,
    )
    results = []
    for run in (attend, partial(checkpoint, attend, use_reentrant=False)):
        here = [x.clone().requires_grad_() for x in parts[:3]]
        with Traffic(mesh) as traffic:
            y = run(*here)
            computed = [y, *torch.autograd.grad(y, here + every[3:], parts[3])]
        if with_sinks:  # each rank has the gradient of its own queries
            total = computed.pop()
            dist.all_reduce(total, group=cp.group)
            computed = [*computed, total]
            want = [*wanted, of_sinks]
        else:
            want = wanted
        errors = [float((a - b).detach().abs().max()) for a, b in zip(computed, want, strict=True)]
        results.append((errors, {c.operation: (c.group, c.calls, c.bytes) for c in traffic.calls}))
    mesh.barrier()
    return results


@pytest.mark.parametrize(
    ("window", "with_sinks", "value_size", "softcap"),
    [(None, False, SIZE, None), (13, True, SIZE - 3, 0.8)],
)
def test_dealt_attention_equals_that_of_whole_samples(window, with_sinks, value_size, softcap):
    both = BATCH * SEQ * KV_HEADS * (SIZE + value_size) * 8  # bytes of all keys and values
    case = window, with_sinks, value_size, softcap
    for results in run_locally(attention_on_rank, 4, *case, timeout=200):
        for errors, calls in results:
            assert max(errors) < 1e-12, errors
            # Forward and backward gather them, and the backward reduces their gradients.
            assert calls == {
                "all_gather": ("cp=world", 2, 2 * both),
                "reduce_scatter": ("cp=world", 1, both),
            }


def kept_on_rank(rank, cp):
    """Bytes that an attention keeps for its backward besides its inputs, and its output's."""
    mesh = Mesh(cp=cp)
    seq = 1024
    documents = torch.zeros(1, 1024, dtype=torch.int64)
    places = torch.from_numpy(deal(documents.numpy(), cp))
    group = mesh.context.group
    segments = Segments.of(documents, places, group)
    like = {"requires_grad": True}
    with Counting() as counting:
        q, k, v = (torch.randn(1, heads, seq // cp, SIZE, **like) for heads in (8, 4, 4))
        attend_documents(q, k, v, segments, 0.0)  # all layers share the places of keys
        inputs = counting.bytes
        y = attend_documents(q, k, v, segments, 0.0)
        kept = counting.bytes - inputs
    mesh.barrier()
    return kept, y.numel() * 4


def test_rank_keeps_only_its_share():
    """Its output and a number for each token and head; keys and values of all ranks would show."""
    for kept, output in run_locally(kept_on_rank, 2, 2, timeout=200):
        assert kept == output + output // SIZE


def dropped_on_rank(rank, split):
    """The largest difference of dropout's output and gradient from those of whole samples."""
    mesh = Mesh(cp=2, tp=2)
    cp = mesh.context
    over = mesh.tensor if split else mesh.alone
    key = RandomKey(3)
    layer = Dropout(0.5, "here", key=key, split_over=over.group if split else None)
    whole = torch.arange(1.0, 1 + BATCH * SEQ * 3).view(BATCH, SEQ, 3)
    expected = torch.cat([dropped(layer, part, r) for r, part in enumerate(parts(whole, over))], 1)
    places = torch.from_numpy(deal(DOCUMENTS.numpy(), cp.size))
    key.dealt = Segments.of(DOCUMENTS, places, cp.group).dealt
    own = own_part(whole, places[:, cp.coord], 1)
    here = parts(own, over)[over.coord].requires_grad_()
    y = layer(here)
    wanted = parts(own_part(expected, places[:, cp.coord], 1), over)[over.coord]
    (grad,) = torch.autograd.grad(y.sum(), here)
    mesh.barrier()
    return float((y - wanted).abs().max()), float((grad * here - y).abs().max())


def parts(x, over):
    return list(x.chunk(over.size, 1))


def dropped(layer, x, tp_rank):
    """Dropout of a part of whole samples, as that tp rank has it."""
    layer.key.seed_generator(layer.place, tp_rank, x.device)
    return torch.native_dropout(x, layer.p, True)[0]


@pytest.mark.parametrize("split", [False, True])
def test_dropout_masks_equal_those_of_whole_samples(split):
    for errors in run_locally(dropped_on_rank, 4, split, timeout=200):
        assert max(errors) < 1e-4


class Group:
    """The size and rank of a group, whose ranks this process plays in turn."""

    def __init__(self, size, rank):
        self._size = size
        self._rank = rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 400])
def test_flex_kernel_gives_the_same_attention(window):
    """FlexAttention with the blocks that a GPU's kernel is told of, as torch runs it on a CPU."""
    seq = 1024
    cp = 2
    documents = torch.stack([torch.arange(seq) // 300, (torch.arange(seq) > 7).long()])
    places = torch.from_numpy(deal(documents.numpy(), cp))
    q = torch.randn(2, 4, seq, 16)
    k = torch.randn(2, 2, seq, 16)
    v = torch.randn(2, 2, seq, 16 if window is None else 24)
    sinks = torch.arange(-1.0, 3.0)
    softcap = None if window is None else 0.8
    expected = with_window_and_sinks(q, k, v, documents, window, sinks, softcap)
    gathered = torch.cat((k, v), -1).transpose(1, 2).flatten(0, 1)
    for rank in range(cp):
        dealt = Segments.of(documents, places, Group(cp, rank)).dealt
        own = own_part(q, dealt.places, 2).transpose(1, 2).flatten(0, 1)
        output, logsumexp = at_once(own, gathered, dealt, None, window, softcap)
        output = (output * (logsumexp - sinks).sigmoid().unsqueeze(-1)).unflatten(0, (2, -1))
        torch.testing.assert_close(output, own_part(expected, dealt.places, 1), atol=1e-5, rtol=0)
        # Blocks of keys that no token attends to are skipped; some need no mask.
        same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()
        width = window or seq
        same = same.triu(1 - width)
        blocks = own_part(same, dealt.places, 1).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        whole = blocks.all(4).all(2)
        mask = block_mask(dealt, window)
        assert torch.equal(mask.full_kv_num_blocks[:, 0], whole.sum(-1).int())
        partly = blocks.any(4).any(2) & ~whole
        assert torch.equal(mask.kv_num_blocks[:, 0], partly.sum(-1).int()) and whole.any()
