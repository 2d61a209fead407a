"""The time of passes by kind of operation: of operators inside forwards and backwards alone."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import record_function

from parallel3d.train.compute_kinds import ComputeKinds

pytestmark = pytest.mark.gloo

SIZE = 256


def seconds_of(operation, outside=False):
    """The seconds by kind of an operation's forward and backward, each in its action."""
    kinds = ComputeKinds(torch.device("cpu"))
    x = torch.randn(4, 2, SIZE, SIZE, requires_grad=True)
    with kinds.measuring():
        with record_function("0SEND_F0" if outside else "0F0"):
            y = operation(x)
        with record_function("update" if outside else "0B0"):
            y.sum().backward()
    return kinds.seconds


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("matmul", lambda x: F.linear(x, torch.ones(4 * SIZE, SIZE, requires_grad=True))),
        ("attention", lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
        ("memory", lambda x: torch.exp(torch.exp(x))),
    ],
)
def test_operators_are_counted_by_kind(kind, operation):
    seconds = seconds_of(operation)
    assert max(seconds, key=seconds.get) == kind
    assert seconds["host"] == 0


def test_operators_outside_of_passes_are_not_counted():
    assert sum(seconds_of(torch.exp, outside=True).values()) == 0


def test_host_is_what_is_left_of_the_passes():
    kinds = ComputeKinds(torch.device("cpu"))
    kinds.seconds |= {"matmul": 2.0, "memory": 1.0}
    kinds.of_passes(7.0)
    assert kinds.seconds["host"] == 4.0
