"""What a layer must not hold: whole-vocabulary logits, or a weight that ZeRO-3 has released."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import parallel3d.tensor.linear as linear_module
import parallel3d.tensor.output as output_module
from parallel3d.mesh.mesh import Mesh
from parallel3d.models.gpt.blocks import Block, Embedding, Head
from parallel3d.models.gpt.spec import Config
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dropout import RandomKey
from parallel3d.tensor.linear import linear
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo

VOCAB = 97  # the length of no other dim
CONFIG = Config(
    family="gpt", hidden_size=8, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCAB,
    max_position_embeddings=16,
)  # fmt: skip


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operator gives."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.seen.add((func.__name__.split(".")[0], tuple(tensor.shape)))
        return out


def shapes_of_heads(rank):
    return {tp: shapes_of_head(Mesh(1, 4 // tp, tp).group("tp")) for tp in (1, 2, 4)}


def shapes_of_head(group):
    context = LayerContext(group, RandomKey(0))
    head = Head(CONFIG, "head", context)
    for parameter in head.parameters():
        parameter.data.normal_()
    x = torch.randn(2, 3, 8, requires_grad=True)
    with Shapes() as shapes:
        head(x, torch.randint(VOCAB, (2, 3))).backward()
    assert x.grad is not None
    return shapes.seen


@pytest.fixture(scope="module")
def heads():
    return run_locally(shapes_of_heads, 4)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_whole_vocabulary_logits_exist_on_no_rank(heads, tp):
    for seen in (shapes[tp] for shapes in heads):
        assert any(name == "mm" for name, _ in seen)
        whole = {(name, shape) for name, shape in seen if VOCAB in shape}
        assert bool(whole) == (tp == 1)  # on one rank the recorder does see them
        assert tp == 1 or all(torch.Size(shape).numel() < 2 * 3 * VOCAB for _, shape in seen)


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
    context = LayerContext(mesh.group("tp"), RandomKey(0))
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


def test_no_layer_keeps_a_released_weight_alive(monkeypatch, mesh):
    """A view that autograd saves would hold the gathered weights until the backward pass."""
    tokens = torch.randint(VOCAB, (2, 5))

    def alive():
        torch.manual_seed(0)
        held, x = [], tokens
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
def test_linear_by_finite_differences(shape):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, weight))
