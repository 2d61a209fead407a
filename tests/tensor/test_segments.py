"""Documents that share a sample: positions restart, nothing crosses, and no mask is made."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.tensor import documents as documents_module
from parallel3d.tensor.documents import attend_documents
from parallel3d.tensor.segments import Segments
from tests.counting import Counting

pytestmark = pytest.mark.gloo


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_segments_equal_those_of_a_slow_loop(ends):
    documents = []
    for row in ends:
        ordinals = []
        current = 0
        for end in row:
            ordinals.append(current)
            current += end
        documents.append(ordinals)
    segments = Segments.of(torch.tensor(documents))
    bounds = segments.bounds
    expected = [row.count(document) for row in documents for document in sorted({*row})]
    assert segments.lengths == tuple(expected)
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [sum(expected[:n]) for n in range(len(expected) + 1)]
    for b, row in enumerate(documents):
        for query, document in enumerate(row):
            assert segments.positions[b, query] == query - row.index(document)


def with_a_mask(q, k, v, documents):
    """By a dense mask, every pair compared, and keys and values expanded."""
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    mask = same.tril().unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 18, [0] * 24])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_segments_equal_attention_with_a_mask(kv_heads):
    torch.manual_seed(0)
    like = {"dtype": torch.float64, "requires_grad": True}
    q, k, v = (torch.randn(2, heads, 24, 8, **like) for heads in (4, kv_heads, kv_heads))
    grad = torch.randn(2, 24, 4, 8, dtype=torch.float64)
    output = attend_documents(q, k, v, Segments.of(DOCUMENTS), 0.0)
    expected = with_a_mask(q, k, v, DOCUMENTS)
    torch.testing.assert_close(output, expected)
    for gradient, want in zip(
        torch.autograd.grad(output, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(gradient, want)


def test_additional_document_is_detected():
    """What compares is told of a boundary that moved by one."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 24, 8)
    moved = DOCUMENTS.roll(1, dims=-1)
    moved[:, 0] = 0
    output = attend_documents(q, k, v, Segments.of(moved), 0.0)
    assert (output - with_a_mask(q, k, v, DOCUMENTS)).abs().max() > 0.1


def test_documents_need_no_memory_of_sequence_length_squared():
    """Forward and backward of 16 documents of 128 tokens: fewer bytes than one mask of booleans."""
    seq = 2048
    heads = 2
    size = 16
    documents = torch.arange(seq).div(128).long().unsqueeze(0)
    q, k, v = (torch.randn(1, heads, seq, size, requires_grad=True) for _ in range(3))
    with Counting() as counting:
        segments = Segments.of(documents)
        attend_documents(q, k, v, segments, 0.0).sum().backward()
    result = q.numel() * 4
    assert counting.peak < 10 * result < seq * seq
    with Counting() as counting:
        with_a_mask(q, k, v, documents).sum().backward()
    assert counting.peak > seq * seq


def test_kernel_of_torch_receives_its_arguments(monkeypatch):
    """Its own shapes, by its stand-in for tensors without memory; keys and values not expanded."""
    monkeypatch.setattr(documents_module, "in_one_kernel", lambda q, dropout, sinks: True)
    like = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q, k, v = (torch.empty(2, 24, heads, 8, **like).transpose(1, 2) for heads in (4, 2, 2))
    segments = Segments.of(DOCUMENTS).on(torch.device("meta"))
    with Counting(meta=True) as counting:
        y = attend_documents(q, k, v, segments, 0.0)
        kept = counting.bytes
        y.backward(torch.empty_like(y))
    assert y.shape == (2, 24, 4, 8)
    statistics = 4 * 4 * 48  # a logsumexp of each head and token
    generator = 16  # saved for dropout, though there is none
    assert kept == 2 * sum(t.numel() for t in (q, k, v, y)) + statistics + generator
    assert documents_module._kernel() is not None  # this torch has one


def test_kernel_is_used_only_in_half_precision_on_a_gpu():
    assert not documents_module.in_one_kernel(torch.empty(8, 2, 64, dtype=torch.bfloat16), 0.0)
