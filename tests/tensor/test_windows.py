"""Attention within a window, with sinks or without: that of a dense mask, which is never made."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from parallel3d.mesh.mesh import Mesh
from parallel3d.model.module_cost import BLOCK
from parallel3d.model.recompute import NONE, SELECTIVE
from parallel3d.model.spec import Attention
from parallel3d.tensor import documents as documents_module
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.documents import attend_documents
from parallel3d.tensor.segments import Segments
from tests.contexts import layer_context
from tests.counting import Counting

pytestmark = pytest.mark.gloo

SEQ = BLOCK + 30
SCALE = 0.3
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * (SEQ - 6), [0] * SEQ])
WINDOWS = (None, 1, 7, BLOCK + 1, SEQ - 1, SEQ, 10 * SEQ)


def with_a_mask(q, k, v, documents, window, sinks, softcap=None):
    """All pairs compared as transformers does it; a sink is one more column of scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    behind = torch.arange(q.shape[2]).unsqueeze(1) - torch.arange(q.shape[2])
    seen = (behind >= 0) & (behind < (window or q.shape[2]))
    seen = seen & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
    scores = q @ k.mT * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def each_pair(values):
    """Four rows of one of two values, isolation and sinks, with each pair of them in one."""
    first, second = values
    return [
        (first, False, False),
        (first, True, True),
        (second, False, True),
        (second, True, False),
    ]


@pytest.mark.parametrize("window", WINDOWS)
def test_window_equals_attention_with_a_mask(window):
    torch.manual_seed(0)
    like = {"dtype": torch.float64, "requires_grad": True}
    for kv_heads, isolated, has_sinks in each_pair((2, 4)):
        q, k, v = (torch.randn(2, heads, SEQ, 8, **like) for heads in (4, kv_heads, kv_heads))
        sinks = torch.randn(4, **like) if has_sinks else None
        documents = DOCUMENTS if isolated else torch.zeros_like(DOCUMENTS)
        segments = Segments.of(documents) if isolated else None
        output = attend_documents(q, k, v, segments, 0.0, SCALE, window, sinks)
        expected = with_a_mask(q, k, v, documents, window, sinks)
        torch.testing.assert_close(output, expected)
        inputs = [t for t in (q, k, v, sinks) if t is not None]
        upstream = torch.randn_like(output)
        for gradient, want in zip(
            torch.autograd.grad(output, inputs, upstream),
            torch.autograd.grad(expected, inputs, upstream),
            strict=True,
        ):
            torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize(("value_size", "softcap"), [(5, None), (12, None), (5, 0.8)])
@pytest.mark.parametrize("recompute", [NONE, SELECTIVE], ids=str)
def test_layer_takes_values_of_another_size_sinks_and_softcap(value_size, softcap, recompute):
    torch.manual_seed(0)
    mesh = Mesh()
    context = layer_context(mesh.tensor.group, recompute=recompute)
    like = {"dtype": torch.float64, "requires_grad": True}
    for window, isolated, has_sinks in each_pair((None, 7)):
        layer = CausalAttention(
            0.0,
            "a",
            context=context,
            heads=(4, 2),
            head_size=8,
            value_size=value_size,
            scale=SCALE,
            window=window,
            softcap=softcap,
        )
        q, k = (torch.randn(2, heads, SEQ, 8, **like) for heads in (4, 2))
        v = torch.randn(2, 2, SEQ, value_size, **like)
        sinks = torch.randn(4, **like) if has_sinks else None
        documents = DOCUMENTS if isolated else torch.zeros_like(DOCUMENTS)
        segments = Segments.of(documents) if isolated else None
        output = layer(q, k, v, segments, sinks=sinks)
        expected = with_a_mask(q, k, v, documents, window, sinks, softcap).flatten(-2)
        torch.testing.assert_close(output, expected)
        inputs = [t for t in (q, k, v, sinks) if t is not None]
        upstream = torch.randn_like(output)
        wanted = torch.autograd.grad(expected, inputs, upstream)
        torch.testing.assert_close(torch.autograd.grad(output, inputs, upstream), wanted)
    mesh.close()


