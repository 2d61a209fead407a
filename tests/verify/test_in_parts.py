"""Products in parts are the same products, whose parts are rounded as ranks round them."""

import pytest
import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from parallel3d.verify.in_parts import ProductsInParts

pytestmark = pytest.mark.gloo

IN = 12
OUT = 10


def gradients(layer, x, num_parts):
    """Return the output of a layer, and the gradients of its input and parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with ProductsInParts(num_parts):
        y = layer(x)
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("kind", [torch.nn.Linear, lambda n, m: Conv1D(m, n)])
def test_sum_of_the_parts_is_the_product(kind, num_parts):
    torch.manual_seed(0)
    layer = kind(IN, OUT).double()
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    for own, right in zip(gradients(layer, x, num_parts), gradients(layer, x, 1), strict=True):
        torch.testing.assert_close(own, right)


def test_parts_are_rounded_before_they_are_added():
    """bf16 has 8 bits: next to 1 it holds the sum of the small parts, and neither of them alone."""
    x = torch.tensor([[1.0, 2.0**-8, 2.0**-8]], dtype=torch.bfloat16)
    weight = torch.ones(1, 3, dtype=torch.bfloat16)
    assert F.linear(x, weight) == 1 + 2**-7
    with ProductsInParts(3):
        assert F.linear(x, weight) == 1
