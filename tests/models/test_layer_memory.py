"""What a layer must not hold: a weight that ZeRO-3 has released.

Logits of the whole vocabulary on a rank would be seen by the peak of test_layer_cost_of_torch.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import parallel3d.tensor.linear as linear_module
import parallel3d.tensor.vocab as output_module
from parallel3d.mesh.mesh import Mesh
from parallel3d.models.gpt.blocks import Block, Embedding, Head
from parallel3d.models.gpt.spec import Config
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.linear import linear
from parallel3d.tensor.random_key import RandomKey

pytestmark = pytest.mark.gloo

VOCAB = 97  # the length of no other dim
CONFIG = Config(
    family="gpt",
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    vocab_size=VOCAB,
    max_position_embeddings=16,
)


def release(module):
    """Take the weights' storage away, as ZeRO-3 does after a layer's forward; gives what was."""
    values = {p: p.data.clone() for p in module.parameters()}
    storages = [StorageWeakRef(p.untyped_storage()) for p in values]
    for p in values:
        p.data = torch.empty(0)
    return values, sum(not s.expired() for s in storages)


@pytest.fixture
def mesh():
    made = Mesh()
    yield made
    made.close()


def make_layers(mesh):
    context = LayerContext(mesh.tensor.group, RandomKey(0))
    layers = [
        Embedding(CONFIG, "e", context),
        Block(CONFIG, "b", context),
        Head(CONFIG, "h", context),
    ]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_()
    return layers


def plain(x, weight):
    return F.linear(x, weight.flatten(0, -2))


def plain_loss(x, weight, labels, **_):
    return F.cross_entropy(plain(x, weight).mT, labels, reduction="none")


def test_layers_do_not_keep_released_weights(monkeypatch, mesh):
    """A view that autograd saves would hold the gathered weights until the backward pass."""
    tokens = torch.randint(VOCAB, (2, 5))

    def alive():
        torch.manual_seed(0)
        held = []
        x = tokens
        layers = make_layers(mesh)
        for layer in layers:
            x = layer(x, tokens) if isinstance(layer, Head) else layer(x)
            held.append(release(layer))
        for values, _ in held:
            for parameter, value in values.items():
                parameter.data = value
        x.backward()
        gradients = [p.grad for layer in layers for p in layer.parameters()]
        return [count for _, count in held], gradients

    counts, gradients = alive()
    assert counts == [0, 0, 0]
    monkeypatch.setattr(linear_module, "linear", plain)
    monkeypatch.setattr(
        linear_module, "column_linear", lambda x, ws, *rest, **more: [plain(x, *ws)]
    )
    monkeypatch.setattr(output_module, "vocab_parallel_loss", plain_loss)
    counts, expected = alive()
    assert counts == [0, 4, 1]  # torch's own: qkv, output, up, down; the logits
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4)])
def test_gradient_of_linear_by_finite_differences(shape):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, weight))
