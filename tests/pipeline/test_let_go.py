"""What a stage gave lets go of its data once it is on its way; its backward is none the worse."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from parallel3d.pipeline.executor import free_data

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("needs_its_result", [False, True])
def test_data_of_an_output_is_freed_and_its_graph_kept(needs_its_result):
    layer = nn.Linear(8, 4)
    x = torch.randn(3, 8, requires_grad=True)

    def stage():
        y = layer(x) + 1
        return y.tanh() if needs_its_result else y

    stage().backward(torch.ones(3, 4))
    expected = x.grad
    x.grad = None
    output = stage()
    sent = output.detach()
    held = StorageWeakRef(sent.untyped_storage())
    value = sent.clone()
    free_data(output)
    assert torch.equal(sent, value)  # a message on its way
    del sent
    assert held.expired() != needs_its_result
    assert output.shape == (3, 4) and output.untyped_storage().nbytes() == 4
    output.backward(torch.ones(3, 4))
    assert torch.equal(x.grad, expected)
