"""Experts against transformers: first which experts each token gets, then the numbers.

A tie of two scores, or 1e-7 between them, sends a token to another expert, and its numbers are then
others. So choices are compared where both sides route alike before: our modules decide by
themselves at each layer, and then take the choice of transformers.
"""

from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel3d import models
from parallel3d.model.spec import named_params
from parallel3d.models.moe import huggingface
from parallel3d.models.moe.blocks import Head, Router
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey
from parallel3d.verify.reference import in_our_names
from tests.models.families import batch_of, small, weights_of

pytestmark = pytest.mark.gloo

TOLERANCE = 1e-5
GAP = 1e-5  # largest distance of two scores at which the choice may differ
SHIFT = 5e-7  # scale of the noise that plants near-ties
SEQ = 48
QWEN3 = {"num_key_value_heads": 2, "head_dim": 16, "qk_norm": True, "norm_topk_prob": True}
MODELS = {
    "Mixtral": small("moe", num_key_value_heads=2, norm_topk_prob=True),
    "Mixtral, logits": small("moe", num_experts=4, router="topk_softmax"),
    "Qwen3-MoE": small(
        "moe", num_experts=16, num_experts_per_tok=4, first_k_dense_replace=1, **QWEN3
    ),
    "OLMoE": small(
        "moe", num_experts_per_tok=3, qk_norm=True, qk_norm_over="width", norm_topk_prob=False
    ),
    "DeepSeek-V3's routing": small(
        "moe", num_hidden_layers=3, num_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5, router="sigmoid",
        score_bias=True, moe_intermediate_size=24, **QWEN3,
    ),
}  # fmt: skip


def of_transformers(config, weights, tokens, labels):
    """Logits, loss, gradients by our names, and the chosen experts of each sparse layer."""
    model = huggingface.reference(config)
    chosen = []
    model.load_state_dict(huggingface.to_huggingface(config, weights))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return logits.detach(), loss.item(), in_our_names(config, gradients), chosen


class Ours:
    """Our modules in one process; with `replayed` choices each router takes those."""

    def __init__(self, config, weights, replayed=None):
        self.gaps = []
        self.rows = 0
        self.logits = None
        context = LayerContext(dist.ProcessGroup(0, 1), RandomKey(0, 0))
        self.layers = []
        self.named = {}
        choices = iter(replayed or [])
        for spec in models.layers(config):
            path, _, name = spec.build.partition(":")
            module = getattr(import_module(path), name)(config, spec.name, context)
            for name, parameter in module.named_parameters():
                parameter.data = weights[f"{spec.name}.{name}"].clone()
                self.named[f"{spec.name}.{name}"] = parameter
            for router in (m for m in module.modules() if isinstance(m, Router)):
                if replayed is not None:
                    router._choose = self.replay(router._choose, next(choices))
            if isinstance(module, Head):
                module.output.register_forward_hook(self.note)
            self.layers.append(module)

    def note(self, module, args, output):
        with torch.no_grad():
            self.logits = module.logits(args[0])

    def replay(self, choose, theirs):
        """A choice that notes how far apart the scores are where ours is another."""

        def replaying(scores):
            own = choose(scores).sort(-1).values
            seen = theirs.sort(-1).values
            for token in (own != seen).any(-1).nonzero().flatten().tolist():
                a = set(own[token].tolist())
                b = set(seen[token].tolist())
                pair = [scores[token, [*only]].sort().values for only in (a - b, b - a)]
                self.gaps.append(float((pair[0] - pair[1]).abs().max()))
            self.rows += len(own)
            return theirs

        return replaying

    def loss(self, tokens, labels):
        x = tokens
        for layer in self.layers[:-1]:
            out = layer(x, None)
            x = out if isinstance(out, torch.Tensor) else out[0]
        loss = self.layers[-1](x, labels)
        loss.backward()
        return loss.item()


def errors(ours, loss, expected):
    logits, expected_loss, gradients, _ = expected
    differences = {
        "logits": float((ours.logits - logits).abs().max()),
        "loss": abs(loss - expected_loss),
    }
    for name, parameter in ours.named.items():
        if not name.endswith("score_bias"):  # by our own rule, its gradient is the excess load
            largest = gradients[name].abs().max()
            differences[name] = float((parameter.grad - gradients[name]).abs().max() / largest)
    return differences


@pytest.mark.parametrize("name", MODELS)
def test_routing_and_numbers_equal_those_of_transformers(name):
    config = MODELS[name]
    (tokens, labels) = batch_of(MODELS[name], SEQ)
    weights = weights_of(config)
    expected = of_transformers(config, weights, tokens, labels)
    ours = Ours(config, weights, expected[3])
    differences = errors(ours, ours.loss(tokens, labels), expected)
    worst = max(differences, key=differences.get)
    print(
        f"{name}: {len(ours.gaps)} of {ours.rows} tokens differ; {worst} {differences[worst]:.1e}"
    )
    assert ours.rows == tokens.numel() * len(expected[3]) > 0
    assert all(gap < GAP for gap in ours.gaps) and len(ours.gaps) <= ours.rows // 100
    assert differences[worst] < TOLERANCE, f"{worst}: {differences[worst]:.1e}"
    assert {n for n, p in named_params(models.layers(config)).items()} == ours.named.keys()


@pytest.mark.parametrize("name", ["Mixtral", "OLMoE"])
def test_near_ties_are_counted_and_replayed(name):
    """Two experts whose scores differ by rounding, the other way round on our side."""
    config = MODELS[name]
    (tokens, labels) = batch_of(MODELS[name], SEQ)
    theirs = weights_of(config)
    router = theirs["blocks.0.mlp.router.weight"]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(router[0].shape, generator=generator) * SHIFT
    router[1] = router[0] + noise
    mine = dict(theirs, **{"blocks.0.mlp.router.weight": router.clone()})
    mine["blocks.0.mlp.router.weight"][1] = router[0] - noise
    expected = of_transformers(config, theirs, tokens, labels)
    ours = Ours(config, mine, expected[3])
    differences = errors(ours, ours.loss(tokens, labels), expected)
    assert len(ours.gaps) > 5 and max(ours.gaps) < GAP, ours.gaps
    assert max(differences.values()) < 5 * TOLERANCE, differences  # the weights differ by 2 SHIFT
    alone = Ours(config, mine)
    differences = errors(alone, alone.loss(tokens, labels), expected)
    assert differences["logits"] > 1e-2, "without the replay the same model has other numbers"
