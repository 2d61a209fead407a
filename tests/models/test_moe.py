"""Blocks with experts on tensor-parallel ranks against plain_moe.py: losses and every gradient.

What moves the bias of a score, the shares of the experts, is compared beside the gradients: the
bias steps by a sign alone, so training would not tell most wrong counts.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from parallel3d.model.recompute import FULL, NONE
from parallel3d.models.moe import blocks, huggingface
from parallel3d.tensor import experts
from tests.models.families import batch_of, build, on_ranks, part, small, weights_of
from tests.models.plain_moe import Plain
from tests.museum.exhibit import replaced, wrapped

pytestmark = pytest.mark.gloo

AUX = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}
CONFIGS = {
    "Mixtral": {"num_key_value_heads": 2, "router_aux_loss": "pooled", **AUX},
    "Qwen3": {"qk_norm": True, "decoder_sparse_step": 2, "router_aux_loss": "sequence", **AUX},
    "OLMoE": {
        "norm_topk_prob": False, "qk_norm": True, "qk_norm_over": "width",
        "num_key_value_heads": 2, "capacity_factor": 1.0,
    },
    "DeepSeek-V3": {
        "router": "sigmoid", "score_bias": True, "n_group": 4, "topk_group": 2, **AUX,
        "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    },
    "top-k first": {"router": "topk_softmax", "score_bias": True},
    "odd sizes": {"moe_intermediate_size": 36, "num_experts": 5, "num_experts_per_tok": 3},
}  # fmt: skip
MESHES = ((2, False, NONE), (2, True, FULL), (2, True, NONE))
ON_FOUR = ((4, True, NONE),)
# One of them each, in turn; the faults of DeepSeek-V3, and "none" of them, are on the first.
ITS_MESHES = {n: MESHES[i % 3 :][:1] for i, n in enumerate(CONFIGS)}


def counted_by_each(original, self, routing, batch):
    side_losses = original(self, routing, batch)
    tp = self.context.group.size()
    return {
        name: s._replace(value=s.value.detach() + tp * (s.value - s.value.detach()))
        for name, s in side_losses.items()
    }


# Published: torchtitan 4054 (gradients below the experts), 4154 (the bias, over tp twice).
FAULTS = {
    "none": nullcontext,
    "side losses counted on each rank": lambda: wrapped(
        blocks.MoE, "_side_losses", counted_by_each
    ),
    "input gradient unreduced": lambda: replaced(blocks, "copy_to_group", lambda x, context: x),
    "experts in an unstable order": lambda: wrapped(
        experts, "_gather", lambda original, rows, place, k: original(rows, place.flip(0), k)
    ),
}


def router_of(stages, bias):
    return next(m for m in stages.modules() if getattr(m, "score_bias", None) is bias)


def computed(config, fault, meshes):
    """For each mesh loss, side losses, and gradients as (name, cut, value), summed if partial.

    A bias that balances loads has each expert's share of the tokens in place of a gradient.
    """
    results = []
    for tp, sequence_parallel, recompute in meshes:
        with FAULTS[fault]():
            built, mesh = build(
                config, tp, 16, sequence_parallel, activation_checkpointing=recompute
            )
            loss, side = built.module(0, *batch_of(config, 16))
            (loss + side.total).backward()
        gradients = []
        for h in built.held:
            if h.spec.role == "balance":
                assert h.parameter.grad is None
                counts = router_of(built.module, h.parameter).counts
                gradients.append((h.name, h.cut, counts / counts.sum()))
                continue
            if h.partial:
                dist.all_reduce(h.parameter.grad, group=mesh.tensor.group)
            gradients.append((h.name, h.cut, h.parameter.grad))
        results.append((loss.item(), side.total.item(), gradients))
    return results


def errors(config, ranks):
    """The largest relative error of each mesh, of losses and gradients."""
    weights = {n: w.double().requires_grad_() for n, w in weights_of(config).items()}
    model = Plain(config, weights)
    (tokens, labels) = batch_of(config, 16)
    loss = model.loss(tokens, labels)
    (loss + model.side).backward()
    for name, weight in weights.items():
        if name.endswith("score_bias"):
            counts = model.counts[name.removesuffix(".mlp.router.score_bias")].double()
            weight.grad = counts / counts.sum()
    expected = torch.stack([loss, torch.as_tensor(model.side)]).detach()
    for results in zip(*ranks, strict=True):
        worst = 0.0
        for own, side, gradients in results:
            off = (torch.tensor([own, side]) - expected).abs() / expected.clamp(min=1e-9)
            worst = max(worst, off.max().item())
            for name, cut, value in gradients:
                right = weights[name].grad
                off = (value - part(right, cut)).abs().max() / right.abs().max()
                worst = max(worst, off.item())
        yield worst


@pytest.fixture(scope="module")
def every():
    configs = {n: small("moe", **{"intermediate_size": 64} | c) for n, c in CONFIGS.items()}
    jobs = [(config, "none", ITS_MESHES[name]) for name, config in configs.items()]
    faulty = [(configs["DeepSeek-V3"], fault, MESHES[:1]) for fault in FAULTS]
    results = on_ranks(computed, [*jobs, *faulty], 2)
    return configs, dict(zip([*configs, *FAULTS], results, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_those_of_one_plain_process(name, every):
    configs, results = every
    for mesh, error in zip(ITS_MESHES[name], errors(configs[name], results[name]), strict=True):
        assert error < 1e-5, mesh


@pytest.mark.slow  # by default tests/models/test_model.py has experts with all switches on four
def test_gradients_on_four_ranks_equal_those_of_one_plain_process(every):
    configs, _ = every
    jobs = [(config, "none", ON_FOUR) for config in configs.values()]
    for (name, config), ranks in zip(configs.items(), on_ranks(computed, jobs), strict=True):
        (error,) = errors(config, ranks)
        assert error < 1e-5, name


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_experts_is_detected(fault, every):
    configs, results = every
    (error,) = errors(configs["DeepSeek-V3"], results[fault])
    assert (error > 1e-3) == (fault != "none")


def test_pooled_loss_equals_that_of_transformers():
    """Its value, and its own gradient by each router: also where layers are computed again."""
    settings = {"router_aux_loss": "pooled", "router_aux_loss_coef": 0.1}
    config = small("moe", num_key_value_heads=2, **settings)
    model = huggingface.reference(config)
    model.load_state_dict(huggingface.to_huggingface(config, weights_of(config)))
    expected = model(batch_of(config)[0], output_router_logits=True).aux_loss
    expected.backward()
    gates = [layer.mlp.gate.weight.grad for layer in model.model.layers]
    (results,) = on_ranks(pooled, [(config,)], 1)
    for value, gradients in results:
        assert value == pytest.approx(len(gates) * expected.item(), rel=1e-5)  # for each layer
        for gate, gradient in zip(gates, gradients, strict=True):
            torch.testing.assert_close(gradient, gate, rtol=1e-4, atol=1e-7)


def pooled(config):
    built, _ = build(config, 1, 16, False, activation_checkpointing=FULL)
    _, side = built.module(0, *batch_of(config))
    routers = [h.parameter for h in built.held if "router" in h.name]
    side.total.backward()
    return side.values["balance"].item(), [p.grad / 0.1 for p in routers]


def test_evaluation_counts_nothing():
    """No load of it reaches the bias (torchtitan 4148)."""
    (results,) = on_ranks(evaluated, [(small("moe", score_bias=True),)], 1)
    assert results[0] == [0, 0]


def evaluated(config):
    built, _ = build(config, 1)
    built.module.eval()
    with torch.no_grad():
        built.module(0, *batch_of(config))
    biases = [h.parameter for h in built.held if h.spec.role == "balance"]
    return [int(router_of(built.module, bias).counts.sum()) for bias in biases]
