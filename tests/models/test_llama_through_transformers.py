"""The family of any decoder against the hand-written llama, on equal weights and in one process."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d import models
from parallel3d.mesh.fake_groups import make_fake_groups
from parallel3d.models.llama import huggingface as llama
from parallel3d.models.transformers import huggingface as any_decoder
from parallel3d.models.transformers.stand_ins import Remembered
from parallel3d.pipeline.stages import build_layer
from parallel3d.verify.local_ranks import run_locally
from tests.contexts import layer_context
from tests.models.families import small, weights_of

pytestmark = pytest.mark.gloo
TOKENS = (2, 16)


class Operators(TorchDispatchMode):
    """Counts torch's own operators inside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


class Collectives(TorchDispatchMode):
    """Notes the collectives inside, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def configs():
    """A small llama of the hand-written family, and the same for the family of any decoder."""
    written = small("llama", num_key_value_heads=2)
    fields = llama.architecture(written).to_dict()
    kept = {name: value for name, value in fields.items() if value is not None}
    section = {"family": "transformers", "config": kept, "vocab_size": written.vocab_size}
    return written, models.config_class("transformers").model_validate(section)


def built(config, group):
    """The layers of a model on the last rank of a group."""
    return {s.name: build_layer(s, layer_context(group)) for s in models.layers(config)}


def load(layers, config, names_of, weights):
    """Set all weights from those by transformers' names."""
    for layer, module in layers.items():
        for name, parameter in module.named_parameters():
            parts = names_of(config, f"{layer}.{name}", tuple(parameter.shape))
            values = [weights[part.name].flatten() for part in parts]
            parameter.data.copy_(torch.cat(values).view(parameter.shape))


def loss_and_gradients(layers, config, exported):
    """The loss of random text, and its gradients by transformers' names."""
    text = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    first, *blocks, head = layers.values()
    x = first(text[:, :-1])
    for block in blocks:
        x = block(x)
    loss = head(x, text[:, 1:])
    loss.backward()
    gradients = {}
    for layer, module in layers.items():
        for name, parameter in module.named_parameters():
            gradients[f"{layer}.{name}"] = parameter.grad
    return loss, exported(config, gradients)


def collectives(block, hidden):
    """The collectives of a block's forward, and those of its backward."""
    x = torch.zeros(*TOKENS, hidden, requires_grad=True)
    with Collectives() as forward:
        y = block(x)
    with Collectives() as backward:
        y.sum().backward()
    return forward.names, backward.names


def operators(block, hidden):
    """The operators of a block's forward and backward, where it has run before."""
    x = torch.zeros(*TOKENS, hidden, requires_grad=True)
    block(x).sum().backward()
    with Operators() as counted:
        y = block(x)
        y.backward(torch.ones_like(y))
    return counted.count


def compared(rank):
    """Both families' losses and gradients in one process, and their blocks' collectives on two."""
    groups = make_fake_groups((1, 2))
    families = [
        (config, part) for config, part in zip(configs(), (llama, any_decoder), strict=True)
    ]
    results = []
    weights = llama.to_huggingface(families[0][0], weights_of(families[0][0]))
    for config, family in families:
        layers = built(config, groups[1])
        load(layers, config, family.parts, weights)
        computed = loss_and_gradients(layers, config, family.to_huggingface)
        block = built(config, groups[2])["blocks.0"]
        counts = [
            operators(built(config, g)["blocks.0"], config.hidden_size) for g in groups.values()
        ]
        results.append((*computed, collectives(block, config.hidden_size), counts))
    return results


def test_any_decoder_equals_llama():
    [(written, generic)] = run_locally(compared, 1)
    loss, gradients, sent, counts = written
    other_loss, other_gradients, other_sent, other_counts = generic
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in other_gradients.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, (name, error)
    assert other_sent == sent
    assert [len(names) for names in sent] == [2, 2]
    for count, other in zip(counts, other_counts, strict=True):
        assert other <= 1.15 * count


class Angles(torch.nn.Module):
    """Angles, as a model of transformers computes them."""

    def forward(self, x, positions):
        return (positions * 0.5).to(x.dtype)


def test_angles_are_computed_on_the_meta_device():
    angles = Remembered(Angles())
    assert angles(torch.empty(1, 4, device="meta"), torch.arange(4, device="meta")).is_meta
    assert angles.is_plain is None
    assert angles(torch.ones(1, 4), torch.arange(4)).tolist() == [0, 0.5, 1, 1.5]
    assert angles.is_plain