def test_window_wider_by_one_is_detected():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, SEQ, 8)
    documents = torch.zeros(1, SEQ)
    output = attend_documents(q, k, v, None, 0.0, SCALE, 7)
    assert (output - with_a_mask(q, k, v, documents, 8, None)).abs().max() > 0.1
    torch.testing.assert_close(output, with_a_mask(q, k, v, documents, 7, None))


def test_window_needs_no_memory_of_sequence_length_squared():
    """Forward and backward: fewer bytes than one mask of booleans, and FLOPs by the window."""
    seq = 4096
    window = 100
    heads = 2
    size = 16
    q, k, v = (torch.randn(1, heads, seq, size, requires_grad=True) for _ in range(3))
    with Counting() as counting:
        attend_documents(q, k, v, None, 0.0, window=window).sum().backward()
    assert counting.peak < 20 * 4 * q.numel() < seq * seq
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        attend_documents(q, k, v, None, 0.0, window=window)
    least = Attention(1, heads, heads, seq, size, window).flops
    assert least < counter.get_total_flops() < least * (window + BLOCK) / window


def test_softcap_keeps_and_needs_no_scores():
    """Its output and a number for each token and head; a band of scores at a time."""
    seq = 2048
    heads = 2
    size = 16
    shape = 1, seq, heads, size  # the memory layout of the products before
    q, k, v = (torch.randn(shape, requires_grad=True).transpose(1, 2) for _ in range(3))
    with Counting() as counting:
        attend_documents(q, k, v, None, 0.0, softcap=2.0)  # all layers share the places of tokens
        inputs = counting.bytes
        y = attend_documents(q, k, v, None, 0.0, softcap=2.0)
        assert counting.bytes - inputs == 4 * (y.numel() + heads * seq)
        y.sum().backward()
    band = 4 * heads * BLOCK * seq  # bytes
    assert counting.peak < 9 * band < 4 * heads * seq * seq


def test_kernel_of_torch_receives_its_window(monkeypatch):
    """By its stand-in for tensors without memory: a token sees itself and window - 1 before."""
    asked = []
    kernel = documents_module._kernel()

    def noted(*args, **options):
        asked.append((args[3].shape, options["window_size"]))
        return kernel(*args, **options)

    monkeypatch.setattr(documents_module, "in_one_kernel", lambda q, dropout, sinks: not sinks)
    monkeypatch.setattr(documents_module, "_kernel", lambda: noted)
    like = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q, k, v = (torch.empty(2, SEQ, heads, 8, **like).transpose(1, 2) for heads in (4, 2, 2))
    for segments in (None, Segments.of(DOCUMENTS).on(torch.device("meta"))):
        y = attend_documents(q, k, v, segments, 0.0, window=7)
        y.backward(torch.empty_like(y))
        assert y.shape == (2, SEQ, 4, 8)
    assert asked == [((3,), (6, 0)), ((5,), (6, 0))]


def test_dropout_acts_within_the_window():
    """Its mask is that of the same seed; a mean over many is the attention without dropout."""
    q, k = torch.zeros(2, 1, 1, SEQ, 8)
    v = torch.ones(1, 1, SEQ, 8)

    def computed(seed):
        torch.manual_seed(seed)
        return attend_documents(q, k, v, None, 0.5, window=40, sinks=torch.zeros(1))

    assert torch.equal(computed(1), computed(1)) and not torch.equal(computed(1), computed(2))
    mean = torch.stack([computed(seed) for seed in range(40)]).mean(0)[0, 60:, 0, 0]
    torch.testing.assert_close(mean, torch.full_like(mean, 40 / 41), atol=0.15, rtol=0)
    assert F.mse_loss(mean, torch.full_like(mean, 40 / 41)) < 4 / 40 / 40
